// Names from inside Apple's standard library that sources of MLX use (its bf16_math.h); only for sources of others.
#pragma once
#pragma GCC system_header
#include "msl_math.h"
#include "msl_simd.h"

namespace metal {
template <class... B> struct _disjunction : bool_constant<(B::value || ...)> {};
template <class... B> struct _conjunction : bool_constant<(B::value && ...)> {};
template <class T> struct __is_valid_simdgroup_type
    : bool_constant<((int)msl::shape<T>::code >= 0 && (int)msl::shape<T>::code < 9 && (int)msl::shape<T>::code != 2)> {};
}  // namespace metal
#define MSL_INTERNAL(name) \
  template <class... F> MSL_INLINE float __metal_##name(float x, F...) { return metal::name(x); }
MSL_INTERNAL(acos) MSL_INTERNAL(acosh) MSL_INTERNAL(asin) MSL_INTERNAL(asinh) MSL_INTERNAL(atan) MSL_INTERNAL(atanh)
MSL_INTERNAL(ceil) MSL_INTERNAL(cos) MSL_INTERNAL(cosh) MSL_INTERNAL(cospi) MSL_INTERNAL(exp) MSL_INTERNAL(exp10)
MSL_INTERNAL(exp2) MSL_INTERNAL(fabs) MSL_INTERNAL(floor) MSL_INTERNAL(fract) MSL_INTERNAL(log) MSL_INTERNAL(log10)
MSL_INTERNAL(log2) MSL_INTERNAL(rint) MSL_INTERNAL(round) MSL_INTERNAL(rsqrt) MSL_INTERNAL(sin) MSL_INTERNAL(sinh)
MSL_INTERNAL(sinpi) MSL_INTERNAL(sqrt) MSL_INTERNAL(tan) MSL_INTERNAL(tanh) MSL_INTERNAL(tanpi) MSL_INTERNAL(trunc)
#define MSL_INTERNAL2(name) \
  template <class... F> MSL_INLINE float __metal_##name(float x, float y, F...) { return metal::name(x, y); }
MSL_INTERNAL2(atan2) MSL_INTERNAL2(divide) MSL_INTERNAL2(fmax) MSL_INTERNAL2(fmin) MSL_INTERNAL2(fmod)
MSL_INTERNAL2(nextafter) MSL_INTERNAL2(pow) MSL_INTERNAL2(powr)
template <class... F> MSL_INLINE float __metal_fma(float x, float y, float z, F...) { return metal::fma(x, y, z); }
template <class... F> MSL_INLINE float __metal_fmax3(float x, float y, float z, F...) { return metal::max3(x, y, z); }
template <class... F> MSL_INLINE float __metal_fmin3(float x, float y, float z, F...) { return metal::min3(x, y, z); }
template <class... F> MSL_INLINE float __metal_fmedian3(float x, float y, float z, F...) { return metal::median3(x, y, z); }
template <class... F> MSL_INLINE float __metal_ldexp(float x, int e, F...) { return metal::ldexp(x, e); }
template <class... F> MSL_INLINE float __metal_frexp(float x, thread int* e, F...) { return metal::frexp(x, *e); }
#define MSL_INTERNAL_LANES(name) \
  template <class T, class... A> MSL_INLINE T __metal_##name(T x, A... a) { return metal::name(x, a...); }
MSL_INTERNAL_LANES(simd_broadcast) MSL_INTERNAL_LANES(simd_shuffle) MSL_INTERNAL_LANES(simd_shuffle_and_fill_down)
MSL_INTERNAL_LANES(simd_shuffle_and_fill_up) MSL_INTERNAL_LANES(simd_shuffle_down) MSL_INTERNAL_LANES(simd_shuffle_up)
MSL_INTERNAL_LANES(simd_shuffle_rotate_down) MSL_INTERNAL_LANES(simd_shuffle_rotate_up)
MSL_INTERNAL_LANES(simd_shuffle_xor) MSL_INTERNAL_LANES(simd_max) MSL_INTERNAL_LANES(simd_min)
MSL_INTERNAL_LANES(simd_product) MSL_INTERNAL_LANES(simd_sum) MSL_INTERNAL_LANES(simd_prefix_exclusive_product)
MSL_INTERNAL_LANES(simd_prefix_exclusive_sum) MSL_INTERNAL_LANES(simd_prefix_inclusive_product)
MSL_INTERNAL_LANES(simd_prefix_inclusive_sum)
template <class T> MSL_INLINE T __metal_simd_xor(T x) { return metal::simd_xor((uint)x); }
MSL_INLINE ushort __metal_get_simdgroup_size(ushort) { return 32; }
