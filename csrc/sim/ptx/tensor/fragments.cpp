#include "tensor/fragments.h"

#include "machine/lanes.h"

namespace ptx {
namespace {

using F8 = float __attribute__((vector_size(32), aligned(4), may_alias));

// Registers (h, b) of an 8-column block: rows 8 * h .. of `sums`, even columns to one register, odd to the other.
PTX_INLINE void add_block(const float* sums, unsigned n, const float* c0, const float* c1, float* d0, float* d1) {
  for (unsigned row = 0; row < 8; row += 2) {
    const F8 low = *reinterpret_cast<const F8*>(sums + row * n);
    const F8 high = *reinterpret_cast<const F8*>(sums + (row + 1) * n);
    const F8 even = __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14);
    const F8 odd = __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15);
    F8* to0 = reinterpret_cast<F8*>(d0 + 4 * row);
    F8* to1 = reinterpret_cast<F8*>(d1 + 4 * row);
    *to0 = c0 ? even + *reinterpret_cast<const F8*>(c0 + 4 * row) : even;
    *to1 = c1 ? odd + *reinterpret_cast<const F8*>(c1 + 4 * row) : odd;
  }
}

PTX_CLONES void add_f32(V32* file, const Slot* d, const Slot* c, const float* sums, unsigned rows, unsigned n) {
  const unsigned halves = rows / 8;
  for (unsigned block = 0; block < n / 8; block++)
    for (unsigned h = 0; h < halves; h++) {
      const unsigned i = (block * halves + h) * 2;
      const auto lanes = [&](Slot s) { return reinterpret_cast<float*>(file[s].x); };
      add_block(sums + 8 * h * n + 8 * block, n, c ? lanes(c[i]) : nullptr, c ? lanes(c[i + 1]) : nullptr, lanes(d[i]),
                lanes(d[i + 1]));
    }
}

}  // namespace

void collect_a(const Warp& warp, const std::vector<Slot>& registers, unsigned rows, unsigned line, uint8_t* out) {
  const unsigned halves = rows / 8;
  for (size_t r = 0; r < registers.size(); r++) {
    const V32& v = warp.file[registers[r]];
    for (unsigned l = 0; l < kLanes; l++)
      std::memcpy(out + (l / 4 + r % halves * 8) * line + l % 4 * 4 + r / halves * 16, &v.x[l], 4);
  }
}

void collect_b(const Warp& warp, const std::vector<Slot>& registers, unsigned line, uint8_t* out) {
  collect_a(warp, registers, 8, line, out);
}

void add_fragment(Warp& warp, Sum type, const std::vector<Slot>& d, const std::vector<Slot>* c, const float* sums,
                  unsigned rows, unsigned n, bool saturate) {
  if (type == Sum::f32) return add_f32(warp.file.data(), d.data(), c ? c->data() : nullptr, sums, rows, n);
  const unsigned halves = rows / 8;
  for (size_t i = 0; i < d.size(); i++) {
    V32& to = warp.v32(d[i]);
    const V32* from = c ? &warp.v32((*c)[i]) : nullptr;
    for (unsigned l = 0; l < kLanes; l++) {
      const uint32_t before = from ? from->x[l] : 0;
      if (type == Sum::s32) {
        const size_t pair = i / 2, row = l / 4 + pair % halves * 8, column = l % 4 * 2 + i % 2 + pair / halves * 8;
        to.x[l] = add_s32(before, sums[row * n + column], saturate);
      } else {
        const float* sum = sums + (l / 4 + i % halves * 8) * n + l % 4 * 2 + i / halves * 8;
        const uint32_t low = f16_of_f32(sum[0] + f32_of_f16(before & 0xffff));
        to.x[l] = low | f16_of_f32(sum[1] + f32_of_f16(before >> 16)) << 16;
      }
    }
  }
}

void read_fragment(const Warp& warp, Sum type, const std::vector<Slot>& d, float* out, unsigned rows, unsigned n) {
  const unsigned halves = rows / 8;
  for (size_t i = 0; i < d.size(); i++) {
    const V32& from = warp.file[d[i]];
    for (unsigned l = 0; l < kLanes; l++) {
      if (type == Sum::f32) {
        const size_t pair = i / 2;
        out[(l / 4 + pair % halves * 8) * n + l % 4 * 2 + i % 2 + pair / halves * 8] = as_float(from.x[l]);
      } else {
        float* at = out + (l / 4 + i % halves * 8) * n + l % 4 * 2 + i / halves * 8;
        at[0] = f32_of_f16(from.x[l] & 0xffff);
        at[1] = f32_of_f16(from.x[l] >> 16);
      }
    }
  }
}

}  // namespace ptx
