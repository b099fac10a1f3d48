// Rows of a cache, decoded to numbers, in the order of ``slots``: attnkit/cache_rows.h states the shapes and the grid.
// A slot that is none gives zeros.

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#include "attnkit/numbers.h"
#include "attnkit/cells.h"
#include "attnkit/e4m3.h"
#include "attnkit/quantize.h"
#include "attnkit/block_scales.h"
#include "attnkit/cache_rows.h"

kernel void gather_rows(
    device TYPE* numbers [[buffer(0)]],
    const device Stored* cache [[buffer(1)]],
    const device Slot* slots [[buffer(2)]],
    constant float& tensor_scale [[buffer(3)]],
    constant Shape& shape [[buffer(4)]],
    uint index [[thread_position_in_grid]]) {
  const long row = index / 32;
  if (row >= shape.rows) {
    return;
  }
  const long slot = slot_of(slots, row, shape.slots);
  numbers += row * shape.step;
  cache += (slot < 0 ? 0 : slot) * shape.cache_step;
  for (int first = int(index % 32) * CELL; first < DIM; first += TURN) {
    const int count = DIM - first;
    Cell cell;
    if (slot < 0) {
      ATTNKIT_UNROLL
      for (int i = 0; i < CELL; i++) {
        cell.of[i] = 0u;
      }
    } else {
#if FORMAT
      if (first < NOPE) {
        decode(cache, first, cell, global_scale(as_type<uint>(tensor_scale)));
      } else {
        load_rope(cache + ROPE_AT + 2 * (first - NOPE), count, cell);
      }
#else
      load(cache + first, count, cell);
#endif
    }
    store(numbers + first, count, cell);
  }
}
