// Loops over the 32 lanes of a warp, and how their functions are compiled.
#pragma once
#include "front/decode.h"

// One function, compiled for processors with AVX2, FMA and F16C and for any other; the loader picks. Elsewhere (other
// architectures, other compilers) the plain function is what there is.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PTX_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define PTX_CLONES
#endif

// The registers of an instruction are equal or apart, never overlapping by parts: lanes do not depend on one another.
#if defined(__GNUC__) && !defined(__clang__)
#define PTX_INDEPENDENT _Pragma("GCC ivdep")
#define PTX_INLINE inline __attribute__((always_inline))
#define PTX_LAMBDA_INLINE __attribute__((always_inline))
#elif defined(__clang__)
#define PTX_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#define PTX_INLINE inline __attribute__((always_inline))
#define PTX_LAMBDA_INLINE __attribute__((always_inline))
#else
#define PTX_INDEPENDENT
#define PTX_INLINE inline
#define PTX_LAMBDA_INLINE
#endif

namespace ptx {

template <class To, class From>
PTX_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// d[l] = f(l) for the lanes in `mask`; a full mask is a loop that vectorises.
template <class T, class F>
PTX_INLINE void each_lane(Mask mask, T* d, F f) {
  if (mask == kAll) {
    PTX_INDEPENDENT
    for (unsigned l = 0; l < kLanes; l++) d[l] = f(l);
  } else {
    for (; mask != 0; mask &= mask - 1) {
      const unsigned l = static_cast<unsigned>(__builtin_ctz(mask));
      d[l] = f(l);
    }
  }
}

// A predicate's bit for every lane in `mask`; the other bits keep their value.
template <class F>
PTX_INLINE void each_bit(Mask mask, Mask& d, F f) {
  Mask bits = 0;
  for (unsigned l = 0; l < kLanes; l++) bits |= static_cast<Mask>(f(l)) << l;
  d = (d & ~mask) | (bits & mask);
}

// The register array of the width of T: 4 bytes or less in a V32, 8 in a V64.
template <unsigned bytes>
struct Lanes;
template <>
struct Lanes<4> {
  using Word = uint32_t;
  static PTX_INLINE uint32_t* of(Warp& w, Slot s) { return w.v32(s).x; }
};
template <>
struct Lanes<8> {
  using Word = uint64_t;
  static PTX_INLINE uint64_t* of(Warp& w, Slot s) { return w.v64(s).x; }
};
template <class T>
using LanesOf = Lanes<sizeof(T) == 8 ? 8 : 4>;

// A value in its register: narrow types are zero-extended, whatever their sign.
template <class T>
PTX_INLINE typename LanesOf<T>::Word pack(T v) {
  if constexpr (sizeof(T) == 2) return bit_cast<uint16_t>(v);
  else if constexpr (sizeof(T) == 1) return bit_cast<uint8_t>(v);
  else return bit_cast<typename LanesOf<T>::Word>(v);
}
template <class T>
PTX_INLINE T unpack(typename LanesOf<T>::Word v) {
  if constexpr (sizeof(T) == 2) return bit_cast<T>(static_cast<uint16_t>(v));
  else if constexpr (sizeof(T) == 1) return bit_cast<T>(static_cast<uint8_t>(v));
  else return bit_cast<T>(v);
}

// d = F::of(a, ...), elementwise. `F` names the types: D of the result and S of the sources.
template <class D, class S, class F>
PTX_CLONES Step unary(Context& c, const Op& op) {
  auto* d = LanesOf<D>::of(c.warp, op.d[0]);
  const auto* a = LanesOf<S>::of(c.warp, op.s[0]);
  each_lane(c.mask, d, [=](unsigned l) { return pack<D>(F::template of<S>(unpack<S>(a[l]))); });
  return Step::next;
}
template <class D, class S, class F>
PTX_CLONES Step binary(Context& c, const Op& op) {
  auto* d = LanesOf<D>::of(c.warp, op.d[0]);
  const auto* a = LanesOf<S>::of(c.warp, op.s[0]);
  const auto* b = LanesOf<S>::of(c.warp, op.s[1]);
  each_lane(c.mask, d, [=](unsigned l) { return pack<D>(F::template of<S>(unpack<S>(a[l]), unpack<S>(b[l]))); });
  return Step::next;
}
template <class D, class S, class F>
PTX_CLONES Step ternary(Context& c, const Op& op) {
  auto* d = LanesOf<D>::of(c.warp, op.d[0]);
  const auto* a = LanesOf<S>::of(c.warp, op.s[0]);
  const auto* b = LanesOf<S>::of(c.warp, op.s[1]);
  const auto* e = LanesOf<S>::of(c.warp, op.s[2]);
  each_lane(c.mask, d,
            [=](unsigned l) { return pack<D>(F::template of<S>(unpack<S>(a[l]), unpack<S>(b[l]), unpack<S>(e[l]))); });
  return Step::next;
}

}  // namespace ptx
