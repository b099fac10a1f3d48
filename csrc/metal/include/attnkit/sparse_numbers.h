// Kernels of attnkit/sparse.h, which states their grids, whose results are numbers: out (T, H, DIM) of TYPE, lse and
// row_sum (T, H) float.

struct Numbers {
  device TYPE* out;
  device float* lse;
  device float* row_sum;
};

inline void store_numbers(
    thread const HeadState& state,
    thread const Numbers& to,
    const device float* sink,
    constant SparseShape& shape,
    thread const Task& task,
    thread const Member& me) {
  ATTNKIT_UNROLL
  for (int e = 0; e < 2; e++) {
    const long head = task.head0 + me.at.col + e, row = task.token * shape.heads + head;
    if (head < shape.heads) {
      const float row_sum = state.row_sum[e];
      const device float* joins = shape.has_sink != 0 ? sink + head : nullptr;
      const Result result = result_of(state.row_max[e], row_sum, joins, shape.normalize != 0);
      if (me.at.row == 0 && me.part() == 0) {
        to.lse[row] = result.lse;
        if (shape.normalize == 0) {
          to.row_sum[row] = row_sum;
        }
      }
      store_row(to.out + row * DIM, state, e, result.divisor, me);
    }
  }
}

[[kernel, max_total_threads_per_threadgroup(32 * SIMDS)]] void sparse_rows(
    const device TYPE* q [[buffer(0)]],  // (T, H, DIM)
    const device RowType* near [[buffer(1)]],
    const device int* end [[buffer(2)]],  // (T)
    const device RowType* far [[buffer(3)]],
    const device int* chosen [[buffer(4)]],  // (T, K)
    const device int* length [[buffer(5)]],  // (T)
    const device int* requests [[buffer(6)]],  // (T)
    const device float* sink [[buffer(7)]],  // (H)
    const device int* near_table [[buffer(8)]],
    const device int* far_table [[buffer(9)]],
    const device float* divisor [[buffer(10)]],  // (): of NVFP4 numbers
    constant SparseShape& shape [[buffer(11)]],
    constant float& scale [[buffer(12)]],
    device TYPE* parts [[buffer(13)]],  // (splits, rest, H, DIM)
    device float* max_parts [[buffer(14)]],  // (splits, rest, H)
    device float* sum_parts [[buffer(15)]],
    device TYPE* out [[buffer(16)]],
    device float* lse [[buffer(17)]],
    device float* row_sum [[buffer(18)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup TYPE rows[KEYS * STEP];
  threadgroup long places[2 * KEYS];
  threadgroup float2 sums[SUMS];
  const Shared shared = {rows, places, sums};
  const Member me = {fragment_lane(lane), int(lane), int(simd)};
  const Inputs in = {q, near, far, near_table, far_table, DIVIDED ? divisor[0] : 1.0f, scale};
  const Task task = task_of(group, shape, me);
  const Keys keys = keys_of(end, chosen, length, requests, shape, task.token);
  HeadState state;
  attend(state, in, keys, shared, shape, task, me);
  if (task.splits > 1) {
    const Parts to = {parts, max_parts, sum_parts};
    store_part(state, to, shape, task, me);
  } else {
    const Numbers to = {out, lse, row_sum};
    store_numbers(state, to, sink, shape, task, me);
  }
}

constant constexpr int SPAN = 128;

kernel void sparse_merge(
    const device TYPE* parts [[buffer(0)]],  // (splits, rows, DIM)
    const device float* max_parts [[buffer(1)]],  // (splits, rows)
    const device float* sum_parts [[buffer(2)]],
    const device float* sink [[buffer(3)]],
    constant SparseMerge& shape [[buffer(4)]],
    device TYPE* out [[buffer(5)]],
    device float* lse [[buffer(6)]],
    device float* row_sum [[buffer(7)]],
    uint group [[threadgroup_position_in_grid]],
    uint simds [[simdgroups_per_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int SPANS = (DIM + SPAN - 1) / SPAN;
  const long item = long(group) * simds + simd;
  const long row = item / SPANS, to = shape.first + row;
  if (row >= shape.rows) {
    return;
  }
  const int d = int(item % SPANS) * SPAN + int(lane) * 4;
  const Merged<1> merged = merge_parts<1>(parts, max_parts, sum_parts, shape, row, d, int(lane));
  const device float* joins = shape.has_sink != 0 ? sink + row % shape.heads : nullptr;
  const Result result = result_of(merged.row_max, merged.row_sum, joins, shape.normalize != 0);
  if (d < DIM) {
    write(out + to * DIM + d, merged.of[0] / result.divisor);
  }
  if (d == 0) {
    lse[to] = result.lse;
    if (shape.normalize == 0) {
      row_sum[to] = merged.row_sum;
    }
  }
}
