// Heads o (tokens, heads, DIM) of TYPE, whose last PAIRS interleaved pairs are rotated back, to codes of E2M1 (tokens,
// heads, DIM/2) and a scale byte for every BLOCK channels: linear (tokens, heads, DIM/BLOCK), or a matrix in the 128x4
// layout for each run of ``group_heads`` heads, padded with zeros. cos and sin (tokens, PAIRS) of ANGLE_TYPE. Bound by
// memory: o, codes and scales pass once.
//
// Grid: a thread has a cell of eight channels, at least ``cells`` threads along x in threadgroups of any number of
// simdgroups: the cells of all heads, or with SWIZZLED of all padded matrices.
//
// Defined by the host: TYPE, ANGLE_TYPE, BLOCK (16 NVFP4, 32 MXFP4), DIM, PAIRS, SWIZZLED, WIDTH, WORDS.

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#include "attnkit/numbers.h"
#include "attnkit/cells.h"
#include "attnkit/e4m3.h"
#include "attnkit/quantize.h"
#include "attnkit/block_scales.h"
#include "attnkit/rotate.h"

struct Shape {
  long cells;
  long tokens;
  long heads;
  long group_heads;
  long padded_tokens;
  long padded_columns;  // scales of a token and group
  long token_step;  // elements
  long head_step;
  long cos_step;
  long sin_step;
};

constant constexpr int LANES = BLOCK / CELL;
constant constexpr int HEAD_CELLS = DIM / CELL;

kernel void quantize_heads(
    const device TYPE* o [[buffer(0)]],
    const device ANGLE_TYPE* cosines [[buffer(1)]],
    const device ANGLE_TYPE* sines [[buffer(2)]],
    constant float& tensor_scale [[buffer(3)]],
    device uchar* codes [[buffer(4)]],
    device uchar* scales [[buffer(5)]],
    constant Shape& shape [[buffer(6)]],
    uint unit [[thread_position_in_grid]]) {
  const uint heads = uint(shape.heads);
  const bool inside = unit < uint(shape.cells);
#if SWIZZLED
  // at: the cell's place in its row of a matrix
  const uint row_cells = uint(shape.padded_columns) * LANES, at = unit % row_cells;
  const uint token = unit / row_cells % uint(shape.padded_tokens);
  const long matrix = unit / row_cells / uint(shape.padded_tokens);
  const uint head = uint(matrix * shape.group_heads) + at / HEAD_CELLS, cell_index = at % HEAD_CELLS;
  const bool live = inside && token < uint(shape.tokens) && at < uint(shape.group_heads) * HEAD_CELLS;
  const long place = matrix * shape.padded_tokens * shape.padded_columns
      + place_128x4(token, at / LANES, shape.padded_columns);
#else
  const uint head = unit / HEAD_CELLS % heads, token = unit / HEAD_CELLS / heads, cell_index = unit % HEAD_CELLS;
  const bool live = inside;
  const long place = unit / LANES;
#endif
  const int first = int(cell_index) * CELL;
  Cell cell;
  load(o + (live ? token * shape.token_step + head * shape.head_step + first : 0), live ? CELL : 0, cell);
  if (live && first + CELL > STILL) {
    rotate_back(cell, first, cosines + token * shape.cos_step, sines + token * shape.sin_step);
  }
  uint scale;
#if BLOCK == 16
  const uint packed = nvfp4_encode(cell, block_amax<LANES>(cell), global_scale(as_type<uint>(tensor_scale)), scale);
#else
  const uint packed = mxfp4_encode(cell, block_amax<LANES>(cell), false, scale);
#endif
  if (live) {
    store_word(codes + ((long(token) * heads + head) * HEAD_CELLS + cell_index) * (CELL / 2), packed);
  }
  if (inside && cell_index % LANES == 0 && (live || SWIZZLED)) {
    scales[place] = live ? uchar(scale) : 0;
  }
}
