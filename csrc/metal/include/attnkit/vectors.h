// Reading and writing one or four neighbouring elements of any model dtype as float. Elements are converted one by one,
// because bfloat vectors do not convert to float vectors on every language version.

#define ATTNKIT_UNROLL _Pragma("clang loop unroll(full)")

template <typename T>
inline void read(const device T* from, thread float& to) {
  to = float(from[0]);
}

template <typename T>
inline void read(const device T* from, thread float4& to) {
  const vec<T, 4> x = *reinterpret_cast<const device vec<T, 4>*>(from);
  to = float4(float(x[0]), float(x[1]), float(x[2]), float(x[3]));
}

template <typename T>
inline void write(device T* to, float x) {
  to[0] = T(x);
}

template <typename T>
inline void write(device T* to, float4 x) {
  vec<T, 4> y;
  y[0] = T(x[0]);
  y[1] = T(x[1]);
  y[2] = T(x[2]);
  y[3] = T(x[3]);
  *reinterpret_cast<device vec<T, 4>*>(to) = y;
}

inline float sum_of(float x) {
  return x;
}

inline float sum_of(float4 x) {
  return (x[0] + x[1]) + (x[2] + x[3]);
}
