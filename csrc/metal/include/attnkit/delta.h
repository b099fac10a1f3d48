// What kernels of the gated delta rule share: a row of the state, DIM floats, in the registers of four lanes, each with
// four neighbouring columns of every 16. Defined by the host: DIM, WIDTH (4: rows start at multiples of four elements).

#pragma once

#include "attnkit/vectors.h"

constant constexpr int LANES = 4;
constant constexpr int VECTORS = DIM / (4 * LANES);

template <typename T>
inline float4 four(const device T* from) {
#if WIDTH == 4
  float4 x;
  read(from, x);
  return x;
#else
  return float4(float(from[0]), float(from[1]), float(from[2]), float(from[3]));
#endif
}

inline void put(device float* to, float4 x) {
#if WIDTH == 4
  write(to, x);
#else
  to[0] = x[0];
  to[1] = x[1];
  to[2] = x[2];
  to[3] = x[3];
#endif
}

inline float row_sum(float x) {
  x += simd_shuffle_xor(x, 1);
  return x + simd_shuffle_xor(x, 2);
}
