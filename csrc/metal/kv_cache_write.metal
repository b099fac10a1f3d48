// Rows of numbers, encoded, into the slots of a cache: attnkit/cache_rows.h states the shapes and the grid. A slot that
// is none is passed over, and nothing between rows is touched.

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#include "attnkit/numbers.h"
#include "attnkit/cells.h"
#include "attnkit/e4m3.h"
#include "attnkit/quantize.h"
#include "attnkit/block_scales.h"
#include "attnkit/cache_rows.h"

kernel void write_rows(
    const device TYPE* numbers [[buffer(0)]],
    device Stored* cache [[buffer(1)]],
    const device Slot* slots [[buffer(2)]],
    constant float& tensor_scale [[buffer(3)]],
    constant Shape& shape [[buffer(4)]],
    uint index [[thread_position_in_grid]]) {
  const long row = index / 32;
  const int lane = int(index % 32);
  const long slot = row < shape.rows ? slot_of(slots, row, shape.slots) : -1;
  if (slot < 0) {
    return;
  }
  numbers += row * shape.step;
  cache += slot * shape.cache_step;
  for (int base = 0; base < DIM; base += TURN) {
    const int first = base + lane * CELL, count = max(DIM - first, 0);
    Cell cell;
    load(numbers + first, count, cell);
#if FORMAT
    if (first >= NOPE) {
      store_rope(cache + ROPE_AT + 2 * (first - NOPE), count, cell);
    }
    if (base < NOPE) {
      encode(cache, first, cell, global_scale(as_type<uint>(tensor_scale)));
    }
#else
    store(cache + first, count, cell);
#endif
  }
#if FORMAT
  if (END + lane < SIZE) {
    cache[END + lane] = 0;
  }
#endif
}
