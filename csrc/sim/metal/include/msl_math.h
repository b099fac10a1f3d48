// Scalar and elementwise functions. Each overload here exists in Metal: one too many would accept what Apple refuses.
#pragma once
#pragma GCC system_header
#include "msl_types.h"

// The machine rounds these once from double; include/msl_stub.h forwards them.
extern "C" __attribute__((const)) float msl_math(int function, float x, float y);

namespace metal {
// f(float), f(half) and their vectors. Half is computed in float and rounded once.
#define MSL_UNARY(name, expression)                                                      \
  MSL_INLINE float name(float x) { return expression; }                                  \
  MSL_INLINE half name(half h) { float x = h; return (half)(expression); }               \
  template <int N> MSL_INLINE vec<float, N> name(vec<float, N> v) {                      \
    vec<float, N> r;                                                                     \
    for (int i = 0; i < N; i++) r[i] = name((float)v[i]);                                \
    return r;                                                                            \
  }                                                                                      \
  template <int N> MSL_INLINE vec<half, N> name(vec<half, N> v) {                        \
    vec<half, N> r;                                                                      \
    for (int i = 0; i < N; i++) r[i] = name((half)v[i]);                                 \
    return r;                                                                            \
  }
// One overload a type and size and no template: a scalar beside a vector is then spread over it, as in Metal, where each
// overload is a function of its own (Metal Shading Language, "Implicit Conversions of Scalar to Vector", "Math Functions").
#define MSL_SIZES(M, T, ...) M(T, 2, __VA_ARGS__) M(T, 3, __VA_ARGS__) M(T, 4, __VA_ARGS__)
#define MSL_BINARY_OF(T, N, name)                                                        \
  MSL_INLINE T##N name(T##N a, T##N b) {                                                 \
    for (int i = 0; i < N; i++) a[i] = name((T)a[i], (T)b[i]);                           \
    return a;                                                                            \
  }
#define MSL_TERNARY_OF(T, N, name)                                                       \
  MSL_INLINE T##N name(T##N a, T##N b, T##N c) {                                         \
    for (int i = 0; i < N; i++) a[i] = name((T)a[i], (T)b[i], (T)c[i]);                  \
    return a;                                                                            \
  }
#define MSL_BINARY(name, expression)                                                     \
  MSL_INLINE float name(float x, float y) { return expression; }                         \
  MSL_INLINE half name(half g, half h) { float x = g, y = h; return (half)(expression); } \
  MSL_SIZES(MSL_BINARY_OF, float, name) MSL_SIZES(MSL_BINARY_OF, half, name)
MSL_UNARY(exp, msl_math(0, x, 0)) MSL_UNARY(exp2, msl_math(1, x, 0)) MSL_UNARY(exp10, msl_math(2, x, 0))
MSL_UNARY(log, msl_math(3, x, 0)) MSL_UNARY(log2, msl_math(4, x, 0)) MSL_UNARY(log10, msl_math(5, x, 0))
MSL_UNARY(sin, msl_math(6, x, 0)) MSL_UNARY(cos, msl_math(7, x, 0)) MSL_UNARY(tan, msl_math(8, x, 0))
MSL_UNARY(asin, msl_math(9, x, 0)) MSL_UNARY(acos, msl_math(10, x, 0)) MSL_UNARY(atan, msl_math(11, x, 0))
MSL_UNARY(sinh, msl_math(12, x, 0)) MSL_UNARY(cosh, msl_math(13, x, 0)) MSL_UNARY(tanh, msl_math(14, x, 0))
MSL_UNARY(asinh, msl_math(15, x, 0)) MSL_UNARY(acosh, msl_math(16, x, 0)) MSL_UNARY(atanh, msl_math(17, x, 0))
MSL_UNARY(rsqrt, msl_math(18, x, 0)) MSL_UNARY(sinpi, msl_math(22, x, 0)) MSL_UNARY(cospi, msl_math(23, x, 0))
MSL_UNARY(sqrt, __builtin_sqrtf(x)) MSL_UNARY(floor, __builtin_floorf(x)) MSL_UNARY(ceil, __builtin_ceilf(x))
MSL_UNARY(trunc, __builtin_truncf(x)) MSL_UNARY(rint, __builtin_rintf(x)) MSL_UNARY(fabs, __builtin_fabsf(x))
// Half away from zero; x + 0.5 alone would round the largest float below 0.5 up.
MSL_UNARY(round, __builtin_copysignf(__builtin_truncf(__builtin_fabsf(x) + 0.49999997f), x))
MSL_UNARY(fract, __builtin_fminf(x - __builtin_floorf(x), 0.99999994f))
MSL_UNARY(sign, (x > 0 ? 1.0f : x < 0 ? -1.0f : x == 0 ? x : 0.0f))
MSL_UNARY(saturate, (x != x ? 0.0f : x < 0 ? 0.0f : x > 1 ? 1.0f : x))
MSL_BINARY(pow, msl_math(19, x, y)) MSL_BINARY(powr, msl_math(19, x, y)) MSL_BINARY(atan2, msl_math(20, x, y))
MSL_BINARY(fmod, msl_math(21, x, y)) MSL_BINARY(copysign, __builtin_copysignf(x, y))
MSL_BINARY(fmax, (x != x ? y : y != y ? x : x > y ? x : y)) MSL_BINARY(fmin, (x != x ? y : y != y ? x : x < y ? x : y))
MSL_BINARY(fdim, (x > y ? x - y : 0.0f)) MSL_BINARY(step, (y < x ? 0.0f : 1.0f)) MSL_BINARY(divide, x / y)

MSL_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
MSL_INLINE half fma(half a, half b, half c) { return __builtin_fmaf16(a, b, c); }
MSL_SIZES(MSL_TERNARY_OF, float, fma) MSL_SIZES(MSL_TERNARY_OF, half, fma)
MSL_INLINE float ldexp(float x, int e) {
  e = e < -300 ? -300 : e > 300 ? 300 : e;
  for (; e > 127; e -= 127) x *= 0x1p127f;
  for (; e < -126; e += 126) x *= 0x1p-126f;
  return x * as_type<float>((uint)(e + 127) << 23);
}
MSL_INLINE half ldexp(half x, int e) { return (half)ldexp((float)x, e); }
MSL_UNARY(tanpi, msl_math(22, x, 0) / msl_math(23, x, 0))
MSL_INLINE float frexp(float x, thread int& e) {
  uint bits = as_type<uint>(x);
  bool tiny = (bits & 0x7f800000) == 0 && (bits << 1) != 0;
  if (tiny) bits = as_type<uint>(x * 0x1p32f);
  bool kept = (bits << 1) == 0 || (bits & 0x7f800000) == 0x7f800000;  // zero, infinite, NaN
  e = kept ? 0 : (int)(bits >> 23 & 255) - 126 - (tiny ? 32 : 0);
  return kept ? x : as_type<float>((bits & 0x807fffff) | 0x3f000000);
}
MSL_INLINE half frexp(half x, thread int& e) { return (half)frexp((float)x, e); }
#define MSL_NEXT(T, S, U)                                                                 \
  MSL_INLINE T nextafter(T x, T y) {                                                     \
    if (x != x) return x;                                                                \
    if (y != y || x == y) return y;                                                      \
    S bits = as_type<S>(x);                                                              \
    if (x == 0) return as_type<T>((S)(y > 0 ? 1 : (U)1 << (sizeof(U) * 8 - 1) | 1));     \
    return as_type<T>((S)((x < y) == (x > 0) ? bits + 1 : bits - 1));                    \
  }
MSL_NEXT(float, int, uint) MSL_NEXT(half, short, ushort)
MSL_INLINE float sincos(float x, thread float& c) { c = cos(x); return sin(x); }

// min, max and clamp: one overload a type, so that mixed arguments are ambiguous as they are in Metal.
#define MSL_ORDER(T, MAX, MIN)                                                                  \
  MSL_INLINE constexpr T max(T a, T b) { return MAX; }                                          \
  MSL_INLINE constexpr T min(T a, T b) { return MIN; }                                          \
  MSL_INLINE constexpr T max3(T a, T b, T c) { return max(max(a, b), c); }                      \
  MSL_INLINE constexpr T min3(T a, T b, T c) { return min(min(a, b), c); }                      \
  MSL_INLINE constexpr T median3(T a, T b, T c) { return max(min(a, b), min(max(a, b), c)); }   \
  MSL_INLINE constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); }           \
  MSL_INLINE constexpr T select(T a, T b, bool c) { return c ? b : a; }
#define MSL_INT_ORDER(T) MSL_ORDER(T, a > b ? a : b, a < b ? a : b)
#define MSL_FLOAT_ORDER(T) MSL_ORDER(T, (a != a ? b : b != b ? a : a > b ? a : b), (a != a ? b : b != b ? a : a < b ? a : b))
MSL_FLOAT_ORDER(float) MSL_FLOAT_ORDER(half) MSL_INT_ORDER(int) MSL_INT_ORDER(uint) MSL_INT_ORDER(short)
MSL_INT_ORDER(ushort) MSL_INT_ORDER(char) MSL_INT_ORDER(uchar) MSL_INT_ORDER(long) MSL_INT_ORDER(ulong)
MSL_INLINE constexpr bfloat select(bfloat a, bfloat b, bool c) { return c ? b : a; }
#define MSL_SELECT_OF(T, N, name)                                                                \
  MSL_INLINE T##N select(T##N a, T##N b, bool##N c) {                                            \
    for (int i = 0; i < N; i++) a[i] = c.all[i] ? b[i] : a[i];                                   \
    return a;                                                                                    \
  }
#define MSL_ORDER_OF(T)                                                                          \
  MSL_SIZES(MSL_BINARY_OF, T, max) MSL_SIZES(MSL_BINARY_OF, T, min)                              \
  MSL_SIZES(MSL_TERNARY_OF, T, max3) MSL_SIZES(MSL_TERNARY_OF, T, min3)                          \
  MSL_SIZES(MSL_TERNARY_OF, T, median3) MSL_SIZES(MSL_TERNARY_OF, T, clamp)                      \
  MSL_SIZES(MSL_SELECT_OF, T, select)
MSL_ORDER_OF(float) MSL_ORDER_OF(half) MSL_ORDER_OF(int) MSL_ORDER_OF(uint) MSL_ORDER_OF(short)
MSL_ORDER_OF(ushort) MSL_ORDER_OF(char) MSL_ORDER_OF(uchar) MSL_ORDER_OF(long) MSL_ORDER_OF(ulong)
MSL_SIZES(MSL_SELECT_OF, bfloat, select)
template <class T, class M, int N> MSL_INLINE vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<M, N> c) {
  for (int i = 0; i < N; i++) a[i] = c[i] ? b[i] : a[i];
  return a;
}
#define MSL_CHOICE(N)                                                                                                \
  MSL_INLINE bool any(bool##N v) { bool r = false; for (int i = 0; i < N; i++) r |= v.all[i]; return r; }             \
  MSL_INLINE bool all(bool##N v) { bool r = true; for (int i = 0; i < N; i++) r &= v.all[i]; return r; }
MSL_CHOICE(2) MSL_CHOICE(3) MSL_CHOICE(4)
template <class M, int N> MSL_INLINE bool any(vec<M, N> v) {
  bool r = false;
  for (int i = 0; i < N; i++) r |= v[i] != 0;
  return r;
}
template <class M, int N> MSL_INLINE bool all(vec<M, N> v) {
  bool r = true;
  for (int i = 0; i < N; i++) r &= v[i] != 0;
  return r;
}

MSL_INLINE float abs(float x) { return __builtin_fabsf(x); }
MSL_INLINE half abs(half x) { return (half)__builtin_fabsf(x); }
#define MSL_INT_ABS(T) MSL_INLINE T abs(T x) { return x < 0 ? (T)-x : x; }
MSL_INT_ABS(int) MSL_INT_ABS(short) MSL_INT_ABS(char) MSL_INT_ABS(long)
template <class T, int N> MSL_INLINE vec<T, N> abs(vec<T, N> x) {
  for (int i = 0; i < N; i++) x[i] = abs((T)x[i]);
  return x;
}

template <class T> using only_float = enable_if_t<is_floating_point_v<T>, bool>;
template <class T> MSL_INLINE only_float<T> isnan(T x) { return x != x; }
template <class T> MSL_INLINE only_float<T> isinf(T x) { return __builtin_fabsf((float)x) == __builtin_inff(); }
template <class T> MSL_INLINE only_float<T> isfinite(T x) { return __builtin_fabsf((float)x) < __builtin_inff(); }
template <class T> MSL_INLINE only_float<T> signbit(T x) { return __builtin_signbit((float)x); }
template <class T> MSL_INLINE only_float<T> isunordered(T a, T b) { return a != a || b != b; }
template <class T> MSL_INLINE only_float<T> isordered(T a, T b) { return a == a && b == b; }

#define MSL_MIX_OF(T, N, name) MSL_INLINE T##N mix(T##N a, T##N b, T##N t) { return a + (b - a) * t; }
MSL_INLINE float mix(float a, float b, float t) { return a + (b - a) * t; }
MSL_INLINE half mix(half a, half b, half t) { return a + (b - a) * t; }
MSL_SIZES(MSL_MIX_OF, float, mix) MSL_SIZES(MSL_MIX_OF, half, mix)
MSL_INLINE float smoothstep(float low, float high, float x) {
  x = saturate((x - low) / (high - low));
  return x * x * (3.0f - 2.0f * x);
}
MSL_INLINE half smoothstep(half low, half high, half x) { return (half)smoothstep((float)low, (float)high, (float)x); }
MSL_SIZES(MSL_TERNARY_OF, float, smoothstep) MSL_SIZES(MSL_TERNARY_OF, half, smoothstep)
template <class T, int N> MSL_INLINE enable_if_t<is_floating_point_v<T>, T> dot(vec<T, N> a, vec<T, N> b) {
  T r = a[0] * b[0];
  for (int i = 1; i < N; i++) r = r + a[i] * b[i];
  return r;
}
template <class T, int N> MSL_INLINE T length_squared(vec<T, N> a) { return dot(a, a); }
template <class T, int N> MSL_INLINE T length(vec<T, N> a) { return sqrt(dot(a, a)); }
template <class T, int N> MSL_INLINE T distance(vec<T, N> a, vec<T, N> b) { return length(a - b); }
template <class T, int N> MSL_INLINE vec<T, N> normalize(vec<T, N> a) { return a * rsqrt(dot(a, a)); }

#define MSL_BITS(T, U, W)                                                                                            \
  MSL_INLINE T popcount(T x) { return (T)__builtin_popcountll((ulong)(U)x); }                                         \
  MSL_INLINE T clz(T x) { return (U)x ? (T)(__builtin_clzll((ulong)(U)x) - (64 - W)) : (T)W; }                         \
  MSL_INLINE T ctz(T x) { return (U)x ? (T)__builtin_ctzll((ulong)(U)x) : (T)W; }                                      \
  MSL_INLINE T rotate(T x, T n) { uint s = (uint)n % W; return s ? (T)(((U)x << s) | ((U)x >> (W - s))) : x; }         \
  MSL_INLINE T extract_bits(T x, uint o, uint n) { return n ? (T)((T)((U)x << (W - o - n)) >> (W - n)) : (T)0; }       \
  MSL_INLINE T insert_bits(T x, T y, uint o, uint n) {                                                                \
    U m = n >= W ? (U)~(U)0 : (U)((((U)1 << n) - 1) << o);                                                            \
    return (T)(((U)x & (U)~m) | ((U)((U)y << o) & m));                                                                \
  }                                                                                                                  \
  MSL_INLINE T reverse_bits(T x) { U r = 0; for (int i = 0; i < W; i++) r |= (U)((((U)x >> i) & 1) << (W - 1 - i)); return (T)r; } \
  MSL_INLINE U absdiff(T a, T b) { return a > b ? (U)((U)a - (U)b) : (U)((U)b - (U)a); }
MSL_BITS(int, uint, 32) MSL_BITS(uint, uint, 32) MSL_BITS(short, ushort, 16) MSL_BITS(ushort, ushort, 16)
MSL_BITS(char, uchar, 8) MSL_BITS(uchar, uchar, 8) MSL_BITS(long, ulong, 64) MSL_BITS(ulong, ulong, 64)
MSL_INLINE uint mulhi(uint a, uint b) { return (uint)(((ulong)a * b) >> 32); }
MSL_INLINE int mulhi(int a, int b) { return (int)(((long)a * b) >> 32); }
MSL_INLINE uint addsat(uint a, uint b) { return a + b < a ? ~0u : a + b; }
MSL_INLINE uint subsat(uint a, uint b) { return a > b ? a - b : 0; }

#define MSL_AGAIN                                                                                                    \
  using metal::exp; using metal::exp2; using metal::exp10; using metal::log; using metal::log2; using metal::log10;  \
  using metal::sin; using metal::cos; using metal::tan; using metal::asin; using metal::acos; using metal::atan;     \
  using metal::sinh; using metal::cosh; using metal::tanh; using metal::asinh; using metal::acosh; using metal::atanh; \
  using metal::rsqrt; using metal::sqrt; using metal::floor; using metal::ceil; using metal::trunc; using metal::rint; \
  using metal::fabs; using metal::abs; using metal::round; using metal::fract; using metal::sign; using metal::saturate; \
  using metal::pow; using metal::powr; using metal::atan2; using metal::fmod; using metal::fmax; using metal::fmin;  \
  using metal::max; using metal::min; using metal::clamp; using metal::divide; using metal::sincos; using metal::fma; \
  using metal::sinpi; using metal::cospi; using metal::ldexp; using metal::copysign;
namespace fast { MSL_AGAIN }     // computed as precisely as the others: a tolerance must cover what hardware does
namespace precise { MSL_AGAIN }
}  // namespace metal
