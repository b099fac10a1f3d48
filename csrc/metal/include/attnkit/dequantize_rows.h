// Codes of E2M1 (..., K/2) under one scale byte for every BLOCK of them to numbers (..., K) of TYPE. The scales are
// linear or one matrix of all rows in the 128x4 layout, whose rows may lie apart. Bound by memory.
//
// Grid: a thread has a cell of eight codes, at least ``cells`` threads along x in threadgroups of any number of
// simdgroups. With FLAT rows of codes, and of linear scales, lie one after the other.
//
// Defined by the host: TYPE, BLOCK (16 NVFP4, 32 MXFP4), GLOBAL, SWIZZLED, PITCHED (that
// matrix has room between its rows), FLAT, RANK, WIDTH, WORDS.

struct Shape {
  long cells;
  long row_cells;
  long columns;  // of the padded matrix
  long pitch;  // bytes from one of its rows to the next
  Axis axes[RANK];  // the batch axes, outermost first
};

kernel void dequantize_rows(
    const device uchar* codes [[buffer(0)]],
    const device uchar* scales [[buffer(1)]],
    constant float& tensor_scale [[buffer(2)]],
    device TYPE* x [[buffer(3)]],
    constant Shape& shape [[buffer(4)]],
    uint unit [[thread_position_in_grid]]) {
  constexpr int LANES = BLOCK / CELL;
  if (unit >= uint(shape.cells)) {
    return;
  }
  long place = long(unit) * (CELL / 2), block = long(unit) / LANES;
#if !FLAT
  const uint row = unit / uint(shape.row_cells), at = unit % uint(shape.row_cells);
  place = long(at) * (CELL / 2);
  block = at / LANES;
  uint rest = row;
  for (int axis = RANK - 1; axis > 0; axis--) {
    const uint i = rest % uint(shape.axes[axis].size);
    rest /= uint(shape.axes[axis].size);
    place += i * shape.axes[axis].step;
    block += i * shape.axes[axis].scale_step;
  }
  place += rest * shape.axes[0].step;
  block += rest * shape.axes[0].scale_step;
#if SWIZZLED
  block = place_128x4(row, at / LANES, shape.columns);
#if PITCHED
  block = block / shape.columns * shape.pitch + block % shape.columns;
#endif
#endif
#endif

  Cell cell;
  const uint packed = load_word(codes + place), scale = scales[block];
#if BLOCK == 16
#if GLOBAL
  nvfp4_decode(packed, scale, global_scale(as_type<uint>(tensor_scale)), cell);
#else
  nvfp4_decode(packed, scale, cell);
#endif
#else
  mxfp4_decode(packed, scale, cell);
#endif
  store(x + long(unit) * CELL, CELL, cell);
}
