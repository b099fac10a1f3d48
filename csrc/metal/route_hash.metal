// The experts that a table names for tokens, weighted by sqrt(softplus(logit)). logits (rows, experts) of TYPE, ids
// (rows) and table (entries, TOPK) of int or long; weights (rows, TOPK) float and indices (rows, TOPK) int. An id or an
// expert that does not exist gives expert 0 with weight 0.
//
// Grid: LANES neighbouring lanes have a row, 32 / LANES rows a simdgroup: at least ``rows`` * LANES threads along x in
// threadgroups of any number of simdgroups.
//
// Defined by the host: TYPE, WIDE_IDS, WIDE_TABLE (long, not int), TOPK, LANES (a power of two), RENORMALIZE.

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#include "attnkit/numbers.h"
#include "attnkit/scores.h"

#if WIDE_IDS
typedef long Id;
#else
typedef int Id;
#endif
#if WIDE_TABLE
typedef long Entry;
#else
typedef int Entry;
#endif

struct Shape {
  long rows;
  long experts;
  long entries;
  long step;  // elements from one row of logits to the next
  long table_step;
};

struct Named {
  int expert;
  float weight;
};

inline Named named(const device TYPE* logits, const device Entry* entry, bool known, int k, long experts) {
  Named n;
  n.expert = 0;
  n.weight = 0.0f;
  const long expert = known && k < TOPK ? long(entry[k]) : -1;
  if (expert >= 0 && expert < experts) {
    n.expert = int(expert);
    n.weight = sqrt_softplus(as_type<float>(bits_of(logits[expert])));
  }
  return n;
}

kernel void route_table(
    const device TYPE* logits [[buffer(0)]],
    const device Id* ids [[buffer(1)]],
    const device Entry* table [[buffer(2)]],
    device float* weights [[buffer(3)]],
    device int* indices [[buffer(4)]],
    constant Shape& shape [[buffer(5)]],
    constant float& route_scale [[buffer(6)]],
    uint index [[thread_position_in_grid]]) {
  const long row = index / LANES;
  const int lane = int(index % LANES);
  const bool live = row < shape.rows;
  const long id = live ? long(ids[row]) : -1;
  const bool known = id >= 0 && id < shape.entries;
  logits += live ? row * shape.step : 0;
  table += known ? id * shape.table_step : 0;

  // The first of a lane's experts stays in registers, those of further turns are looked up twice.
  const Named first = named(logits, table, known, lane, shape.experts);
  float total = first.weight;
  for (int k = lane + LANES; k < TOPK; k += LANES) {
    total += named(logits, table, known, k, shape.experts).weight;
  }
  ATTNKIT_UNROLL
  for (int step = 1; step < LANES; step *= 2) {
    total += simd_shuffle_xor(total, ushort(step));
  }
  const float over = RENORMALIZE ? total + TINY : 1.0f;
  if (live) {
    for (int k = lane; k < TOPK; k += LANES) {
      const Named n = k == lane ? first : named(logits, table, known, k, shape.experts);
      weights[row * TOPK + k] = n.weight / over * route_scale;
      indices[row * TOPK + k] = n.expert;
    }
  }
}
