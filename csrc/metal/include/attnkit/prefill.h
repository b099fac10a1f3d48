// Attention of many query rows per KV head: prefill_rows.
//
// The rows of one KV head are its T queries times the HEADS query heads that share it, so the heads share every tile
// of K and V. A threadgroup takes ROWS of them, a simdgroup 8 * TILES. The threads bring KEYS keys and values at a time to
// threadgroup memory; each simdgroup multiplies them transposed, so that the weights are used as they lie:
//
//   S' (keys, rows) = K Q'        Q' stays in registers, scores are scaled and capped in float
//   O' (dims, rows) = V' S'       the weights never leave their lanes
//
// Grid: x tiles of ROWS rows (the last first, they are the longest under causal), y KV heads, z batch, and with VARLEN one
// more in z for the tokens past the last sequence; SIMDS simdgroups in a threadgroup, no other number.
//
// Defined by the host: TYPE, DIM, DIM_V (multiples of 16), TILES, SIMDS, KEYS (a multiple of 8), WIDTH, VARLEN, IN_CACHE
// (the queries are the last keys of the cache: positions count from kv_len, and a negative one sees nothing).
// WIDTH 4 needs every step and offset to be a multiple of 4.

constant constexpr int BLOCKS = KEYS / 8;
constant constexpr int ROWS = 8 * TILES * SIMDS;
constant constexpr int THREADS = 32 * SIMDS;
constant constexpr int RUN = DIM_V % 32 == 0 ? 4 : 2;  // neighbouring dims of V that a lane reads
constant constexpr int PARTS_Q = DIM / 8;
constant constexpr int PARTS_O = DIM_V / 8;
// 32 bytes more than a row: then the rows of a fragment lie in different banks.
constant constexpr int PAD = 32 / sizeof(TYPE);
constant constexpr int STEP_K = DIM + PAD;
constant constexpr int STEP_V = DIM_V + PAD;

struct PrefillShape {
  long queries;  // T, or all tokens
  long keys;  // S, or all tokens
  long heads;  // query heads of a KV head
  long batch;
  long causal;
  long window;
  long sink_tokens;
  long has_sink;
  long has_len;
  long has_start;
  long normalize;
  long q_batch;  // steps, in elements
  long q_token;
  long q_head;
  long k_batch;
  long k_head;
  long k_key;
  long v_batch;
  long v_head;
  long v_key;
};

// Neighbouring elements from device to threadgroup memory; zeros where there is no key, because 0 * nan is nan.
inline void copy_vector(const device TYPE* from, threadgroup TYPE* to, bool live) {
#if WIDTH == 4
  typedef vec<TYPE, 4> Vector;
  *reinterpret_cast<threadgroup Vector*>(to) = live ? *reinterpret_cast<const device Vector*>(from) : Vector(TYPE(0.0f));
#else
  to[0] = live ? from[0] : TYPE(0.0f);
#endif
}

template <int N>
inline void read_tile(const threadgroup TYPE* from, thread float* to) {
  typedef vec<TYPE, N> Vector;
  const Vector x = *reinterpret_cast<const threadgroup Vector*>(from);
  ATTNKIT_UNROLL
  for (int i = 0; i < N; i++) {
    to[i] = float(x[i]);
  }
}

[[kernel, max_total_threads_per_threadgroup(32 * SIMDS)]] void prefill_rows(
    const device TYPE* q [[buffer(0)]],
    const device TYPE* k [[buffer(1)]],
    const device TYPE* v [[buffer(2)]],
    const device float* sink [[buffer(3)]],
    const device int* first_ints [[buffer(4)]],  // kv_len, or cu_seqlens_q
    const device int* second_ints [[buffer(5)]],  // kv_start, or cu_seqlens_k
    device TYPE* out [[buffer(6)]],
    device float* lse [[buffer(7)]],
    device float* row_sum [[buffer(8)]],
    constant PrefillShape& shape [[buffer(9)]],
    constant float& scale [[buffer(10)]],
    constant float& cap [[buffer(11)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup TYPE tile_k[KEYS * STEP_K];
  threadgroup TYPE tile_v[KEYS * STEP_V];
  const Lane at = fragment_lane(lane);
  const int thread_index = int(simd * 32 + lane);
  const int heads = int(shape.heads), all_heads = heads * int(groups.y);
  const int b = int(group.z), kv_head = int(group.y);

  // The sequence: its queries, and the keys [first, end) with the position of query 0.
  int queries = int(shape.queries), first = 0, end = int(shape.keys);
  long token0 = long(b) * queries;
#if VARLEN
  const int last = int(shape.batch);
  const int q0 = clamp(first_ints[min(b, last)], 0, queries), k0 = clamp(second_ints[min(b, last)], 0, end);
  const bool tail = b == last;  // tokens that belong to no sequence
  queries = (tail ? queries : clamp(first_ints[b + 1], q0, queries)) - q0;
  end = tail ? 0 : clamp(second_ints[b + 1], k0, end) - k0;
  token0 = q0;
  q += q0 * shape.q_token;
  k += k0 * shape.k_key;
  v += k0 * shape.v_key;
  const int position0 = end - queries;
#else
  const int size = end;
  end = shape.has_len != 0 ? clamp(first_ints[b], 0, size) : size;
  first = shape.has_start != 0 ? clamp(second_ints[b], 0, size) : 0;
  q += b * shape.q_batch;
  k += b * shape.k_batch;
  v += b * shape.v_batch;
  const int position0 = (IN_CACHE ? end : size) - queries;
#endif
  q += kv_head * heads * shape.q_head;
  k += kv_head * shape.k_head;
  v += kv_head * shape.v_head;
  const int rows = queries * heads;
  const int tiles = (rows + ROWS - 1) / ROWS;
  Masks masks;
  masks.causal = shape.causal != 0;
  masks.window = int(shape.window);
  masks.sink_tokens = int(shape.sink_tokens);

  // One tile a threadgroup, unless there are more tiles than the host expected.
  for (int count = int(group.x); count < tiles; count += int(groups.x)) {
    const int row0 = (tiles - 1 - count) * ROWS;
    const int mine0 = row0 + int(simd) * 8 * TILES;  // first row of this simdgroup

    // Q' in registers, DIM permuted so that the lane that holds columns c, c + 1 of two neighbouring fragments of K reads
    // four neighbouring elements.
    vec<TYPE, 2> rq[TILES][PARTS_Q];
    Visible sees[TILES][2];
    ATTNKIT_UNROLL
    for (int n = 0; n < TILES; n++) {
      ATTNKIT_UNROLL
      for (int e = 0; e < 2; e++) {
        const int row = mine0 + n * 8 + at.col + e;
        const bool live = row < rows;
        const int position = position0 + row / heads;
        sees[n][e] = visible(position, first, live && (!IN_CACHE || position >= 0) ? end : 0, masks);
        const device TYPE* from = q + (row / heads) * shape.q_token + (row % heads) * shape.q_head;
        ATTNKIT_UNROLL
        for (int part = 0; part < PARTS_Q; part++) {
          const int d = (part / 2) * 16 + (at.row / 2) * 4 + (part % 2) * 2 + at.row % 2;
          rq[n][part][e] = live ? from[d] : TYPE(0.0f);
        }
      }
    }
    const Visible lowest = visible(position0 + row0 / heads, first, end, masks);
    const Visible highest = visible(position0 + (min(row0 + ROWS, rows) - 1) / heads, first, end, masks);
    const Walk keys = walk(first, lowest, highest);
    // What the first and the last row of this simdgroup see decides which keys it can leave out, and which need no mask.
    const Visible mine_low = visible(position0 + mine0 / heads, first, end, masks);
    const Visible mine_high =
        visible(position0 + (min(mine0 + 8 * TILES, rows) - 1) / heads, first, end, masks);
    const bool whole = mine0 + 8 * TILES <= rows && (!IN_CACHE || position0 + mine0 / heads >= 0);

    float2 top[TILES], sum[TILES], o[TILES][PARTS_O];
    ATTNKIT_UNROLL
    for (int n = 0; n < TILES; n++) {
      top[n] = float2(-INFINITY);
      sum[n] = float2(0.0f);
      ATTNKIT_UNROLL
      for (int part = 0; part < PARTS_O; part++) {
        o[n][part] = float2(0.0f);
      }
    }

    const float by = scale, most = cap;
    const long k_key = shape.k_key, v_key = shape.v_key;
    for (int i0 = 0; i0 < keys.count; i0 += KEYS) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the last tile has been used
      for (int i = thread_index * WIDTH; i < KEYS * DIM; i += THREADS * WIDTH) {
        const int row = i / DIM, d = i % DIM;
        const bool live = i0 + row < keys.count;
        copy_vector(k + (live ? keys.key(i0 + row) : 0) * k_key + d, tile_k + row * STEP_K + d, live);
      }
      for (int i = thread_index * WIDTH; i < KEYS * DIM_V; i += THREADS * WIDTH) {
        const int row = i / DIM_V, d = i % DIM_V;
        const bool live = i0 + row < keys.count;
        copy_vector(v + (live ? keys.key(i0 + row) : 0) * v_key + d, tile_v + row * STEP_V + d, live);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const int key0 = keys.key(i0), key1 = keys.key(min(i0 + KEYS, keys.count) - 1);
      const bool beyond = key0 >= mine_high.cap || (key0 >= mine_high.high && key0 >= mine_high.sinks);
      const bool before = key1 < mine_low.low && key0 >= mine_low.sinks;
      if (mine0 >= rows || beyond || before) {
        continue;
      }
      const bool masked = !whole || i0 + KEYS > keys.count || key1 >= mine_low.cap || key0 < mine_high.low ||
          key1 >= mine_low.high;

      // S' = K Q'. The sums over 64 dims each are short chains, which round less and do not wait for each other.
      float2 s[BLOCKS][TILES];
      ATTNKIT_UNROLL
      for (int c = 0; c < BLOCKS * TILES; c++) {
        s[c / TILES][c % TILES] = float2(0.0f);
      }
      ATTNKIT_UNROLL
      for (int c = 0; c < BLOCKS * ((DIM + 63) / 64); c++) {
        const int block = c % BLOCKS, d0 = c / BLOCKS * 64;
        float2 even[TILES], odd[TILES];
        ATTNKIT_UNROLL
        for (int n = 0; n < TILES; n++) {
          even[n] = odd[n] = float2(0.0f);
        }
        ATTNKIT_UNROLL
        for (int d = d0; d < d0 + 64 && d < DIM; d += 16) {
          float x[4];
          read_tile<4>(tile_k + (block * 8 + at.row) * STEP_K + d + 2 * at.col, x);
          ATTNKIT_UNROLL
          for (int n = 0; n < TILES; n++) {
            const vec<TYPE, 2> qa = rq[n][d / 8], qb = rq[n][d / 8 + 1];
            multiply_add(even[n], float2(x[0], x[1]), float2(float(qa[0]), float(qa[1])));
            multiply_add(odd[n], float2(x[2], x[3]), float2(float(qb[0]), float(qb[1])));
          }
        }
        ATTNKIT_UNROLL
        for (int n = 0; n < TILES; n++) {
          s[block][n] += even[n] + odd[n];
        }
      }

      // Online softmax over the keys, which are the rows here. What a lane adds up itself is joined at the end.
      ATTNKIT_UNROLL
      for (int n = 0; n < TILES; n++) {
        float2 above = float2(-INFINITY);
        ATTNKIT_UNROLL
        for (int block = 0; block < BLOCKS; block++) {
          s[block][n] = scores(s[block][n], by, most);
          if (masked) {
            const int i = i0 + block * 8 + at.row;
            const int key = keys.key(i);
            ATTNKIT_UNROLL
            for (int e = 0; e < 2; e++) {
              s[block][n][e] = i < keys.count && sees[n][e].sees(key) ? s[block][n][e] : -INFINITY;
            }
          }
          above = max(above, s[block][n]);
        }
        above = max(top[n], column_max(above));
        const float2 base = float2(subtracted(above.x), subtracted(above.y));
        if (simd_any(above.x != top[n].x || above.y != top[n].y)) {
          const float2 kept = exp(top[n] - base);
          sum[n] *= kept;
          ATTNKIT_UNROLL
          for (int part = 0; part < PARTS_O; part++) {
            o[n][part] *= kept;
          }
        }
        top[n] = above;
        ATTNKIT_UNROLL
        for (int block = 0; block < BLOCKS; block++) {
          s[block][n] = exp(s[block][n] - base);
          sum[n] += s[block][n];
        }
      }

      // O' += V' S': fragment f of a run holds dims RUN * row + f of the run's 8 * RUN dims.
      ATTNKIT_UNROLL
      for (int block = 0; block < BLOCKS; block++) {
        ATTNKIT_UNROLL
        for (int d = 0; d < DIM_V; d += 8 * RUN) {
          float x[2][RUN];
          const threadgroup TYPE* from = tile_v + (block * 8 + at.col) * STEP_V + d + RUN * at.row;
          read_tile<RUN>(from, x[0]);
          read_tile<RUN>(from + STEP_V, x[1]);
          ATTNKIT_UNROLL
          for (int f = 0; f < RUN; f++) {
            ATTNKIT_UNROLL
            for (int n = 0; n < TILES; n++) {
              multiply_add(o[n][d / 8 + f], float2(x[0][f], x[1][f]), s[block][n]);
            }
          }
        }
      }
    }

    // One rounding at the store. The sink joins the denominator only; a row that saw nothing gives 0 and -inf.
    ATTNKIT_UNROLL
    for (int n = 0; n < TILES; n++) {
      sum[n] = column_sum(sum[n]);
      ATTNKIT_UNROLL
      for (int e = 0; e < 2; e++) {
        const int row = mine0 + n * 8 + at.col + e;
        if (row < rows) {
          const int head = kv_head * heads + row % heads;
          const long to_row = (token0 + row / heads) * all_heads + head;
          float denominator = sum[n][e];
          if (at.row == 0) {
            lse[to_row] = denominator == 0.0f ? -INFINITY : top[n][e] + log(denominator);
            if (shape.normalize == 0) {
              row_sum[to_row] = denominator;
            }
          }
          if (shape.has_sink != 0 && top[n][e] != -INFINITY) {
            denominator += exp(sink[head] - top[n][e]);
          }
          const float divisor = denominator == 0.0f || shape.normalize == 0 ? 1.0f : denominator;
          ATTNKIT_UNROLL
          for (int d = 0; d < DIM_V; d += 8 * RUN) {
            device TYPE* to = out + to_row * DIM_V + d + RUN * at.row;
            vec<TYPE, RUN> run;
            ATTNKIT_UNROLL
            for (int f = 0; f < RUN; f++) {
              run[f] = TYPE(o[n][d / 8 + f][e] / divisor);
            }
            *reinterpret_cast<device vec<TYPE, RUN>*>(to) = run;
          }
        }
      }
    }
  }
}
