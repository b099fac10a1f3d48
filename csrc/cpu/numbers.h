// Arithmetic of float32 that a compiler turns into vectors: sums in lanes, and an exponential without a table.
#pragma once

#include <cstdint>

// One binary for every x86-64: GCC compiles a kernel once more for processors with AVX2 and chooses when it loads. Clang
// would ask its runtime which processor it is, and the one that zig links into wheels has no answer.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define ATTNKIT_KERNEL __attribute__((target_clones("avx2", "default")))
#else
#define ATTNKIT_KERNEL
#endif
#define ATTNKIT_INSIDE static inline __attribute__((always_inline))

namespace attnkit {

constexpr int64_t kLanes = 16;

// e^x, within an ulp or two where it is a normal number: 2^n times a polynomial, for x = n ln 2 + r.
ATTNKIT_INSIDE float exp_of(float x) {
  constexpr float kRound = 12582912.0f;                           // 1.5 * 2^23: a sum with it has no fraction left
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;  // the first has 9 bits: n times it is exact
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  const float shifted = x * 1.44269504f + kRound, n = shifted - kRound;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  // In two steps, for n reaches from -150 to 128 and one exponent from -126 to 127.
  const int32_t whole = __builtin_bit_cast(int32_t, shifted) - __builtin_bit_cast(int32_t, kRound), half = whole >> 1;
  return p * __builtin_bit_cast(float, (half + 127) << 23) * __builtin_bit_cast(float, (whole - half + 127) << 23);
}

ATTNKIT_INSIDE float silu(float x) { return x / (1.0f + exp_of(-x)); }

ATTNKIT_INSIDE float sum(const float* lanes) {
  float half[8], quarter[4];
  for (int i = 0; i < 8; i++) half[i] = lanes[i] + lanes[i + 8];
  for (int i = 0; i < 4; i++) quarter[i] = half[i] + half[i + 4];
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

ATTNKIT_INSIDE float dot(const float* a, const float* b, int64_t n) {
#ifdef __clang__  // which leaves the lanes below in memory
#pragma clang fp reassociate(on)
  float total = 0;
  for (int64_t i = 0; i < n; i++) total += a[i] * b[i];
  return total;
#else
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t j = 0; j < kLanes; j++) lanes[j] += a[i + j] * b[i + j];
  for (int64_t j = 0; i < n; i++, j++) lanes[j] += a[i] * b[i];
  return sum(lanes);
#endif
}

}  // namespace attnkit
