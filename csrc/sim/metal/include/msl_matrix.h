// Matrices of one thread, and packed vectors of three components.
#pragma once
#pragma GCC system_header
#include "msl_math.h"

namespace metal {
// Columns, each a vector (Metal Shading Language, "Matrix Data Types").
template <class T, int C, int R> struct matrix {
  static_assert(C >= 2 && C <= 4 && R >= 2 && R <= 4, "a matrix has 2 to 4 columns and rows");
  static_assert(is_floating_point_v<T>, "a matrix holds float, half or bfloat");
  typedef vec<T, R> column;
  column columns[C];

  matrix() = default;
  MSL_INLINE explicit matrix(T diagonal) {
    for (int c = 0; c < C; c++) {
      column v;
      for (int r = 0; r < R; r++) v[r] = c == r ? diagonal : T(0);
      columns[c] = v;
    }
  }
  template <class... V, enable_if_t<sizeof...(V) == C && C * R != C && ((msl::shape<V>::count == R) && ...), bool> = true>
  MSL_INLINE explicit matrix(V... v) {
    column given[C] = {msl::make<column>(v)...};
    for (int c = 0; c < C; c++) columns[c] = given[c];
  }
  template <class... V, enable_if_t<sizeof...(V) == C * R && ((msl::shape<V>::count == 1) && ...), bool> = true>
  MSL_INLINE explicit matrix(V... v) {
    T given[C * R] = {(T)v...};
    for (int c = 0; c < C; c++) {
      column v;  // whole: a column that is set component by component is read before
      for (int r = 0; r < R; r++) v[r] = given[c * R + r];
      columns[c] = v;
    }
  }
  template <class U> MSL_INLINE explicit matrix(matrix<U, C, R> m) {
    for (int c = 0; c < C; c++) columns[c] = msl::make<column>(m.columns[c]);
  }
  MSL_INLINE column& operator[](int c) { return columns[c]; }
  MSL_INLINE const column& operator[](int c) const { return columns[c]; }
};
#define MSL_MATRICES_OF(T, R)                                                              \
  typedef metal::matrix<T, 2, R> T##2x##R; typedef metal::matrix<T, 3, R> T##3x##R; typedef metal::matrix<T, 4, R> T##4x##R;
#define MSL_MATRICES(T) MSL_MATRICES_OF(T, 2) MSL_MATRICES_OF(T, 3) MSL_MATRICES_OF(T, 4)
#define MSL_BY_COLUMN(op)                                                                  \
  template <class T, int C, int R> MSL_INLINE matrix<T, C, R> operator op(matrix<T, C, R> a, matrix<T, C, R> b) { \
    for (int c = 0; c < C; c++) a.columns[c] = a.columns[c] op b.columns[c];               \
    return a;                                                                              \
  }                                                                                        \
  template <class T, int C, int R>                                                         \
  MSL_INLINE thread matrix<T, C, R>& operator op##=(thread matrix<T, C, R>& a, matrix<T, C, R> b) { return a = a op b; }
MSL_BY_COLUMN(+) MSL_BY_COLUMN(-)
template <class T, int C, int R> MSL_INLINE matrix<T, C, R> operator-(matrix<T, C, R> a) {
  for (int c = 0; c < C; c++) a.columns[c] = -a.columns[c];
  return a;
}
template <class T> struct itself { typedef T type; };
template <class T, int C, int R> MSL_INLINE matrix<T, C, R> operator*(matrix<T, C, R> a, typename itself<T>::type s) {
  for (int c = 0; c < C; c++) a.columns[c] = a.columns[c] * s;
  return a;
}
template <class T, int C, int R> MSL_INLINE matrix<T, C, R> operator*(typename itself<T>::type s, matrix<T, C, R> a) { return a * s; }
template <class T, int C, int R> MSL_INLINE vec<T, R> operator*(matrix<T, C, R> a, vec<T, C> v) {
  vec<T, R> r = a.columns[0] * v[0];
  for (int c = 1; c < C; c++) r = r + a.columns[c] * v[c];
  return r;
}
template <class T, int C, int R> MSL_INLINE vec<T, C> operator*(vec<T, R> v, matrix<T, C, R> a) {
  vec<T, C> r;
  for (int c = 0; c < C; c++) r[c] = dot(v, a.columns[c]);
  return r;
}
template <class T, int C, int K, int R> MSL_INLINE matrix<T, C, R> operator*(matrix<T, K, R> a, matrix<T, C, K> b) {
  matrix<T, C, R> r;
  for (int c = 0; c < C; c++) r.columns[c] = a * b.columns[c];
  return r;
}
template <class T, int N> MSL_INLINE thread matrix<T, N, N>& operator*=(thread matrix<T, N, N>& a, matrix<T, N, N> b) { return a = a * b; }
// Metal Shading Language, "Matrix Functions".
template <class T, int C, int R> MSL_INLINE matrix<T, R, C> transpose(matrix<T, C, R> a) {
  matrix<T, R, C> r;
  for (int k = 0; k < R; k++) {
    vec<T, C> v;
    for (int c = 0; c < C; c++) v[c] = a.columns[c][k];
    r.columns[k] = v;
  }
  return r;
}
template <class T> MSL_INLINE T determinant(matrix<T, 2, 2> a) { return a[0][0] * a[1][1] - a[1][0] * a[0][1]; }
template <class T, int N> MSL_INLINE T determinant(matrix<T, N, N> a) {
  T sum = 0;
  for (int k = 0; k < N; k++) {
    matrix<T, N - 1, N - 1> minor;
    for (int c = 1; c < N; c++) {
      vec<T, N - 1> v;
      for (int r = 0, to = 0; r < N; r++)
        if (r != k) v[to++] = a.columns[c][r];
      minor.columns[c - 1] = v;
    }
    T term = a.columns[0][k] * determinant(minor);
    sum = k % 2 ? sum - term : sum + term;
  }
  return sum;
}
}  // namespace metal
MSL_MATRICES(float) MSL_MATRICES(half)

// Three components without padding (Metal Shading Language, "Packed Vector Types"), which clang's vectors cannot be.
#define MSL_PACKED3(T)                                                                     \
  struct packed_##T##3 {                                                                   \
    union { struct { T x, y, z; }; struct { T r, g, b; }; T all[3]; };                     \
    packed_##T##3() = default;                                                             \
    MSL_INLINE packed_##T##3(T##3 v) : x(v.x), y(v.y), z(v.z) {}                            \
    MSL_INLINE explicit packed_##T##3(T every) : x(every), y(every), z(every) {}            \
    MSL_INLINE packed_##T##3(T a, T b, T c) : x(a), y(b), z(c) {}                           \
    MSL_INLINE operator T##3() const { return T##3{x, y, z}; }                             \
    MSL_INLINE T& operator[](int i) { return all[i]; }                                     \
    MSL_INLINE const T& operator[](int i) const { return all[i]; }                         \
  };                                                                                       \
  namespace msl {                                                                          \
  template <> struct shape<packed_##T##3> { enum { count = 3, code = scalar<T>::code }; typedef T element; }; \
  template <> constexpr bool is_ext<packed_##T##3> = false;                                \
  template <> constexpr bool is_packed<packed_##T##3> = true;                              \
  }
MSL_PACKED3(float) MSL_PACKED3(half) MSL_PACKED3(bfloat) MSL_PACKED3(int) MSL_PACKED3(uint) MSL_PACKED3(short)
MSL_PACKED3(ushort) MSL_PACKED3(char) MSL_PACKED3(uchar) MSL_PACKED3(long) MSL_PACKED3(ulong)

namespace msl {
// Operators of vectors know no packed ones.
template <class T> MSL_INLINE auto unpacked(T&& x) {
  auto v = value(x);
  if constexpr (is_packed<decltype(v)>) return (metal::vec<element<decltype(v)>, 3>)v;
  else return v;
}
}  // namespace msl
