#include "tensor/narrow_sums.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "machine/lanes.h"

namespace ptx {
namespace {

using F8 = float __attribute__((vector_size(32), aligned(4), may_alias));
using I8 = int32_t __attribute__((vector_size(32), aligned(4), may_alias));
using U8 = uint32_t __attribute__((vector_size(32), aligned(4), may_alias));

constexpr float kUnit = 1.0f / 8192.0f;          // 2^-13: the last bit that is kept, in units of the highest place
constexpr float kLeast = 0x1p-110f;              // no product is so small; a sum that is loses what lies 13 bits below
constexpr uint32_t kExponent = 0x7f800000u;
constexpr uint32_t kKept = 0xfffffc00u;          // 13 of a float's 23 bits of fraction

// 2 to the exponent of each number, 0 for 0; those below the type's normal numbers have the least exponent.
void places(const float* numbers, size_t count, Element type, float* out) {
  const float least = std::ldexp(1.0f, type == Element::e4m3 ? -6 : -14);
  for (size_t i = 0; i < count; i++)
    out[i] = numbers[i] == 0 ? 0 : std::max(least, as_float(as_bits(numbers[i]) & kExponent));
}

PTX_INLINE F8 larger(F8 a, F8 b) {
  const I8 first = a > b;
  return reinterpret_cast<F8>((reinterpret_cast<I8>(a) & first) | (reinterpret_cast<I8>(b) & ~first));
}

// Eight elements of a row of D, all numbers finite. Products in units of the last bit that is kept are below 2^15.
PTX_INLINE F8 finite_sums(const float* a, const float* a_places, const float* b, const float* b_places, unsigned n,
                          F8 sum, bool cut) {
  F8 highest = larger(reinterpret_cast<F8>(reinterpret_cast<U8>(sum) & kExponent), F8{} + kLeast);
  for (unsigned k = 0; k < kNarrowStep; k++)
    highest = larger(*reinterpret_cast<const F8*>(b_places + k * n) * a_places[k], highest);
  const F8 unit = highest * kUnit, units = 1.0f / unit;
  I8 total = __builtin_convertvector(sum * units, I8);
  for (unsigned k = 0; k < kNarrowStep; k++)
    total += __builtin_convertvector(*reinterpret_cast<const F8*>(b + k * n) * a[k] * units, I8);
  const F8 result = __builtin_convertvector(total, F8) * unit;
  return cut ? reinterpret_cast<F8>(reinterpret_cast<U8>(result) & kKept) : result;
}

PTX_CLONES void add_finite(const float* a, const float* a_places, const float* b, const float* b_places, unsigned m,
                           unsigned n, float* const* d, bool cut) {
  for (unsigned i = 0; i < m; i++)
    for (unsigned j = 0; j < n; j += 8) {
      F8* sum = reinterpret_cast<F8*>(d[i] + j);
      *sum = finite_sums(a + i * kNarrowStep, a_places + i * kNarrowStep, b + j, b_places + j, n, *sum, cut);
    }
}

// Zeros in the place of infinity and NaN; whether there were any.
bool without_special(const float* in, size_t count, std::vector<float>& out) {
  out.assign(in, in + count);
  bool found = false;
  for (float& x : out)
    if (!std::isfinite(x)) {
      x = 0;
      found = true;
    }
  return found;
}

}  // namespace

void add_narrow(const float* a, Element a_type, const float* b, Element b_type, unsigned m, unsigned n,
                float* const* d, bool cut) {
  static thread_local std::vector<float> finite_a, finite_b, a_places, b_places, plain;
  const size_t a_count = static_cast<size_t>(m) * kNarrowStep, b_count = static_cast<size_t>(kNarrowStep) * n;
  bool special = without_special(a, a_count, finite_a);
  special |= without_special(b, b_count, finite_b);
  for (unsigned i = 0; i < m; i++) special |= !std::all_of(d[i], d[i] + n, [](float x) { return std::isfinite(x); });
  std::vector<float*> rows;
  if (special) {  // what infinity and NaN reach is the float sum's, and of that not a bit is lost
    plain.resize(static_cast<size_t>(m) * n);
    for (unsigned i = 0; i < m; i++) {
      rows.push_back(plain.data() + static_cast<size_t>(i) * n);
      std::copy_n(d[i], n, rows[i]);
      std::replace_if(d[i], d[i] + n, [](float x) { return !std::isfinite(x); }, 0.0f);
    }
    multiply({a, kNarrowStep, 1}, b, n, m, n, kNarrowStep, rows.data(), true);
  }
  a_places.resize(a_count);
  b_places.resize(b_count);
  places(finite_a.data(), a_count, a_type, a_places.data());
  places(finite_b.data(), b_count, b_type, b_places.data());
  add_finite(finite_a.data(), a_places.data(), finite_b.data(), b_places.data(), m, n, d, cut);
  if (special)
    for (unsigned i = 0; i < m; i++)
      for (unsigned j = 0; j < n; j++)
        if (!std::isfinite(rows[i][j])) d[i][j] = rows[i][j];
}

}  // namespace ptx
