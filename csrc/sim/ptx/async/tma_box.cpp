// The geometry of tensor copies: PTX ISA 5.5.3 "Tiled Mode", 5.5.7 "Swizzling Modes", 5.5.1.1 "Sub-byte Types".
#include <algorithm>

#include "async/tma.h"
#include "units/formats.h"

namespace ptx {

namespace {

void check_map(const Context& c, const TensorMap& t, unsigned dims, bool scattered) {
  const std::string why = why_invalid(t);
  if (!why.empty()) c.fail("the tensor map is invalid: " + why);
  for (unsigned d = 0; d < t.rank; d++)
    if (t.size[d] == 1ull << 32)
      c.fail("the tensor map is invalid: size 0 in dimension " + std::to_string(d) +
             " (encoded as 2^32, with which a GPU refuses the instruction)");
  if (t.rank != dims)
    c.fail("the tensor map has rank " + std::to_string(t.rank) + ", the instruction " + std::to_string(dims));
  if (scattered && t.box[1] != 1)
    c.fail("gather4 and scatter4 need a box of one row, the tensor map has " + std::to_string(t.box[1]));
}

// The part of a row that is inside the tensor, in bytes from its first one.
void clip(const Context& c, const TensorMap& t, int64_t x, uint32_t width, uint32_t& first, uint32_t& last) {
  const int64_t bits = element_bits(t.element), size = static_cast<int64_t>(t.size[0]);
  if (x * bits % 8 != 0) c.fail("coordinate 0 is " + std::to_string(x) + ": the row would begin inside a byte");
  const bool padded = t.element == Element::b4x16_p64 || t.element == Element::b6x16_p32;
  if (padded && x % 128 != 0)
    c.fail("coordinate 0 is " + std::to_string(x) + ", " + element_name(t.element) + " needs a multiple of 128");
  const int64_t low = std::max<int64_t>(0, -x), high = std::min<int64_t>(t.box[0], size - x);
  first = low < high ? static_cast<uint32_t>(low * bits / 8) : 0;
  last = low < high ? static_cast<uint32_t>(high * bits / 8) : 0;
  if (last > width) last = width;
}

void add_row(const Context& c, Box& b, uint64_t address, uint32_t first, uint32_t last, bool write) {
  uint8_t* memory = reinterpret_cast<uint8_t*>(address);
  if (first < last) memory = c.launch.global(c, address + first, last - first, write) - first;
  b.rows.push_back({memory, first, last});
}

// What fills the elements outside the tensor. The value of the special NaN is not documented: all bits but the sign.
void fill(const TensorMap& t, uint8_t* to, uint32_t bytes) {
  std::memset(to, t.nan_fill ? 0xff : 0, bytes);
  if (!t.nan_fill) return;
  const uint32_t size = element_bits(t.element) / 8;
  for (uint32_t i = size - 1; i < bytes; i += size) to[i] = 0x7f;
}

// tf32 is rounded when it is loaded, and the .ftz types flush subnormals to zero. The direction of the rounding is
// modelled as that of cvt.rna.
void convert(const TensorMap& t, uint8_t* row, uint32_t bytes) {
  const bool flush = t.element == Element::f32_ftz || t.element == Element::tf32_ftz;
  const bool round = t.element == Element::tf32 || t.element == Element::tf32_ftz;
  if (!flush && !round) return;
  for (uint32_t i = 0; i + 4 <= bytes; i += 4) {
    uint32_t bits;
    std::memcpy(&bits, row + i, 4);
    if (flush && (bits & 0x7f800000u) == 0) bits &= 0x80000000u;
    if (round) bits = tf32_of_f32(as_float(bits), Round::nearest_away);
    std::memcpy(row + i, &bits, 4);
  }
}

}  // namespace

Box box_at(const Context& c, const TensorMap& t, const int32_t* x, unsigned n, bool scattered, bool write) {
  check_map(c, t, scattered ? 2 : n, scattered);
  if (write)
    for (unsigned i = 0; i < n; i++)
      if (x[i] < 0)
        c.fail("coordinate " + std::to_string(i) + " of a tensor store is " + std::to_string(x[i]) + ", negative");
  Box b;
  b.map = t;
  b.width = t.box[0] * element_bits(t.element) / 8;
  if (t.element == Element::b4x16_p64) b.data = 8;
  if (t.element == Element::b6x16_p32) b.data = 12;
  const uint32_t inner = b.width / b.data * 16;
  if (t.atomicity == Atomicity::b32_flip8) b.chunk = b.data = 8;
  // A swizzle wider than the row leaves the rest of its span unused.
  b.pitch = std::max(inner, swizzle_bytes(t.swizzle));
  uint32_t first, last;
  clip(c, t, x[0], b.width, first, last);
  const uint64_t start = t.base + static_cast<uint64_t>(int64_t{x[0]} * element_bits(t.element) / 8);
  if (scattered) {
    for (unsigned i = 1; i < 5; i++) {
      const bool inside = x[i] >= 0 && static_cast<uint64_t>(x[i]) < t.size[1];
      add_row(c, b, start + static_cast<uint64_t>(x[i]) * t.stride[1], first, inside ? last : first, write);
    }
    return b;
  }
  uint32_t count[5] = {1, 1, 1, 1, 1}, at[5] = {};
  uint32_t rows = 1;
  for (unsigned d = 1; d < t.rank; d++) rows *= count[d] = (t.box[d] + t.step[d] - 1) / t.step[d];
  b.rows.reserve(rows);
  for (uint32_t r = 0; r < rows; r++) {
    uint64_t address = start;
    bool inside = true;
    for (unsigned d = 1; d < t.rank; d++) {
      const int64_t index = int64_t{x[d]} + int64_t{at[d]} * t.step[d];
      inside = inside && index >= 0 && static_cast<uint64_t>(index) < t.size[d];
      address += static_cast<uint64_t>(index) * t.stride[d];
    }
    add_row(c, b, address, first, inside ? last : first, write);
    for (unsigned d = 1; d < t.rank && ++at[d] == count[d]; d++) at[d] = 0;
  }
  return b;
}

void load_box(const Box& b, SharedPlace p) {
  std::vector<uint8_t> row(b.width);
  for (size_t r = 0; r < b.rows.size(); r++) {
    const BoxRow& from = b.rows[r];
    if (from.first != 0 || from.last != b.width) fill(b.map, row.data(), b.width);
    if (from.first < from.last) std::memcpy(row.data() + from.first, from.memory + from.first, from.last - from.first);
    // The fill is no input of the conversions: zero stays zero and NaN stays NaN under both.
    convert(b.map, row.data(), b.width);
    const uint32_t base = p.offset + static_cast<uint32_t>(r) * b.pitch;
    for (uint32_t at = 0, i = 0; i < b.width; at += b.chunk, i += b.data)
      std::memcpy(p.cta->shared + swizzled(b.map, base + at), row.data() + i, b.data);
  }
}

void gather_box(const Box& b, SharedPlace p, Buffer& out) {
  out.resize(b.bytes());
  for (size_t r = 0; r < b.rows.size(); r++) {
    const uint32_t base = p.offset + static_cast<uint32_t>(r) * b.pitch;
    uint8_t* row = out.data() + r * b.width;
    for (uint32_t at = 0, i = 0; i < b.width; at += b.chunk, i += b.data)
      std::memcpy(row + i, p.cta->shared + swizzled(b.map, base + at), b.data);
  }
}

void store_box(const Box& b, const Buffer& bytes) {
  for (size_t r = 0; r < b.rows.size(); r++) {
    const BoxRow& to = b.rows[r];
    if (to.first < to.last)
      std::memcpy(to.memory + to.first, bytes.data() + r * b.width + to.first, to.last - to.first);
  }
}

void reduce_box(const Box& b, const Buffer& bytes, Reducer reduce) {
  for (size_t r = 0; r < b.rows.size(); r++) {
    const BoxRow& to = b.rows[r];
    if (to.first < to.last) reduce(to.memory + to.first, bytes.data() + r * b.width + to.first, to.last - to.first);
  }
}

void tell_shared(Checker& check, const AsyncRef& ref, const Box& b, SharedPlace p, bool write) {
  // A swizzle permutes the bytes within a row that is as wide as itself: the whole box is one range.
  if (b.data == b.chunk && b.pitch == b.width) {
    check.access(ref, Space::shared, p.cta, p.offset, b.shared_bytes(), write);
    return;
  }
  for (size_t r = 0; r < b.rows.size(); r++) {
    const uint32_t base = p.offset + static_cast<uint32_t>(r) * b.pitch;
    for (uint32_t at = 0, i = 0; i < b.width; at += b.chunk, i += b.data)
      check.access(ref, Space::shared, p.cta, swizzled(b.map, base + at), b.data, write);
  }
}

void tell_global(Checker& check, const AsyncRef& ref, const Box& b, bool write, bool reduction) {
  for (const BoxRow& row : b.rows) {
    if (row.first == row.last) continue;
    const uint64_t address = reinterpret_cast<uint64_t>(row.memory) + row.first;
    if (reduction) check.reduce(ref, Space::global, nullptr, address, row.last - row.first);
    else check.access(ref, Space::global, nullptr, address, row.last - row.first, write);
  }
}

}  // namespace ptx
