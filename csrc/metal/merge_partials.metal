// lse = log sum_p exp(lse_p), out = sum_p exp(lse_p - lse) out_p over P partials; row_sum divides the partials first, a
// sink scales the result by sigmoid(lse - sink). An lse_partial of +inf is read as -inf. out_partial (P, R, H, Dv) of IN_TYPE, lse_partial and row_sum
// (P, R, H) float, sink (H) float, out (R, H, Dv) of OUT_TYPE, lse (R, H) float. Bound by memory.
//
// Grid: each simdgroup takes 128 elements of one row; at least ceil(R * H * ceil(Dv / 128) / simdgroups of a
// threadgroup) threadgroups in x and y, counted row by row, of any number of simdgroups. WIDTH 4 needs Dv, the steps
// and the offsets to be multiples of 4.
//
// Defined by the host: IN_TYPE, OUT_TYPE, WIDTH.

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#include "attnkit/merge.h"

struct Shape {
  long parts;
  long rows;
  long heads;
  long dim;
  long spans;  // of 128 elements in a row, at least 1
  long part_step;  // elements, of out_partial
  long row_step;
  long head_step;
  long lse_part_step;
  long lse_row_step;
  long sum_part_step;  // -1: no row_sum
  long sum_row_step;
  long has_sink;
};

kernel void merge_partials(
    const device IN_TYPE* out_partial [[buffer(0)]],
    const device float* lse_partial [[buffer(1)]],
    const device float* sink [[buffer(2)]],
    const device float* row_sum [[buffer(3)]],
    device OUT_TYPE* out [[buffer(4)]],
    device float* lse [[buffer(5)]],
    constant Shape& shape [[buffer(6)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint2 groups [[threadgroups_per_grid]],
    uint simds [[simdgroups_per_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const long item = (long(group.y) * groups.x + group.x) * simds + simd;
  const long at = item / shape.spans;  // row * heads + head
  if (at >= shape.rows * shape.heads) {
    return;
  }
  const long r = at / shape.heads, h = at % shape.heads;
  MergeRow row;
  row.parts = int(shape.parts);
  row.dim = int(shape.dim);
  row.part_step = shape.part_step;
  row.lse_step = shape.lse_part_step;
  row.sum_step = shape.sum_part_step;
  merge_row<true>(
      out_partial + r * shape.row_step + h * shape.head_step,
      lse_partial + r * shape.lse_row_step + h,
      row_sum + r * shape.sum_row_step + h,
      shape.has_sink != 0 ? sink + h : nullptr,
      out + at * shape.dim,
      lse + at,
      row,
      int(item % shape.spans) * MERGE_SPAN,
      lane);
}
