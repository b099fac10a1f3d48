// mma.sync (PTX ISA 9.7.14.5.14). Not there: .m8n8k4 on f16 (four products of Volta), single-bit operands.
#include "tensor/mma.h"

#include <array>
#include <cmath>

#include "async/async.h"
#include "tensor/fragments.h"

namespace ptx {
namespace {

struct Mma {
  unsigned m = 16, n = 8, k = 0;
  Element a_type = Element::f16, b_type = Element::f16;
  Packing packing = Packing::dense;
  Sum sum = Sum::f32;
  bool saturate = false;
  std::string name;
  std::vector<Slot> d, a, b, c;
  // Block scaling: a factor for each `block` elements of k.
  unsigned block = 0;
  bool ue8m0 = false;
  Slot scale_a = 0, scale_b = 0, byte_a = 0, thread_a = 0, byte_b = 0, thread_b = 0;
};

unsigned selector(Context& c, const Mma& r, Slot s, unsigned limit, unsigned step, const char* what) {
  const unsigned value = c.warp.v32(s).x[c.first()] & 0xffff;
  if (value > limit || value % step)
    c.fail("mma." + r.name + ": " + what + " is " + std::to_string(value) + ", accepted are multiples of " +
           std::to_string(step) + " up to " + std::to_string(limit));
  return value;
}

// 9.7.14.3 "Block Scaling for mma.sync": in every quad, threads 2 * thread_a and 2 * thread_a + 1 hold the factors of
// rows g and g + 8, thread thread_b those of column g.
void scale(Context& c, const Mma& r, float* a, float* b) {
  const unsigned factors = r.k / r.block, step = factors == 4 ? 4 : factors;
  const unsigned byte_limit = factors == 4 ? 0 : factors == 2 ? 2 : 3;
  const unsigned byte_a = selector(c, r, r.byte_a, byte_limit, step, "byte-id-a");
  const unsigned byte_b = selector(c, r, r.byte_b, byte_limit, step, "byte-id-b");
  const unsigned thread_a = selector(c, r, r.thread_a, 1, 1, "thread-id-a");
  const unsigned thread_b = selector(c, r, r.thread_b, 3, 1, "thread-id-b");
  const auto value = [&](Slot s, unsigned lane, unsigned byte) {
    const uint32_t code = c.warp.v32(s).x[lane] >> 8 * byte & 0xff;
    return r.ue8m0 ? decode_ue8m0(code) : decode_ue4m3(code);
  };
  for (unsigned i = 0; i < r.k; i++) {
    const unsigned of = i / r.block;
    for (unsigned row = 0; row < 16; row++)
      a[row * r.k + i] *= value(r.scale_a, row % 8 * 4 + 2 * thread_a + row / 8, byte_a + of);
    for (unsigned n = 0; n < 8; n++) b[i * 8 + n] *= value(r.scale_b, n * 4 + thread_b, byte_b + of);
  }
}

Step run_mma(Context& c, const Op& op) {
  const Mma& r = record<Mma>(op);
  const unsigned line = bytes_of(r.a_type, r.packing, r.k);
  constexpr unsigned kMost = 64;   // the longest k
  uint8_t bytes[16 * 32];
  float a[16 * kMost], columns[8 * kMost], b[8 * kMost], sums[16 * 8];
  collect_a(c.warp, r.a, r.m, line, bytes);
  decode_elements(r.a_type, r.packing, bytes, r.m * r.k, a);
  collect_b(c.warp, r.b, line, bytes);
  decode_elements(r.b_type, r.packing, bytes, 8 * r.k, columns);
  place_columns(columns, 8, r.k, true, b, 8);
  if (r.block) scale(c, r, a, b);
  std::array<float*, 16> rows;
  for (unsigned i = 0; i < 16; i++) rows[i] = sums + 8 * i;
  multiply({a, r.k, 1}, b, 8, r.m, 8, r.k, rows.data(), false);
  add_fragment(c.warp, r.sum, r.d, &r.c, sums, r.m, 8, r.saturate);
  c.count.flops[r.name] += 2ull * r.m * 8 * r.k;
  return Step::next;
}

// f64: every product is fused into its sum, k ascending from C ("identical to ... .f64 precision fused multiply-add").
Step run_double(Context& c, const Op& op) {
  const Mma& r = record<Mma>(op);
  const auto value = [&](Slot s, unsigned lane) {
    double v;
    std::memcpy(&v, &c.warp.v64(s).x[lane], 8);
    return v;
  };
  const unsigned halves = r.m / 8;
  std::vector<std::array<double, kLanes>> out(r.d.size());
  for (size_t i = 0; i < r.d.size(); i++)
    for (unsigned l = 0; l < kLanes; l++) {
      const unsigned row = l / 4, half = static_cast<unsigned>(i) / 2, column = l % 4 * 2 + i % 2;
      double sum = value(r.c[i], l);
      for (unsigned k = 0; k < r.k; k++)
        sum = std::fma(value(r.a[k / 4 * halves + half], row * 4 + k % 4), value(r.b[k / 4], column * 4 + k % 4), sum);
      out[i][l] = sum;
    }
  for (size_t i = 0; i < r.d.size(); i++) std::memcpy(c.warp.v64(r.d[i]).x, out[i].data(), sizeof(double) * kLanes);
  c.count.flops[r.name] += 2ull * r.m * 8 * r.k;
  return Step::next;
}

struct Name {
  const char* text;
  Element type;
  unsigned bits;
};
constexpr Name kNames[] = {{"f16", Element::f16, 16},  {"bf16", Element::bf16, 16}, {"tf32", Element::tf32, 32},
                           {"e4m3", Element::e4m3, 8}, {"e5m2", Element::e5m2, 8},  {"e3m2", Element::e3m2, 8},
                           {"e2m3", Element::e2m3, 8}, {"e2m1", Element::e2m1, 8},  {"s8", Element::s8, 8},
                           {"u8", Element::u8, 8},     {"s4", Element::s4, 4},      {"u4", Element::u4, 4}};

const Name& name_of(Decoder& d, const std::string& text) {
  for (const Name& n : kNames)
    if (text == n.text) return n;
  d.fail("operand type ." + text + " is not supported");
}

// .dtype.atype.btype.ctype in their order, after all other modifiers have been consumed.
std::vector<std::string> take_types(Decoder& d, Modifiers& m) {
  std::vector<std::string> types;
  for (size_t i = 1; i < d.from.parts.size() && types.size() < 4; i++)
    if (m.take(d.from.parts[i].c_str())) types.push_back(d.from.parts[i]);
  if (types.size() != 4) d.fail("four types are expected: of D, A, B and C");
  return types;
}

void take_shape(Modifiers& m, Mma& r) {
  const std::string shape = m.take_one(
      {"m8n8k4", "m8n8k16", "m8n8k32", "m16n8k4", "m16n8k8", "m16n8k16", "m16n8k32", "m16n8k64"});
  r.m = shape[1] == '8' ? 8 : 16;
  r.k = static_cast<unsigned>(std::stoul(shape.substr(shape.find('k') + 1)));
}

void take_block(Decoder& d, Modifiers& m, Mma& r, const std::string& kind) {
  const std::string size = m.take_optional({"scale_vec::1X", "scale_vec::2X", "scale_vec::4X"}, "");
  const unsigned factors = size.empty() ? (kind == "mxf8f6f4" ? 1 : 2) : static_cast<unsigned>(size[11] - '0');
  const bool fits = kind == "mxf8f6f4" ? factors == 1 : kind == "mxf4" ? factors == 2 : factors > 1 && !size.empty();
  if (!fits) d.fail(".kind::" + kind + " does not go with this .scale_vec");
  r.block = r.k / factors;
}

void set_types(Decoder& d, Mma& r, const std::vector<std::string>& types, const std::string& kind) {
  const Name &a = name_of(d, types[1]), &b = name_of(d, types[2]);
  r.a_type = a.type;
  r.b_type = b.type;
  const bool fp4 = kind == "mxf4" || kind == "mxf4nvf4", any_f8 = !kind.empty() && !fp4;
  const auto narrow = [](Element e) { return e >= Element::e3m2 && e <= Element::e2m1; };
  if ((narrow(a.type) || narrow(b.type)) && kind.empty()) d.fail("4- and 6-bit types need a .kind");
  if (fp4 && (a.type != Element::e2m1 || b.type != Element::e2m1)) d.fail(".kind::" + kind + " is for .e2m1");
  const auto family = [](Element e) {   // types that may be mixed
    if (e >= Element::s4) return 5;
    if (e >= Element::s8) return 4;
    return e >= Element::e4m3 ? 3 : static_cast<int>(e);
  };
  if (family(a.type) != family(b.type) || (any_f8 && family(a.type) != 3))
    d.fail("types ." + types[1] + " and ." + types[2] + " do not go together");
  r.packing = any_f8 ? Packing::container : Packing::dense;
  const unsigned bits = fp4 ? 4 : a.bits, line = r.k * bits / 8;
  const bool fits = r.m == 8 ? line == 16 && bits <= 8 : line == 16 || line == 32;
  if (!fits) d.fail("this shape does not exist for ." + types[1]);
  const bool integer = family(a.type) >= 4;
  r.sum = types[0] == "f32" ? Sum::f32 : types[0] == "f16" ? Sum::f16 : Sum::s32;
  if (types[0] != types[3]) d.fail("D and C have to be of the same type");
  if ((r.sum == Sum::s32) != integer || (types[0] != "f32" && types[0] != "f16" && types[0] != "s32") ||
      (r.sum == Sum::f16 && (a.type == Element::bf16 || a.type == Element::tf32 || r.block)))
    d.fail("D of type ." + types[0] + " does not go with ." + types[1]);
  if (r.saturate && !integer) d.fail(".satfinite is for integers");
  r.name = "mma.sync " + (kind.empty() ? types[1] : kind);
}

void expect(Decoder& d, const std::vector<Slot>& registers, size_t n, const char* what) {
  if (registers.size() != n)
    d.fail(std::string(what) + " has " + std::to_string(registers.size()) + " registers, expected " +
           std::to_string(n));
}

void decode_double(Decoder& d, Op& op, Modifiers& m, Mma& r) {
  take_types(d, m);
  if (r.m == 8 ? r.k != 4 : r.k > 16) d.fail("this shape does not exist for .f64");
  d.count(4, 4);
  r.d = d.destinations(d.operand(0), 8);
  r.a = d.sources(d.operand(1), 8);
  r.b = d.sources(d.operand(2), 8);
  r.c = d.sources(d.operand(3), 8);
  expect(d, r.d, r.m / 4, "D");
  expect(d, r.a, r.m / 8 * r.k / 4, "A");
  expect(d, r.b, r.k / 4, "B");
  expect(d, r.c, r.m / 4, "C");
  r.name = "mma.sync f64";
  op.run = run_double;
  op.extra = std::make_shared<Mma>(std::move(r));
}

void decode_scales(Decoder& d, Mma& r) {
  const auto pair = [&](size_t i, Slot& byte, Slot& thread) {
    const Operand& o = d.operand(i);
    if (o.kind != Operand::vec || o.parts.size() != 2)
      d.fail("{byte-id, thread-id} is expected as operand " + std::to_string(i + 1));
    byte = d.source(o.parts[0], 4);
    thread = d.source(o.parts[1], 4);
  };
  // The ISA's grammar has the bare register; CuTeDSL's MmaMXF4NVF4Op writes {register}, and ptxas takes both.
  const auto word = [&](size_t i) {
    const std::vector<Slot> found = d.sources(d.operand(i), 4);
    expect(d, found, 1, "a scale");
    return found[0];
  };
  d.count(8, 8);
  r.scale_a = word(4);
  pair(5, r.byte_a, r.thread_a);
  r.scale_b = word(6);
  pair(7, r.byte_b, r.thread_b);
}

}  // namespace

// d, a, b, c and, with block scaling, scale-a, {byte, thread}, scale-b, {byte, thread}.
void decode_mma(Decoder& d, Op& op, Modifiers& m) {
  Mma r;
  op.kind = Class::tensor;
  take_shape(m, r);
  m.take_one({"row"});
  m.take_one({"col"});
  r.saturate = m.take("satfinite");
  m.take("rn");
  const std::string kind = m.take_prefix("kind::");
  if (!kind.empty() && kind != "f8f6f4" && kind != "mxf8f6f4" && kind != "mxf4" && kind != "mxf4nvf4")
    d.fail("unknown .kind::" + kind);
  const bool scaled = m.take("block_scale");
  if (scaled != (kind.compare(0, 2, "mx") == 0)) d.fail(".block_scale belongs to the .kind::mx forms");
  if (scaled) take_block(d, m, r, kind);
  for (const std::string& part : d.from.parts)
    if (part == "f64") return decode_double(d, op, m, r);
  if (scaled) {
    const std::string type = m.take_one({"ue8m0", "ue4m3"});
    r.ue8m0 = type == "ue8m0";
    if (!r.ue8m0 && r.k / r.block != 4) d.fail(".ue4m3 goes with .scale_vec::4X");
    decode_scales(d, r);
  } else {
    d.count(4, 4);
  }
  set_types(d, r, take_types(d, m), kind);
  const size_t chunks = bytes_of(r.a_type, r.packing, r.k) / 16;
  r.d = d.destinations(d.operand(0), 4);
  r.a = d.sources(d.operand(1), 4);
  r.b = d.sources(d.operand(2), 4);
  r.c = d.sources(d.operand(3), 4);
  const size_t accumulators = r.m / (r.sum == Sum::f16 ? 8 : 4);
  expect(d, r.d, accumulators, "D");
  expect(d, r.a, chunks * r.m / 8, "A");
  expect(d, r.b, chunks, "B");
  expect(d, r.c, accumulators, "C");
  op.run = run_mma;
  op.extra = std::make_shared<Mma>(std::move(r));
}

}  // namespace ptx
