// Kernels of attnkit/sparse.h, which states their grids, whose results are codes of E2M1 and scales: of the output
// rounded to TYPE, as if it was stored, with its last PAIRS pairs rotated back and rounded again. codes (T, H, DIM/2);
// scales linear (T, H, DIM/BLOCK), or a matrix in the 128x4 layout for each run of ``group_heads`` heads, whose padding
// the tokens fill with zeros. cos and sin (T, PAIRS) of ANGLE_TYPE.
//
// Two lanes that have four neighbouring channels each, of the same two heads, exchange them: then each has a cell of
// eight of one head. Cells of a block are in lanes of the same columns of a fragment.
//
// Defined by the host: BLOCK (16 NVFP4, 32 MXFP4), PAIRS, ANGLE_TYPE, SWIZZLED, WORDS.

constant constexpr int LANES = BLOCK / CELL;

struct CodesShape {
  long tokens;
  long heads;
  long group_heads;
  long padded_tokens;
  long padded_columns;  // scales of a token and group
  long cos_step;  // elements
  long sin_step;
};

struct Codes {
  device uchar* codes;
  device uchar* scales;
  const device ANGLE_TYPE* cosines;
  const device ANGLE_TYPE* sines;
  uint tensor_scale;  // the bits of NVFP4's global scale
};

// Where the scale of a block of a head is.
inline long place_of(constant CodesShape& shape, long token, long head, int block) {
  constexpr int BLOCKS_OF_HEAD = DIM / BLOCK;
#if SWIZZLED
  const long matrix = head / shape.group_heads, column = head % shape.group_heads * BLOCKS_OF_HEAD + block;
  return matrix * shape.padded_tokens * shape.padded_columns + place_128x4(token, column, shape.padded_columns);
#else
  return (token * shape.heads + head) * BLOCKS_OF_HEAD + block;
#endif
}

// The cell of channels ``first`` to first + 7 of a head that is there if it is ``live``; lanes whose numbers differ in
// the bits NEXT, and of MXFP4 in BEYOND, too, have the other cells of its block. All lanes take part.
template <int NEXT, int BEYOND>
inline void store_cell(
    thread Cell& x, int first, long token, long head, bool live, thread const Codes& to, constant CodesShape& shape) {
  if (live && first + CELL > STILL) {
    rotate_back(x, first, to.cosines + token * shape.cos_step, to.sines + token * shape.sin_step);
  }
  uint top = amax_of(x), scale;
  top = max(top, simd_shuffle_xor(top, ushort(NEXT)));
#if BLOCK == 16
  const uint packed = nvfp4_encode(x, top, global_scale(to.tensor_scale), scale);
#else
  top = max(top, simd_shuffle_xor(top, ushort(BEYOND)));
  const uint packed = mxfp4_encode(x, top, false, scale);
#endif
  if (live) {
    store_word(to.codes + ((token * shape.heads + head) * DIM + first) / 2, packed);
    if (first % BLOCK == 0) {
      to.scales[place_of(shape, token, head, first / BLOCK)] = uchar(scale);
#if SWIZZLED
      for (long row = token + shape.tokens; row < shape.padded_tokens; row += shape.tokens) {
        to.scales[place_of(shape, row, head, first / BLOCK)] = 0;
      }
#endif
    }
  }
}

inline void store_codes(
    thread const HeadState& state,
    thread const Codes& to,
    const device float* sink,
    constant SparseShape& shape,
    constant CodesShape& codes,
    thread const Task& task,
    thread const Member& me) {
  float divisor[2];
  ATTNKIT_UNROLL
  for (int e = 0; e < 2; e++) {
    const int head = task.head0 + me.at.col + e;
    const device float* joins = shape.has_sink != 0 && head < int(shape.heads) ? sink + head : nullptr;
    divisor[e] = result_of(state.row_max[e], state.row_sum[e], joins, true).divisor;
  }
  const int odd = me.at.row % 2;  // which of the two heads this lane keeps
  const long head = task.head0 + me.at.col + odd;
  ATTNKIT_UNROLL
  for (int d = 0; d < SLICE; d += 8 * RUN) {
    Cell x;
    ATTNKIT_UNROLL
    for (int f = 0; f < RUN; f++) {
      const float2 pair = state.o[d / 8 + f];
      const uint a = bits_of(TYPE(pair[0] / divisor[0])), b = bits_of(TYPE(pair[1] / divisor[1]));
      const uint kept = odd != 0 ? b : a, got = simd_shuffle_xor(odd != 0 ? a : b, ushort(2));
      x.of[f] = odd != 0 ? got : kept;
      x.of[RUN + f] = odd != 0 ? kept : got;
    }
    const int first = me.part() * SLICE + d + me.at.row / 2 * CELL;
    store_cell<4, 16>(x, first, task.token, head, head < shape.heads, to, codes);
  }
}

// What is read comes first, as in attnkit/sparse_numbers.h.
[[kernel, max_total_threads_per_threadgroup(32 * SIMDS)]] void sparse_rows(
    const device TYPE* q [[buffer(0)]], const device RowType* near [[buffer(1)]],
    const device int* end [[buffer(2)]], const device RowType* far [[buffer(3)]],
    const device int* chosen [[buffer(4)]], const device int* length [[buffer(5)]],
    const device int* requests [[buffer(6)]], const device float* sink [[buffer(7)]],
    const device int* near_table [[buffer(8)]], const device int* far_table [[buffer(9)]],
    const device float* divisor [[buffer(10)]], constant SparseShape& shape [[buffer(11)]],
    constant float& scale [[buffer(12)]], device TYPE* parts [[buffer(13)]],
    device float* max_parts [[buffer(14)]], device float* sum_parts [[buffer(15)]],
    device uchar* codes [[buffer(16)]], device uchar* scales [[buffer(17)]],
    const device ANGLE_TYPE* cosines [[buffer(18)]], const device ANGLE_TYPE* sines [[buffer(19)]],
    constant float& tensor_scale [[buffer(20)]], constant CodesShape& results [[buffer(21)]],
    uint3 group [[threadgroup_position_in_grid]], uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup TYPE rows[KEYS * STEP];
  threadgroup long places[2 * KEYS];
  threadgroup float2 sums[SUMS];
  const Shared shared = {rows, places, sums};
  const Member me = {fragment_lane(lane), int(lane), int(simd)};
  const Inputs in = {
      q, near, far, near_table, far_table, DIVIDED ? divisor[0] : 1.0f, scale};
  const Task task = task_of(group, shape, me);
  const Keys keys =
      keys_of(end, chosen, length, requests, shape, task.token);
  HeadState state;
  attend(state, in, keys, shared, shape, task, me);
  if (task.splits > 1) {
    const Parts to = {parts, max_parts, sum_parts};
    store_part(state, to, shape, task, me);
  } else {
    const Codes to = {codes, scales, cosines, sines, as_type<uint>(tensor_scale)};
    store_codes(state, to, sink, shape, results, task, me);
  }
}

constant constexpr int SPAN = 256;

kernel void sparse_merge(
    const device TYPE* parts [[buffer(0)]],  // (splits, rows, DIM)
    const device float* max_parts [[buffer(1)]],  // (splits, rows)
    const device float* sum_parts [[buffer(2)]],
    const device float* sink [[buffer(3)]],
    constant SparseMerge& shape [[buffer(4)]],
    device uchar* codes [[buffer(5)]],
    device uchar* scales [[buffer(6)]],
    const device ANGLE_TYPE* cosines [[buffer(7)]],
    const device ANGLE_TYPE* sines [[buffer(8)]],
    constant float& tensor_scale [[buffer(9)]],
    constant CodesShape& results [[buffer(10)]],
    uint group [[threadgroup_position_in_grid]],
    uint simds [[simdgroups_per_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int SPANS = (DIM + SPAN - 1) / SPAN;
  const long item = long(group) * simds + simd, row = item / SPANS;
  if (row >= shape.rows) {
    return;
  }
  const long to = shape.first + row;
  const int d = int(item % SPANS) * SPAN + int(lane) * CELL;
  const Merged<2> merged = merge_parts<2>(parts, max_parts, sum_parts, shape, row, d, int(lane));
  const device float* joins = shape.has_sink != 0 ? sink + row % shape.heads : nullptr;
  const float divisor = result_of(merged.row_max, merged.row_sum, joins, true).divisor;
  Cell x;
  ATTNKIT_UNROLL
  for (int i = 0; i < CELL; i++) {
    x.of[i] = bits_of(TYPE(merged.of[i / 4][i % 4] / divisor));
  }
  const Codes stored = {codes, scales, cosines, sines, as_type<uint>(tensor_scale)};
  store_cell<1, 2>(x, d, to / shape.heads, to % shape.heads, d < DIM, stored, results);
}
