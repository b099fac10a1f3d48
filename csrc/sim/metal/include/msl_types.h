// Metal's types in C++17 with address spaces. A pointer without one points to thread memory, as in Metal.
#pragma once
#pragma GCC system_header
#include "msl_macros.h"

#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define MSL_INLINE inline __attribute__((always_inline))
// Lanes meet at a collective by its place in the source, so a call must stay where it was written.
#define MSL_COLLECTIVE extern "C" __attribute__((convergent, nomerge))

typedef _Float16 half;
typedef __bf16 bfloat;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef signed char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
typedef ulong uintptr_t;
typedef long intptr_t;

#define MSL_VECTORS(T)                                  \
  typedef T T##2 __attribute__((ext_vector_type(2)));   \
  typedef T T##3 __attribute__((ext_vector_type(3)));   \
  typedef T T##4 __attribute__((ext_vector_type(4)));
MSL_VECTORS(float) MSL_VECTORS(half) MSL_VECTORS(bfloat) MSL_VECTORS(int) MSL_VECTORS(uint) MSL_VECTORS(short)
MSL_VECTORS(ushort) MSL_VECTORS(char) MSL_VECTORS(uchar) MSL_VECTORS(long) MSL_VECTORS(ulong)
// Vectors without padding; those of three components are in msl_matrix.h.
#define MSL_PACKED(T)                                                             \
  typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(sizeof(T)))); \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(sizeof(T))));
MSL_PACKED(float) MSL_PACKED(half) MSL_PACKED(bfloat) MSL_PACKED(int) MSL_PACKED(uint) MSL_PACKED(short)
MSL_PACKED(ushort) MSL_PACKED(char) MSL_PACKED(uchar) MSL_PACKED(long) MSL_PACKED(ulong)

#define MSL_NAMES(T) using ::T##2; using ::T##3; using ::T##4;
namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
MSL_NAMES(float) MSL_NAMES(half) MSL_NAMES(bfloat) MSL_NAMES(int) MSL_NAMES(uint) MSL_NAMES(short) MSL_NAMES(ushort)
MSL_NAMES(char) MSL_NAMES(uchar) MSL_NAMES(long) MSL_NAMES(ulong)
}

namespace msl {
template <bool, class T> struct only {};
template <class T> struct only<true, T> { typedef T type; };
}  // namespace msl

// Metal's vectors of bools, a byte a component. As vectors of clang's they would lie in memory as bits, and have no
// components by name.
#define MSL_BOOLS(N, alignment, ...)                                                                    \
  struct alignas(alignment) bool##N {                                                                   \
    union { struct { bool __VA_ARGS__; }; bool all[N]; };                                               \
    bool##N() = default;                                                                                \
    MSL_INLINE constexpr bool##N(bool every) : all() { for (int i = 0; i < N; i++) all[i] = every; }     \
    template <class... B, typename msl::only<sizeof...(B) == N && N != 1, int>::type = 0>                \
    MSL_INLINE constexpr bool##N(B... each) : all{bool(each)...} {}                                      \
    template <class T> MSL_INLINE explicit bool##N(metal::vec<T, N> v) {                                 \
      for (int i = 0; i < N; i++) all[i] = v[i] != 0;                                                   \
    }                                                                                                   \
    template <class T> MSL_INLINE explicit operator metal::vec<T, N>() const {                           \
      metal::vec<T, N> v;                                                                               \
      for (int i = 0; i < N; i++) v[i] = all[i];                                                        \
      return v;                                                                                         \
    }                                                                                                   \
    MSL_INLINE bool& operator[](int i) { return all[i]; }                                               \
    MSL_INLINE bool operator[](int i) const { return all[i]; }                                          \
  };                                                                                                    \
  MSL_BOOLS_OPERATOR(N, &) MSL_BOOLS_OPERATOR(N, |) MSL_BOOLS_OPERATOR(N, ^) MSL_BOOLS_OPERATOR(N, &&)   \
  MSL_BOOLS_OPERATOR(N, ||) MSL_BOOLS_OPERATOR(N, ==) MSL_BOOLS_OPERATOR(N, !=)                          \
  MSL_INLINE bool##N& operator&=(bool##N& a, bool##N b) { return a = a & b; }                            \
  MSL_INLINE bool##N& operator|=(bool##N& a, bool##N b) { return a = a | b; }                            \
  MSL_INLINE bool##N& operator^=(bool##N& a, bool##N b) { return a = a ^ b; }                            \
  MSL_INLINE bool##N operator!(bool##N a) { return a == bool##N(false); }
#define MSL_BOOLS_OPERATOR(N, op)                                                                       \
  MSL_INLINE bool##N operator op(bool##N a, bool##N b) {                                                 \
    bool##N r;                                                                                          \
    for (int i = 0; i < N; i++) r.all[i] = a.all[i] op b.all[i];                                         \
    return r;                                                                                           \
  }
MSL_BOOLS(2, 2, x, y) MSL_BOOLS(3, 4, x, y, z) MSL_BOOLS(4, 4, x, y, z, w)

namespace msl {
constexpr float infinity() { return __builtin_inff(); }
constexpr float nan() { return __builtin_nanf(""); }
// Element type codes, as in the simulator's machine.h.
template <class T> struct scalar { enum { code = -1 }; };
template <> struct scalar<float> { enum { code = 0 }; };
template <> struct scalar<half> { enum { code = 1 }; };
template <> struct scalar<bfloat> { enum { code = 2 }; };
template <> struct scalar<int> { enum { code = 3 }; };
template <> struct scalar<uint> { enum { code = 4 }; };
template <> struct scalar<short> { enum { code = 5 }; };
template <> struct scalar<ushort> { enum { code = 6 }; };
template <> struct scalar<char> { enum { code = 7 }; };
template <> struct scalar<signed char> { enum { code = 7 }; };
template <> struct scalar<uchar> { enum { code = 8 }; };
template <> struct scalar<long> { enum { code = 9 }; };
template <> struct scalar<ulong> { enum { code = 10 }; };
template <> struct scalar<long long> { enum { code = 9 }; };
template <> struct scalar<unsigned long long> { enum { code = 10 }; };
template <> struct scalar<bool> { enum { code = 11 }; };

template <class T> struct shape { enum { count = 1, code = scalar<T>::code }; typedef T element; };
template <class T, int N> struct shape<T __attribute__((ext_vector_type(N)))> {
  enum { count = N, code = scalar<T>::code };
  typedef T element;
};
template <> struct shape<bool2> { enum { count = 2, code = scalar<bool>::code }; typedef bool element; };
template <> struct shape<bool3> { enum { count = 3, code = scalar<bool>::code }; typedef bool element; };
template <> struct shape<bool4> { enum { count = 4, code = scalar<bool>::code }; typedef bool element; };
template <class T> using element = typename shape<T>::element;
template <int N> struct bools;
template <> struct bools<2> { typedef bool2 type; };
template <> struct bools<3> { typedef bool3 type; };
template <> struct bools<4> { typedef bool4 type; };
// Whether values of T are vectors of clang's, which convert into one another.
template <class T> constexpr bool is_ext = shape<T>::count > 1;
template <> constexpr bool is_ext<bool2> = false;
template <> constexpr bool is_ext<bool3> = false;
template <> constexpr bool is_ext<bool4> = false;

template <class T> constexpr bool is_packed = false;  // packed_float3 and the like

// float4(a.xy, b, c): components from left to right.
template <class V, class A>
MSL_INLINE void put(V& v, int& i, A a) {
  if constexpr (shape<A>::count == 1) v[i++] = (element<V>)a;
  else for (int k = 0; k < (int)shape<A>::count; k++) v[i++] = (element<V>)a[k];
}
template <class V> MSL_INLINE V make() { return (V)(element<V>)0; }
template <class V, class A>
MSL_INLINE V make(A a) {
  if constexpr (shape<A>::count == 1) return (V)((element<V>)a);
  else {
    static_assert((int)shape<A>::count == (int)shape<V>::count, "a vector of this size from one of another");
    // Neither of two formats of 16 bits widens to the other, which is how clang would convert them.
    constexpr bool apart = (int)shape<A>::code + (int)shape<V>::code == 3 && (int)shape<A>::code * (int)shape<V>::code == 2;
    if constexpr (apart) return make<V>(__builtin_convertvector(a, metal::vec<float, shape<V>::count>));
    else if constexpr (is_packed<A>) {
      V v;
      int i = 0;
      put(v, i, a);
      return v;
    } else if constexpr (is_ext<V> && is_ext<A>) return __builtin_convertvector(a, V);
    else return (V)a;
  }
}
template <class V, class A, class B, class... R>
MSL_INLINE V make(A a, B b, R... r) {
  static_assert((((int)shape<A>::count + (int)shape<B>::count) + ... + (int)shape<R>::count) == (int)shape<V>::count,
                "wrong number of components for this vector");
  V v;
  int i = 0;
  put(v, i, a), put(v, i, b);
  (put(v, i, r), ...);
  return v;
}

// An object of the type V, however it was declared, from what stands between its parentheses.
template <class V, class... A> MSL_INLINE auto made(A... a) {
  typedef __remove_cvref(V) bare;
  if constexpr (shape<bare>::count > 1) return make<bare>(a...);
  else return bare(a...);
}
// {x, y} as an argument where a vector is wanted.
#define MSL_TO_VECTOR(N, ...)                                                                          \
  template <class V, typename only<(shape<V>::count == N), int>::type = 0> MSL_INLINE operator V() const { \
    return make<V>(__VA_ARGS__);                                                                       \
  }
template <class A, class B> struct braces2 { A a; B b; MSL_TO_VECTOR(2, a, b) };
template <class A, class B, class C> struct braces3 { A a; B b; C c; MSL_TO_VECTOR(3, a, b, c) };
template <class A, class B, class C, class D> struct braces4 { A a; B b; C c; D d; MSL_TO_VECTOR(4, a, b, c, d) };
template <class A, class B> MSL_INLINE braces2<A, B> braced(A a, B b) { return {a, b}; }
template <class A, class B, class C> MSL_INLINE braces3<A, B, C> braced(A a, B b, C c) { return {a, b, c}; }
template <class A, class B, class C, class D> MSL_INLINE braces4<A, B, C, D> braced(A a, B b, C c, D d) { return {a, b, c, d}; }

// What a cast means in Metal: vectors convert component by component, where clang would reinterpret them.
template <class T, class A>
MSL_INLINE constexpr T cast(A a) {
  if constexpr (shape<T>::count > 1) return make<T>(a);
  else {
    static_assert(shape<A>::count == 1, "a scalar from a vector");
    // Between the two formats of 16 bits clang has no cast.
    constexpr bool apart = (int)shape<A>::code + (int)shape<T>::code == 3 && (int)shape<A>::code * (int)shape<T>::code == 2;
    if constexpr (apart) return static_cast<T>(static_cast<float>(a));
    else return static_cast<T>(a);
  }
}
}  // namespace msl

template <class T, class U>
MSL_INLINE T as_type(U u) {
  static_assert(sizeof(T) == sizeof(U), "as_type needs types of one size");
  return __builtin_bit_cast(T, u);
}

// What comparing vectors gives in Metal, from clang's -1 and 0; other values stay what they are.
template <class T> MSL_INLINE constexpr T msl_truth(T x) { return x; }
template <class T, int N> MSL_INLINE typename msl::bools<N>::type msl_truth(metal::vec<T, N> v) {
  typename msl::bools<N>::type r;
  for (int i = 0; i < N; i++) r.all[i] = v[i] != 0;
  return r;
}
// A bool that is spread over a vector: clang would make -1 of true.
template <class T> MSL_INLINE constexpr T msl_number(T x) { return x; }
MSL_INLINE constexpr uchar msl_number(bool x) { return x; }

namespace metal {
template <class T, T v> struct integral_constant {
  static constexpr constant T value = v;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return v; }
  constexpr T operator()() const { return v; }
};
template <bool B> using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;
template <class A, class B> constexpr constant bool is_same_v = __is_same(A, B);
template <class A, class B> struct is_same : bool_constant<__is_same(A, B)> {};
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F> struct conditional { typedef T type; };
template <class T, class F> struct conditional<false, T, F> { typedef F type; };
template <bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;
// Address spaces are qualifiers, too, but these leave them alone.
template <class T> struct remove_const { typedef T type; };
template <class T> struct remove_const<const T> { typedef T type; };
template <class T> using remove_const_t = typename remove_const<T>::type;
template <class T> struct remove_volatile { typedef T type; };
template <class T> struct remove_volatile<volatile T> { typedef T type; };
template <class T> struct remove_cv { typedef remove_const_t<typename remove_volatile<T>::type> type; };
template <class T> using remove_cv_t = typename remove_cv<T>::type;
template <class T> struct remove_addrspace { typedef T type; };
template <class T> struct remove_addrspace<device T> { typedef T type; };
template <class T> struct remove_addrspace<__attribute__((address_space(2))) T> { typedef T type; };
template <class T> struct remove_addrspace<threadgroup T> { typedef T type; };
template <class T> using remove_addrspace_t = typename remove_addrspace<T>::type;
template <class T> struct remove_reference { typedef __remove_reference_t(T) type; };
template <class T> using remove_reference_t = typename remove_reference<T>::type;
template <class T> struct is_integral : bool_constant<__is_integral(T)> {};
template <class T> constexpr constant bool is_integral_v = __is_integral(T);
template <class T> constexpr constant bool is_floating_point_v = __is_floating_point(T) || __is_same(T, half) || __is_same(T, bfloat);
template <class T> struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <class T> constexpr constant bool is_arithmetic_v = __is_integral(T) || is_floating_point_v<T>;
template <class T> struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};
template <class T> constexpr constant bool is_scalar_v = is_arithmetic_v<T>;
template <class T> constexpr constant bool is_vector_v = (msl::shape<T>::count > 1);
template <class T> constexpr constant bool is_signed_v = __is_signed(T) || is_floating_point_v<T>;
template <class T> constexpr constant bool is_unsigned_v = __is_unsigned(T);
template <class A, class B> constexpr constant bool is_convertible_v = __is_convertible(A, B);
template <class T> constexpr constant bool is_pointer_v = __is_pointer(T);
template <class T> using make_unsigned_t = __make_unsigned(T);
template <class T> using make_signed_t = __make_signed(T);
template <class T> using make_scalar_t = msl::element<T>;
template <class T> struct make_scalar { typedef msl::element<T> type; };
template <class T> T&& declval();
// What all threads of a simdgroup hold alike; a value like any other here.
template <class T> using uniform = T;
template <class T> MSL_INLINE constexpr T make_uniform(T x) { return x; }
template <class T> struct vec_elements : integral_constant<size_t, (size_t)msl::shape<T>::count> {};

// A source may add to the limits by a specialisation of what they are derived from.
template <class T> struct _numeric_limits_impl {};
template <class T> struct numeric_limits : _numeric_limits_impl<T> {};
#define MSL_FLOAT_LIMITS(T, MAX, MIN, EPSILON, DIGITS)                   \
  template <> struct numeric_limits<T> {                                 \
    static constexpr constant int digits = DIGITS;                       \
    static constexpr T max() { return (T)MAX; }                          \
    static constexpr T lowest() { return (T)-MAX; }                      \
    static constexpr T min() { return (T)MIN; }                          \
    static constexpr T epsilon() { return (T)EPSILON; }                  \
    static constexpr T infinity() { return (T)__builtin_inff(); }        \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); }     \
  };
MSL_FLOAT_LIMITS(float, FLT_MAX, FLT_MIN, FLT_EPSILON, 24)
MSL_FLOAT_LIMITS(half, 65504.0f, 6.103515625e-05f, 0.0009765625f, 11)
MSL_FLOAT_LIMITS(bfloat, 3.38953138925153547590470800371487867e+38f, FLT_MIN, 0.0078125f, 8)
#define MSL_INT_LIMITS(T, MAX, MIN)                \
  template <> struct numeric_limits<T> {           \
    static constexpr T max() { return MAX; }       \
    static constexpr T min() { return MIN; }       \
    static constexpr T lowest() { return MIN; }    \
  };
MSL_INT_LIMITS(int, INT_MAX, INT_MIN) MSL_INT_LIMITS(uint, UINT_MAX, 0u) MSL_INT_LIMITS(short, 32767, -32768)
MSL_INT_LIMITS(ushort, 65535, 0) MSL_INT_LIMITS(char, 127, -128) MSL_INT_LIMITS(uchar, 255, 0)
MSL_INT_LIMITS(signed char, 127, -128) MSL_INT_LIMITS(long, LONG_MAX, LONG_MIN) MSL_INT_LIMITS(ulong, ULONG_MAX, 0ul)
MSL_INT_LIMITS(bool, true, false)

template <class T, size_t N> struct array {
  T data_[N];
  constexpr T& operator[](size_t i) { return data_[i]; }
  constexpr const T& operator[](size_t i) const { return data_[i]; }
  constexpr size_t size() const { return N; }
};

enum class mem_flags : uint {
  mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_device_and_threadgroup = 3
};
MSL_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((uint)a | (uint)b); }
}  // namespace metal
