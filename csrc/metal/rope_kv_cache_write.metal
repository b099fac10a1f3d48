// Heads of q (tokens, heads, DIM), each divided by its root mean square, and rows of keys (tokens, DIM): the last PAIRS
// interleaved pairs of both are rotated by cos and sin (tokens, PAIRS) of ANGLE_TYPE. Heads go to out, contiguous; keys,
// rounded to TYPE, into the slots of a cache, whose rows attnkit/cache_rows.h states. Bound by memory: all passes once.
//
// A simdgroup has a head or a row of keys, a lane cells of eight channels; simdgroups of keys come first.
// Grid: at least tokens * (heads + 1) simdgroups along x, in threadgroups of any number of simdgroups.
//
// Defined by the host: TYPE, ANGLE_TYPE, PAIRS and what attnkit/cache_rows.h asks for. DIM and 2 * PAIRS are multiples
// of eight, and DIM is at most 1024, all of which a lane keeps. WIDTH is 8 where q, keys and the cache are all even.

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#include "attnkit/numbers.h"
#include "attnkit/cells.h"
#include "attnkit/e4m3.h"
#include "attnkit/quantize.h"
#include "attnkit/block_scales.h"
#include "attnkit/cache_rows.h"
#include "attnkit/rotate.h"

struct Heads {
  long count;  // of a token
  long token_step;  // elements
  long head_step;
  long cos_step;
  long sin_step;
};

constant constexpr int TURNS = (DIM + TURN - 1) / TURN;

// The cell whose first channel is ``first``: (a, b) becomes (a cos - b sin, b cos + a sin), rounded to TYPE.
inline void turn(thread Cell& x, int first, const device ANGLE_TYPE* cosines, const device ANGLE_TYPE* sines) {
  if (first < STILL || first >= DIM) {
    return;
  }
  ATTNKIT_UNROLL
  for (int i = 0; i < CELL / 2; i++) {
    const int pair = (first - STILL) / 2 + i;
    const float a = as_type<float>(x.of[2 * i]), b = as_type<float>(x.of[2 * i + 1]);
    const float c = as_type<float>(bits_of(cosines[pair])), s = as_type<float>(bits_of(sines[pair]));
    x.of[2 * i] = rounded_to(TYPE(0.0f), as_type<uint>(a * c - b * s));
    x.of[2 * i + 1] = rounded_to(TYPE(0.0f), as_type<uint>(b * c + a * s));
  }
}

inline void write_key(
    const device TYPE* key, device Stored* to, const device ANGLE_TYPE* cosines, const device ANGLE_TYPE* sines,
    int lane, GlobalScale scale) {
  for (int base = 0; base < DIM; base += TURN) {
    const int first = base + lane * CELL, count = max(DIM - first, 0);
    Cell cell;
    load(key + first, count, cell);
    turn(cell, first, cosines, sines);
#if FORMAT
    if (first >= NOPE) {
      store_rope(to + ROPE_AT + 2 * (first - NOPE), count, cell);
    }
    if (base < NOPE) {
      encode(to, first, cell, scale);
    }
#else
    store(to + first, count, cell);
#endif
  }
#if FORMAT
  if (END + lane < SIZE) {
    to[END + lane] = 0;
  }
#endif
}

inline void norm_head(
    const device TYPE* head, device TYPE* to, const device ANGLE_TYPE* cosines, const device ANGLE_TYPE* sines,
    int lane, float eps) {
  Cell cells[TURNS];
  float sum = 0.0f;
  ATTNKIT_UNROLL
  for (int t = 0; t < TURNS; t++) {
    const int first = t * TURN + lane * CELL;
    load(head + first, max(DIM - first, 0), cells[t]);
    ATTNKIT_UNROLL
    for (int i = 0; i < CELL; i++) {
      const float x = as_type<float>(cells[t].of[i]);
      sum += x * x;
    }
  }
  const float factor = rsqrt(simd_sum(sum) / float(DIM) + eps);
  ATTNKIT_UNROLL
  for (int t = 0; t < TURNS; t++) {
    const int first = t * TURN + lane * CELL;
    ATTNKIT_UNROLL
    for (int i = 0; i < CELL; i++) {
      cells[t].of[i] = as_type<uint>(as_type<float>(cells[t].of[i]) * factor);
    }
    turn(cells[t], first, cosines, sines);
    store(to + first, max(DIM - first, 0), cells[t]);
  }
}

kernel void rope_and_write(
    const device TYPE* q [[buffer(0)]],
    const device TYPE* keys [[buffer(1)]],
    device Stored* cache [[buffer(2)]],
    const device Slot* slots [[buffer(3)]],
    const device ANGLE_TYPE* cosines [[buffer(4)]],
    const device ANGLE_TYPE* sines [[buffer(5)]],
    constant float& tensor_scale [[buffer(6)]],
    device TYPE* out [[buffer(7)]],
    constant float& eps [[buffer(8)]],
    constant Shape& shape [[buffer(9)]],
    constant Heads& heads [[buffer(10)]],
    uint index [[thread_position_in_grid]]) {
  const long item = index / 32;
  const int lane = int(index % 32);
  if (item < shape.rows) {
    const long slot = slot_of(slots, item, shape.slots);
    if (slot >= 0) {
      write_key(
          keys + item * shape.step, cache + slot * shape.cache_step, cosines + item * heads.cos_step,
          sines + item * heads.sin_step, lane, global_scale(as_type<uint>(tensor_scale)));
    }
    return;
  }
  const long row = item - shape.rows;
  if (row >= shape.rows * heads.count) {
    return;
  }
  const long token = row / heads.count, head = row % heads.count;
  norm_head(
      q + token * heads.token_step + head * heads.head_step, out + row * DIM, cosines + token * heads.cos_step,
      sines + token * heads.sin_step, lane, eps);
}
