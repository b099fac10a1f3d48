// Rounding as PTX ISA 9.7.3 to 9.7.5 asks for it: exact sums and products first, then one rounding to the result's
// format.
#pragma once
#include <cfenv>

#include "units/float_types.h"

namespace ptx {

enum class Nearest : uint8_t { rn, rz, rm, rp };  // the floating-point rounding modifiers

constexpr uint32_t kNan32 = 0x7fffffffu;  // canonical: single-precision operations keep no payload

PTX_INLINE float canonical(float v) { return v == v ? v : bit_cast<float>(kNan32); }

// A value that may need more than 53 bits: `value` is it rounded to nearest, of `rest` the sign counts.
struct Exact {
  double value, rest;
};

PTX_INLINE Exact two_sum(double a, double b) {
  const double s = a + b, v = s - a;
  return {s, (a - (s - v)) + (b - v)};
}
PTX_INLINE Exact quotient(double a, double b) {
  const double q = a / b, r = std::fma(-q, b, a);
  return {q, b < 0 ? -r : r};
}
PTX_INLINE Exact root(double a) {
  const double s = std::sqrt(a);
  return {s, std::fma(-s, s, a)};
}

// Rounded to odd: of the two neighbours of an inexact value the one whose last bit is set, so that a later rounding to
// two bits less or fewer sees which side of a tie the exact value is on.
PTX_INLINE double to_odd(Exact x) {
  const int64_t bits = bit_cast<int64_t>(x.value);
  const int64_t away = (x.rest > 0) == (x.value > 0) ? 1 : -1;
  const bool keep = x.rest == 0 || x.rest != x.rest || (bits & 1) != 0 || std::fabs(x.value) > 1e300;
  return bit_cast<double>(keep ? bits : bits + away);
}
PTX_INLINE float to_odd_float(double d) {
  const float f = static_cast<float>(d);
  const int32_t bits = bit_cast<int32_t>(f);
  const double back = f;
  const int32_t toward_zero = std::fabs(back) > std::fabs(d) ? bits - 1 : bits;
  return back == d || d != d ? f : bit_cast<float>(toward_zero | 1);
}

// To single precision. An exact zero sum is +0, or -0 when rounding down, unless both terms were zeros of one sign.
template <Nearest R>
PTX_INLINE float round_float(Exact x) {
  const double d = to_odd(x);
  const float f = static_cast<float>(d);
  if (R == Nearest::rn) return f;
  const double back = f;
  const int32_t bits = bit_cast<int32_t>(f);
  const bool over = R == Nearest::rz ? std::fabs(back) > std::fabs(d) : R == Nearest::rm ? back > d : back < d;
  // One step towards the side that the mode asks for; through zero the magnitude grows again.
  const bool shrink = R == Nearest::rz || (R == Nearest::rm) == (back > 0);
  const int32_t stepped =
      back == 0 ? (R == Nearest::rm ? static_cast<int32_t>(0x80000001u) : 1) : bits + (shrink ? -1 : 1);
  return bit_cast<float>(over ? stepped : bits);
}

// f() under a rounding mode of the processor's; its operands have to be volatile, or they are computed beforehand.
template <class F>
double in_mode(Nearest mode, F f) {
  if (mode == Nearest::rn) return f();
  std::fesetround(mode == Nearest::rz ? FE_TOWARDZERO : mode == Nearest::rm ? FE_DOWNWARD : FE_UPWARD);
  volatile double result = f();
  std::fesetround(FE_TONEAREST);
  return result;
}

PTX_INLINE float flush(float v, bool ftz) { return ftz && std::fabs(v) < 0x1p-126f ? std::copysign(0.0f, v) : v; }
PTX_INLINE F16 flush(F16 v, bool ftz) {
  return ftz && (v.bits & 0x7c00) == 0 ? F16{static_cast<uint16_t>(v.bits & 0x8000)} : v;
}
PTX_INLINE BF16 flush(BF16 v, bool ftz) {
  return ftz && (v.bits & 0x7f80) == 0 ? BF16{static_cast<uint16_t>(v.bits & 0x8000)} : v;
}
PTX_INLINE double flush(double v, bool) { return v; }

PTX_INLINE float saturated(float v) { return v > 0 ? (v < 1 ? v : 1.0f) : 0.0f; }  // NaN too becomes +0
PTX_INLINE double clamped(double v) { return v > 0 || v != v ? v : 0.0; }          // .relu

// A double, exact but for its odd last bit, to the narrow formats. NaN: canonical 0x7fff.
template <class E>
PTX_INLINE E narrow(double v);
template <>
PTX_INLINE F16 narrow<F16>(double v) {
  return {static_cast<uint16_t>(f16_of_f32(to_odd_float(v)))};
}
template <>
PTX_INLINE BF16 narrow<BF16>(double v) {
  return {static_cast<uint16_t>(bf16_of_f32(to_odd_float(v)))};
}

// --- elements of registers: one in each lane, or two in 32 or 64 bits.

template <class E, unsigned n>
struct Elements {
  static constexpr unsigned kStride = n == 1 && sizeof(E) == 2 ? 4 : sizeof(E);
  static PTX_INLINE unsigned char* of(Warp& w, Slot s) { return reinterpret_cast<unsigned char*>(&w.file[s]); }
  static PTX_INLINE E load(const unsigned char* p, unsigned i) {
    E v;
    std::memcpy(&v, p + i * kStride, sizeof v);
    return v;
  }
  static PTX_INLINE void store(unsigned char* p, unsigned i, E v) {
    if constexpr (kStride != sizeof(E)) {
      const uint32_t word = bit_cast<uint16_t>(v);
      std::memcpy(p + i * kStride, &word, 4);
    } else {
      std::memcpy(p + i * kStride, &v, sizeof v);
    }
  }
};

// d = f(a, ...) for all elements of the lanes in the mask; F is made from the operation.
template <class E, unsigned n, class F, unsigned arity>
PTX_CLONES Step elementwise(Context& c, const Op& op) {
  using X = Elements<E, n>;
  const F f(op);
  unsigned char* d = X::of(c.warp, op.d[0]);
  const unsigned char* a = X::of(c.warp, op.s[0]);
  const unsigned char* b = X::of(c.warp, op.s[arity > 1 ? 1 : 0]);
  const unsigned char* e = X::of(c.warp, op.s[arity > 2 ? 2 : 0]);
  auto one = [=](unsigned i) PTX_LAMBDA_INLINE {
    if constexpr (arity == 1) X::store(d, i, f(X::load(a, i)));
    else if constexpr (arity == 2) X::store(d, i, f(X::load(a, i), X::load(b, i)));
    else X::store(d, i, f(X::load(a, i), X::load(b, i), X::load(e, i)));
  };
  if (c.mask == kAll) {
    PTX_INDEPENDENT
    for (unsigned i = 0; i < kLanes * n; i++) one(i);
  } else {
    for (Mask left = c.mask; left != 0; left &= left - 1)
      for (unsigned k = 0; k < n; k++) one(static_cast<unsigned>(__builtin_ctz(left)) * n + k);
  }
  return Step::next;
}

}  // namespace ptx
