// A decode step of the gated delta rule, as gated_delta_step.metal and kimi_delta_step.metal say it. CHANNELS, whether
// each channel has a gate, is theirs. factor is beta_scale, or with BOUNDED lower_bound.
//
// Four lanes have a row of the state, eight rows a simdgroup: a row's float4 stay in registers over all tokens, sums go
// over four lanes, and rows meet no others. Bound by memory: a state crosses the bus once each way. Gates of channels are
// worked out first, of all tokens, an element a thread, and kept in threadgroup memory: one barrier behind it.
//
// Grid: x tiles of 8 * SIMDS rows, y value heads, z sequences; SIMDS simdgroups in a threadgroup.

#pragma once

#include "attnkit/vectors.h"
#include "attnkit/numbers.h"
#include "attnkit/scores.h"
#include "attnkit/delta.h"
#include "attnkit/softplus.h"

struct Shape {
  long group;  // value heads of a key head
  long slots;
  long has_accepted;
  long q[3];  // elements from sequence to sequence, token to token, head to head; and so on
  long k[3];
  long v[3];
#if CHANNELS
  long a[4];
#else
  long a[3];
#endif
  long b[3];
  long state[3];  // from slot to slot, head to head, row to row
  long index[2];
};

inline float row_dot(thread const float4* x, thread const float4* y) {
  float4 sum = float4(0.0f);
  ATTNKIT_UNROLL
  for (int i = 0; i < VECTORS; i++) {
    sum = fma(x[i], y[i], sum);
  }
  return row_sum(sum_of(sum));
}

[[kernel, max_total_threads_per_threadgroup(32 * SIMDS)]] void delta_step(
    const device TYPE* q [[buffer(0)]],
    const device TYPE* k [[buffer(1)]],
    const device TYPE* v [[buffer(2)]],
    const device TYPE* a [[buffer(3)]],
    const device TYPE* b [[buffer(4)]],
    const device LOG_TYPE* log_rate [[buffer(5)]],
    const device BIAS_TYPE* bias [[buffer(6)]],
    device float* state [[buffer(7)]],
    const device int* index [[buffer(8)]],
    const device int* accepted [[buffer(9)]],
    device TYPE* out [[buffer(10)]],
    constant Shape& shape [[buffer(11)]],
    constant float& scale [[buffer(12)]],
    constant float& eps [[buffer(13)]],
    constant float& factor [[buffer(14)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int head = int(group.y), sequence = int(group.z);
  const int row = int(group.x) * 8 * SIMDS + int(simd) * 8 + int(lane) / LANES, part = int(lane) % LANES * 4;
  const bool valid = row < DIM_V;
  index += sequence * shape.index[0];
  const int begin = shape.has_accepted != 0 ? clamp(accepted[sequence], 1, TOKENS) - 1 : 0;
  const int first = index[begin * shape.index[1]];
  const bool here = first >= 0 && first < int(shape.slots);
  device float* const rows = state + head * shape.state[1] + (valid ? row : 0) * shape.state[2] + part;
  float4 s[VECTORS];
  ATTNKIT_UNROLL
  for (int i = 0; i < VECTORS; i++) {
    s[i] = here && valid ? four(rows + first * shape.state[0] + 4 * LANES * i) : float4(0.0f);
  }
  const float rate = exp(float(log_rate[head]));
#if CHANNELS
  threadgroup float decays[TOKENS * DIM];
  channel_decays(a + sequence * shape.a[0] + head * shape.a[2], shape.a[1], shape.a[3], bias + head * DIM, rate, factor,
                 decays, int(simd) * 32 + int(lane));
#else
  const float shift = float(bias[head]);
#endif
  const int key_head = head / int(shape.group);
  ATTNKIT_UNROLL
  for (int t = 0; t < TOKENS; t++) {
    const device TYPE* const from_q = q + sequence * shape.q[0] + t * shape.q[1] + key_head * shape.q[2] + part;
    const device TYPE* const from_k = k + sequence * shape.k[0] + t * shape.k[1] + key_head * shape.k[2] + part;
    float4 query[VECTORS], key[VECTORS];
    ATTNKIT_UNROLL
    for (int i = 0; i < VECTORS; i++) {
      query[i] = four(from_q + 4 * LANES * i);
      key[i] = four(from_k + 4 * LANES * i);
    }
    float by_q = scale, by_k = 1.0f;
#if NORMALIZED
    by_q *= rsqrt(row_dot(query, query) + eps);
    by_k = rsqrt(row_dot(key, key) + eps);
#endif
#if CHANNELS
    const float decay = 1.0f, scale_of_beta = 1.0f;
    ATTNKIT_UNROLL
    for (int i = 0; i < VECTORS; i++) {
      const threadgroup float* const of = decays + t * DIM + part + 4 * LANES * i;
      s[i] *= float4(of[0], of[1], of[2], of[3]);
    }
#else
    const float gate = float(a[sequence * shape.a[0] + t * shape.a[1] + head * shape.a[2]]) + shift;
    const float decay = exp(-rate * softplus(gate)), scale_of_beta = factor;
#endif
    const float gain = float(b[sequence * shape.b[0] + t * shape.b[1] + head * shape.b[2]]);
    const float beta = scale_of_beta / (1.0f + exp(-gain));
    const float value = float(v[sequence * shape.v[0] + t * shape.v[1] + head * shape.v[2] + (valid ? row : 0)]);
    const float u = beta * (value - decay * by_k * row_dot(s, key)) * by_k;
    ATTNKIT_UNROLL
    for (int i = 0; i < VECTORS; i++) {
      s[i] = fma(key[i], float4(u), s[i] * decay);
    }
    const float result = by_q * row_dot(s, query);
    if (valid && part == 0) {
      out[((long(sequence) * TOKENS + t) * groups.y + head) * DIM_V + row] = TYPE(here ? result : 0.0f);
    }
    const int to = index[t * shape.index[1]];
    if (valid && here && to >= 0 && to < int(shape.slots)) {
      ATTNKIT_UNROLL
      for (int i = 0; i < VECTORS; i++) {
        put(rows + to * shape.state[0] + 4 * LANES * i, s[i]);
      }
    }
  }
}
