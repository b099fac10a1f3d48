// Keys and values of tokens to slots of pages. Token r goes to page slots[r] / page_size, place slots[r] % page_size, of
// both caches; a slot that is none is passed over, and nothing between heads is touched.
//
// A simdgroup has a token, a lane a cell of eight channels of a head at a time, first of the keys, then of the values.
// Grid: at least ``tokens`` simdgroups along x, in threadgroups of any number of simdgroups.
//
// Defined by the host: TYPE of the tokens, CODES (caches are E4M3, else TYPE), WIDE_SLOTS (long, not int), HEADS, DIM
// and DIM_V of a head, SCALE_K and SCALE_V (a number for each head divides), WIDTH.

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#include "attnkit/numbers.h"
#include "attnkit/cells.h"
#include "attnkit/e4m3.h"

#if WIDE_SLOTS
typedef long Slot;
#else
typedef int Slot;
#endif
// What is bound in the place of scales that are not given.
#if SCALE_K
typedef float ScaleK;
#else
typedef Slot ScaleK;
#endif
#if SCALE_V
typedef float ScaleV;
#else
typedef Slot ScaleV;
#endif
#if CODES
typedef uchar Stored;
#else
typedef TYPE Stored;
#endif

struct Shape {
  long tokens;
  long slots;
  long page_size;
  long key_token, key_head;  // elements from one to the next
  long value_token, value_head;
  long k_page, k_place, k_head;
  long v_page, v_place, v_head;
};

#if CODES
// The codes of a cell's first ``count`` numbers over ``by``.
inline void encode(device uchar* to, int count, thread const Cell& x, float by) {
  uchar codes[CELL];
  ATTNKIT_UNROLL
  for (int i = 0; i < CELL; i++) {
    const float a = as_type<float>(x.of[i] & MAGNITUDE) / by;
    const uint code = e4m3_of(a) | ((x.of[i] >> 24) & 0x80u);
    codes[i] = uchar((x.of[i] & MAGNITUDE) > INFINITE ? E4M3_NAN : code);
  }
  ATTNKIT_UNROLL
  for (int i = 0; i < CELL; i++) {
    if (i < count) {
      to[i] = codes[i];
    }
  }
}
#endif

// Every head of a token: DIMENSION channels each, from heads ``step`` apart to heads ``to_step`` apart.
template <int DIMENSION, bool SCALED, typename S>
inline void write_heads(
    const device TYPE* from, long step, device Stored* to, long to_step, const device S* scales, int lane) {
  constexpr int CELLS = (DIMENSION + CELL - 1) / CELL;
  for (int at = lane; at < HEADS * CELLS; at += 32) {
    const int head = at / CELLS, first = at % CELLS * CELL, count = DIMENSION - first;
    Cell cell;
    load(from + head * step + first, count, cell);
#if CODES
    encode(to + head * to_step + first, count, cell, SCALED ? float(scales[head]) : 1.0f);
#else
    store(to + head * to_step + first, count, cell);
#endif
  }
}

kernel void write_pages(
    const device TYPE* key [[buffer(0)]],
    const device TYPE* value [[buffer(1)]],
    device Stored* k_cache [[buffer(2)]],
    device Stored* v_cache [[buffer(3)]],
    const device Slot* slots [[buffer(4)]],
    const device ScaleK* k_scales [[buffer(5)]],
    const device ScaleV* v_scales [[buffer(6)]],
    constant Shape& shape [[buffer(7)]],
    uint index [[thread_position_in_grid]]) {
  const long token = index / 32;
  const int lane = int(index % 32);
  const long slot = token < shape.tokens ? long(slots[token]) : -1;
  if (slot < 0 || slot >= shape.slots) {
    return;
  }
  const long page = slot / shape.page_size, place = slot % shape.page_size;
  write_heads<DIM, SCALE_K>(
      key + token * shape.key_token, shape.key_head, k_cache + page * shape.k_page + place * shape.k_place,
      shape.k_head, k_scales, lane);
  write_heads<DIM_V, SCALE_V>(
      value + token * shape.value_token, shape.value_head, v_cache + page * shape.v_page + place * shape.v_place,
      shape.v_head, v_scales, lane);
}
