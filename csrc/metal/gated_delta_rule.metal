// Packed sequences through the gated delta rule, token by token: S <- exp(g) S + u k', u = beta (v - exp(g) S k'),
// out = S q', in float. With NORMALIZED q and k are divided by sqrt(sum of their squares + eps). q, k (tokens, Hk, DIM),
// v, out (tokens, Hv, DIM_V) of TYPE, g float and beta of BETA_TYPE (tokens, Hv), state (slots, Hv, DIM_V, DIM) float,
// offsets (sequences + 1), state_index and past (sequences) int. Sequence b has the tokens from offsets[b] up to
// offsets[b + 1]; it begins with the state of its slot, or with zeros where past[b] is 0, and leaves its last state
// there. Without a slot, and behind the last sequence, out is 0.
//
// Four lanes have a row of the state, eight rows a simdgroup: a row's float4 stay in registers over all tokens, sums go
// over four lanes, and rows meet no others. Of every BLOCK tokens a threadgroup has keys and queries, with their norms
// taken, and gates in threadgroup memory.
//
// Grid: x tiles of 8 * SIMDS rows, y value heads, z sequences and one for the tokens behind them; SIMDS simdgroups in a
// threadgroup. Barriers: one before a block is written, behind its last reader, and one after.
//
// Defined by the host: TYPE, BETA_TYPE, DIM (a multiple of 16), DIM_V, NORMALIZED, BLOCK, SIMDS, WIDTH (4: rows of q, k
// and the state start at multiples of four elements).

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#include "attnkit/numbers.h"
#include "attnkit/delta.h"

struct Shape {
  long group;  // value heads of a key head
  long slots;
  long sequences;
  long tokens;
  long has_past;
  long q[2];  // elements from token to token, head to head; and so on
  long k[2];
  long v[2];
  long g[2];
  long beta[2];
  long state[3];  // from slot to slot, head to head, row to row
  long offsets[1];
  long index[1];
  long past[1];
};

// A head's numbers, times scale and over their norm; lanes have every 32nd float4 of them.
inline void take(
    const device TYPE* from, float scale, float eps, uint lane, threadgroup float4* to) {
  float4 sum = float4(0.0f);
  for (int i = int(lane); i < DIM / 4; i += 32) {
    const float4 x = four(from + 4 * i);
    sum = fma(x, x, sum);
    to[i] = x;
  }
#if NORMALIZED
  scale *= rsqrt(simd_sum(sum_of(sum)) + eps);
#endif
  for (int i = int(lane); i < DIM / 4; i += 32) {
    to[i] *= scale;
  }
}

[[kernel, max_total_threads_per_threadgroup(32 * SIMDS)]] void gated_delta_rule(
    const device TYPE* q [[buffer(0)]],
    const device TYPE* k [[buffer(1)]],
    const device TYPE* v [[buffer(2)]],
    const device float* g [[buffer(3)]],
    const device BETA_TYPE* beta [[buffer(4)]],
    device float* state [[buffer(5)]],
    const device int* offsets [[buffer(6)]],
    const device int* index [[buffer(7)]],
    const device int* past [[buffer(8)]],
    device TYPE* out [[buffer(9)]],
    constant Shape& shape [[buffer(10)]],
    constant float& scale [[buffer(11)]],
    constant float& eps [[buffer(12)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 keys[BLOCK][DIM / 4], queries[BLOCK][DIM / 4];
  threadgroup float decays[BLOCK], betas[BLOCK];
  const int head = int(group.y), sequence = int(group.z), limit = int(shape.tokens);
  const int row = int(group.x) * 8 * SIMDS + int(simd) * 8 + int(lane) / LANES, part = int(lane) % LANES;
  const bool valid = row < DIM_V, given = sequence < int(shape.sequences);
  const int first = clamp(offsets[sequence * shape.offsets[0]], 0, limit);
  const int last = given ? clamp(offsets[(sequence + 1) * shape.offsets[0]], first, limit) : limit;
  const int slot = given ? index[sequence * shape.index[0]] : -1;
  if (slot < 0 || slot >= int(shape.slots)) {
    for (int t = first; valid && part == 0 && t < last; t++) {
      out[(long(t) * groups.y + head) * DIM_V + row] = TYPE(0.0f);
    }
    return;
  }
  if (first == last) {
    return;
  }
  const bool begun = shape.has_past == 0 || past[sequence * shape.past[0]] != 0;
  device float* const rows =
      state + slot * shape.state[0] + head * shape.state[1] + (valid ? row : 0) * shape.state[2] + 4 * part;
  float4 s[VECTORS];
  ATTNKIT_UNROLL
  for (int i = 0; i < VECTORS; i++) {
    s[i] = begun && valid ? four(rows + 4 * LANES * i) : float4(0.0f);
  }
  const int key_head = head / int(shape.group);
  for (int begin = first; begin < last; begin += BLOCK) {
    const int count = min(BLOCK, last - begin);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int t = int(simd); t < count; t += SIMDS) {
      const long token = begin + t;
      take(k + token * shape.k[0] + key_head * shape.k[1], 1.0f, eps, lane, keys[t]);
      take(q + token * shape.q[0] + key_head * shape.q[1], scale, eps, lane, queries[t]);
      if (lane == 0) {
        decays[t] = exp(g[token * shape.g[0] + head * shape.g[1]]);
        betas[t] = float(beta[token * shape.beta[0] + head * shape.beta[1]]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int t = 0; t < count; t++) {
      const long token = begin + t;
      const float decay = decays[t];
      float4 found = float4(0.0f);
      ATTNKIT_UNROLL
      for (int i = 0; i < VECTORS; i++) {
        s[i] *= decay;
        found = fma(s[i], keys[t][LANES * i + part], found);
      }
      const float value = float(v[token * shape.v[0] + head * shape.v[1] + (valid ? row : 0)]);
      const float u = betas[t] * (value - row_sum(sum_of(found)));
      float4 read = float4(0.0f);
      ATTNKIT_UNROLL
      for (int i = 0; i < VECTORS; i++) {
        s[i] = fma(keys[t][LANES * i + part], float4(u), s[i]);
        read = fma(s[i], queries[t][LANES * i + part], read);
      }
      const float result = row_sum(sum_of(read));
      if (valid && part == 0) {
        out[(token * groups.y + head) * DIM_V + row] = TYPE(result);
      }
    }
  }
  ATTNKIT_UNROLL
  for (int i = 0; i < VECTORS; i++) {
    if (valid) {
      put(rows + 4 * LANES * i, s[i]);
    }
  }
}
