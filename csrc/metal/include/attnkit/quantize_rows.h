// x (..., K) of TYPE to codes of E2M1 (..., K/2) and one scale byte for every BLOCK numbers, linear or as one matrix of
// all rows in the 128x4 layout, padded with zeros. Bound by memory: x, codes and scales pass once.
//
// Grid: a thread has a cell of eight numbers, at least ``cells`` threads along x in threadgroups of any number of
// simdgroups: the cells of all rows, or with SWIZZLED of the padded matrix. With FLAT rows lie one after the other.
//
// Defined by the host: TYPE, BLOCK (16 NVFP4, 32 MXFP4), DOWN, SWIZZLED, FLAT, RANK, WIDTH, WORDS.

struct Shape {
  long cells;
  long rows;
  long row_cells;  // of a row, or of a padded one
  long blocks;  // of a row
  Axis axes[RANK];  // the batch axes, outermost first
};

kernel void quantize_rows(
    const device TYPE* x [[buffer(0)]],
    constant float& tensor_scale [[buffer(1)]],
    device uchar* codes [[buffer(2)]],
    device uchar* scales [[buffer(3)]],
    constant Shape& shape [[buffer(4)]],
    uint unit [[thread_position_in_grid]]) {
  constexpr int LANES = BLOCK / CELL;
  uint row = 0, at = unit;  // at: the cell's place in its row
  bool live = unit < uint(shape.cells);
  long place = long(unit) * CELL, block = long(unit) / LANES;
#if !FLAT
  row = unit / uint(shape.row_cells);
  at = unit % uint(shape.row_cells);
  const bool padding = live && (row >= uint(shape.rows) || at >= uint(shape.blocks) * LANES);
  live = live && !padding;
  place = long(at) * CELL;
  uint rest = live ? row : 0;
  for (int axis = RANK - 1; axis > 0; axis--) {
    place += long(rest % uint(shape.axes[axis].size)) * shape.axes[axis].step;
    rest /= uint(shape.axes[axis].size);
  }
  place += rest * shape.axes[0].step;
  block = long(row) * shape.blocks + at / LANES;
#if SWIZZLED
  block = place_128x4(row, at / LANES, shape.row_cells / LANES);
#endif
#endif

  Cell cell;
  load(x + (live ? place : 0), live ? CELL : 0, cell);
  uint scale;
#if BLOCK == 16
  const uint packed = nvfp4_encode(cell, block_amax<LANES>(cell), global_scale(as_type<uint>(tensor_scale)), scale);
#else
  const uint packed = mxfp4_encode(cell, block_amax<LANES>(cell), DOWN, scale);
#endif

  if (live) {
#if FLAT
    const long word = long(unit);
#else
    const long word = long(row) * shape.blocks * LANES + at;
#endif
    store_word(codes + word * (CELL / 2), packed);
    if (at % LANES == 0) {
      scales[block] = uchar(scale);
    }
  }
#if SWIZZLED
  if (padding && at % LANES == 0) {
    scales[block] = 0;
  }
#endif
}
