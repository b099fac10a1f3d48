// Attention of a few query rows per KV head over a KV cache: decode_rows, and decode_merge for its partial results.
//
// The rows of one KV head are its T queries times the HEADS query heads that share it, so each key and value crosses the
// bus once for all of them (for every TILES * 8 of them, where there are more: then threadgroups that follow each other
// take the tiles of the same keys, so that a cache has to hold no more than these). A simdgroup takes 16 keys a step
// and works on transposed products, because then both operands that come from the cache are read in vectors along
// the head dim and the weights are multiplied as they lie:
//
//   S' (keys, rows) = K Q'        lane: one key, two rows
//   O' (dims, rows) = V' S'       the weights never leave their lanes
//
// Grid: x tiles of 8 * TILES rows, y splits of the keys, z batch * KV heads; 1 to 8 simdgroups in a threadgroup. The
// simdgroups of a threadgroup take its keys in turns and meet once, at the end. With splits > 1 each threadgroup
// stores a partial result, and decode_merge must follow.
//
// Defined by the host: TYPE of q and the cache, OUT_TYPE of what is stored (float if splits > 1), DIM, DIM_V, TILES,
// WIDTH, PAGED. DIM and DIM_V are multiples of 16. WIDTH 4 needs every step and offset to be a multiple of 4.

constant constexpr int KEYS = 16;  // of a simdgroup's step
constant constexpr int BLOCKS = KEYS / 8;
constant constexpr int ROWS = 8 * TILES;
constant constexpr int MOST_SIMDGROUPS = 8;
constant constexpr int RUN = DIM_V % 32 == 0 ? 4 : 2;  // neighbouring dims of V that a lane reads
constant constexpr int PARTS_Q = DIM / 8;
constant constexpr int PARTS_O = DIM_V / 8;
constant constexpr int WIDEST = DIM > DIM_V ? DIM : DIM_V;

struct DecodeShape {
  long batch;
  long queries;  // T
  long heads;  // query heads of a KV head
  long kv_heads;
  long capacity;  // keys of a sequence's cache
  long splits;
  long causal;
  long window;
  long sink_tokens;
  long has_sink;
  long has_start;
  long q_batch;  // steps, in elements
  long q_token;
  long q_head;
  long k_batch;  // of a page, where the cache has pages
  long k_head;
  long k_key;
  long v_batch;
  long v_head;
  long v_key;
  long page;  // keys of a page
  long pages;
  long table_row;
};

template <typename T>
inline void read_run(const device T* from, bool live, thread float* to) {
  ATTNKIT_UNROLL
  for (int i = 0; i < RUN; i++) {
    to[i] = 0.0f;
  }
  if (!live) {
    return;
  }
#if WIDTH == 4
  if (RUN == 4) {
    float4 x;
    read(from, x);
    ATTNKIT_UNROLL
    for (int i = 0; i < RUN; i++) {
      to[i] = x[i];
    }
    return;
  }
#endif
  ATTNKIT_UNROLL
  for (int i = 0; i < RUN; i++) {
    to[i] = float(from[i]);
  }
}

template <typename T>
inline float4 read_four(const device T* from, bool live) {
  float4 x = float4(0.0f);
  if (live) {
#if WIDTH == 4
    read(from, x);
#else
    x = float4(float(from[0]), float(from[1]), float(from[2]), float(from[3]));
#endif
  }
  return x;
}

// Where a lane's keys lie, in elements: that of its row of K, and those of its two columns of V.
struct Places {
  long k;
  long v[2];
};

[[kernel, max_total_threads_per_threadgroup(32 * MOST_SIMDGROUPS)]] void decode_rows(
    const device TYPE* q [[buffer(0)]],
    const device TYPE* k [[buffer(1)]],
    const device TYPE* v [[buffer(2)]],
    const device int* table [[buffer(3)]],
    const device int* kv_len [[buffer(4)]],
    const device float* sink [[buffer(5)]],
    const device int* kv_start [[buffer(6)]],
    device OUT_TYPE* out [[buffer(7)]],
    device float* lse [[buffer(8)]],
    constant DecodeShape& shape [[buffer(9)]],
    constant float& scale [[buffer(10)]],
    constant float& cap [[buffer(11)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simds [[simdgroups_per_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float2 pairs[ROWS * WIDEST / 2];  // Q' in fragment order; later O, row by row
  threadgroup float* tile = reinterpret_cast<threadgroup float*>(pairs);
  threadgroup float tops[MOST_SIMDGROUPS * ROWS];
  threadgroup float sums[MOST_SIMDGROUPS * ROWS];
  const Lane at = fragment_lane(lane);
  const int thread_index = int(simd * 32 + lane), threads = int(simds * 32);
  const int queries = int(shape.queries), heads = int(shape.heads), rows = queries * heads;
  const int row0 = int(group.x) * ROWS;
  const int b = int(group.z) / int(shape.kv_heads), kv_head = int(group.z) % int(shape.kv_heads);

  // Q' to threadgroup memory, as the lanes of the product will read it: DIM is permuted so that the lane that holds
  // columns c, c + 1 of two neighbouring fragments of K has read four neighbouring elements.
  const device TYPE* q_rows = q + b * shape.q_batch + kv_head * heads * shape.q_head;
  for (int i = thread_index; i < TILES * PARTS_Q * 32; i += threads) {
    const Lane to = fragment_lane(uint(i % 32));
    const int part = (i / 32) % PARTS_Q;
    const int d = (part / 2) * 16 + (to.row / 2) * 4 + (part % 2) * 2 + to.row % 2;
    ATTNKIT_UNROLL
    for (int e = 0; e < 2; e++) {
      const int row = row0 + (i / (32 * PARTS_Q)) * 8 + to.col + e;
      const bool live = row < rows;
      tile[2 * i + e] = live ? float(q_rows[(row / heads) * shape.q_token + (row % heads) * shape.q_head + d]) : 0.0f;
    }
  }

  // What the rows see. The walk covers what any of them sees; this split takes an equal share of it.
  Masks masks;
  masks.causal = shape.causal != 0;
  masks.window = int(shape.window);
  masks.sink_tokens = int(shape.sink_tokens);
  const int capacity = int(shape.capacity);
  const int end = clamp(kv_len[b], 0, capacity);
  const int first = shape.has_start != 0 ? clamp(kv_start[b], 0, capacity) : 0;
  const int position0 = end - queries;
  Visible sees[TILES][2];
  ATTNKIT_UNROLL
  for (int n = 0; n < TILES; n++) {
    ATTNKIT_UNROLL
    for (int e = 0; e < 2; e++) {
      const int row = row0 + n * 8 + at.col + e;
      const int position = position0 + row / heads;
      sees[n][e] = visible(position, first, row < rows && position >= 0 ? end : 0, masks);
    }
  }
  const int lowest = max(0, position0 + row0 / heads);
  const int highest = position0 + (min(row0 + ROWS, rows) - 1) / heads;
  const Visible from = visible(lowest, first, end, masks), to = visible(highest, first, end, masks);
  const Walk keys = walk(first, from, to);
  const int share = (keys.count + int(shape.splits) * KEYS - 1) / (int(shape.splits) * KEYS) * KEYS;
  const int begin = int(group.y) * share;
  const int stop = min(keys.count, begin + share);
  threadgroup_barrier(mem_flags::mem_threadgroup);

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
#if PAGED
  const long k_batch = shape.k_batch, v_batch = shape.v_batch;
  const int page_keys = int(shape.page), last_page = int(shape.pages) - 1;
  table += b * shape.table_row;
#else
  k += b * shape.k_batch;
  v += b * shape.v_batch;
#endif
  k += kv_head * shape.k_head;
  v += kv_head * shape.v_head;
  for (int i0 = begin + int(simd) * KEYS; i0 < stop; i0 += int(simds) * KEYS) {
    // Where the keys lie. Of a cache with pages, lane l looks key l up for all.
    Places places[BLOCKS];
#if PAGED
    const int key = keys.key(min(i0 + int(lane % KEYS), stop - 1));
    const int page = clamp(table[key / page_keys], 0, last_page), slot = key % page_keys;
#endif
    ATTNKIT_UNROLL
    for (int block = 0; block < BLOCKS; block++) {
      const int i_k = block * 8 + at.row, i_v = block * 8 + at.col;
#if PAGED
      places[block].k =
          simd_shuffle(page, ushort(i_k)) * k_batch + simd_shuffle(slot, ushort(i_k)) * k_key;
#else
      places[block].k = keys.key(i0 + i_k) * k_key;
#endif
      ATTNKIT_UNROLL
      for (int e = 0; e < 2; e++) {
#if PAGED
        places[block].v[e] =
            simd_shuffle(page, ushort(i_v + e)) * v_batch + simd_shuffle(slot, ushort(i_v + e)) * v_key;
#else
        places[block].v[e] = keys.key(i0 + i_v + e) * v_key;
#endif
      }
    }

    // S' = K Q', in float. The sums over 32 dims each are short chains, which round less and do not wait for each other.
    float2 s[BLOCKS][TILES];
    ATTNKIT_UNROLL
    for (int c = 0; c < BLOCKS * TILES; c++) {
      s[c / TILES][c % TILES] = float2(0.0f);
    }
    ATTNKIT_UNROLL
    for (int d0 = 0; d0 < DIM; d0 += 32) {
      float2 even[BLOCKS][TILES], odd[BLOCKS][TILES];
      ATTNKIT_UNROLL
      for (int c = 0; c < BLOCKS * TILES; c++) {
        even[c / TILES][c % TILES] = odd[c / TILES][c % TILES] = float2(0.0f);
      }
      ATTNKIT_UNROLL
      for (int d = d0; d < d0 + 32 && d < DIM; d += 16) {
        float4 x[BLOCKS];
        ATTNKIT_UNROLL
        for (int block = 0; block < BLOCKS; block++) {
          x[block] = read_four(k + places[block].k + d + 2 * at.col, i0 + block * 8 + at.row < stop);
        }
        ATTNKIT_UNROLL
        for (int n = 0; n < TILES; n++) {
          const int part = (n * PARTS_Q + d / 8) * 32 + int(lane);
          ATTNKIT_UNROLL
          for (int block = 0; block < BLOCKS; block++) {
            multiply_add(even[block][n], x[block].xy, pairs[part]);
            multiply_add(odd[block][n], x[block].zw, pairs[part + 32]);
          }
        }
      }
      ATTNKIT_UNROLL
      for (int c = 0; c < BLOCKS * TILES; c++) {
        s[c / TILES][c % TILES] += even[c / TILES][c % TILES] + odd[c / TILES][c % TILES];
      }
    }

    // Online softmax over the keys, which are the rows here. What a lane adds up itself is joined at the end.
    ATTNKIT_UNROLL
    for (int n = 0; n < TILES; n++) {
      float2 above = float2(-INFINITY);
      ATTNKIT_UNROLL
      for (int block = 0; block < BLOCKS; block++) {
        const int i = i0 + block * 8 + at.row;
        const int key_here = keys.key(i);
        s[block][n] = scores(s[block][n], by, most);
        ATTNKIT_UNROLL
        for (int e = 0; e < 2; e++) {
          const bool live = i < stop && sees[n][e].sees(key_here);
          s[block][n][e] = live ? s[block][n][e] : -INFINITY;
        }
        above = max(above, s[block][n]);
      }
      above = max(top[n], column_max(above));
      const float2 base = float2(subtracted(above.x), subtracted(above.y));
      const float2 kept = exp(top[n] - base);
      top[n] = above;
      sum[n] *= kept;
      ATTNKIT_UNROLL
      for (int block = 0; block < BLOCKS; block++) {
        s[block][n] = exp(s[block][n] - base);
        sum[n] += s[block][n];
      }
      ATTNKIT_UNROLL
      for (int part = 0; part < PARTS_O; part++) {
        o[n][part] *= kept;
      }
    }

    // O' += V' S': fragment f of a run holds dims RUN * row + f of the run's 8 * RUN dims.
    ATTNKIT_UNROLL
    for (int block = 0; block < BLOCKS; block++) {
      const int i_v = i0 + block * 8 + at.col;
      ATTNKIT_UNROLL
      for (int d = 0; d < DIM_V; d += 8 * RUN) {
        float x[2][RUN];
        ATTNKIT_UNROLL
        for (int e = 0; e < 2; e++) {
          read_run(v + places[block].v[e] + d + RUN * at.row, i_v + e < stop, x[e]);
        }
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

  // The simdgroups meet: the common maximum, then their sums and outputs, one after another. Q' is not needed any more.
  // Without a maximum these are 0, or nan where every score was: a maximum leaves nan out.
  ATTNKIT_UNROLL
  for (int n = 0; n < TILES; n++) {
    sum[n] = column_sum(sum[n]);
    if (at.row == 0) {
      ATTNKIT_UNROLL
      for (int e = 0; e < 2; e++) {
        tops[int(simd) * ROWS + n * 8 + at.col + e] = top[n][e];
        sums[int(simd) * ROWS + n * 8 + at.col + e] = sum[n][e];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int turn = 0; turn < int(simds); turn++) {
    if (turn == int(simd)) {
      ATTNKIT_UNROLL
      for (int n = 0; n < TILES; n++) {
        ATTNKIT_UNROLL
        for (int e = 0; e < 2; e++) {
          const int row = n * 8 + at.col + e;
          float above = -INFINITY;
          for (int other = 0; other < int(simds); other++) {
            above = max(above, tops[other * ROWS + row]);
          }
          const float kept = exp(top[n][e] - subtracted(above));
          ATTNKIT_UNROLL
          for (int part = 0; part < PARTS_O; part++) {
            const int d = part / RUN * RUN * 8 + RUN * at.row + part % RUN;
            tile[row * DIM_V + d] = (turn == 0 ? 0.0f : tile[row * DIM_V + d]) + o[n][part][e] * kept;
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  // One rounding at the store. The sink joins the denominator only; a row that saw nothing gives 0 and -inf.
  for (int i = thread_index; i < ROWS * DIM_V; i += threads) {
    const int row = i / DIM_V, d = i % DIM_V;
    if (row0 + row < rows) {
      float above = -INFINITY, denominator = 0.0f;
      for (int other = 0; other < int(simds); other++) {
        above = max(above, tops[other * ROWS + row]);
      }
      for (int other = 0; other < int(simds); other++) {
        denominator += sums[other * ROWS + row] * exp(tops[other * ROWS + row] - subtracted(above));
      }
      const int head = kv_head * heads + (row0 + row) % heads;
      const long token = (long(group.y) * shape.batch + b) * queries + (row0 + row) / heads;
      const long to_row = token * shape.kv_heads * heads + head;
      if (d == 0) {
        lse[to_row] = denominator == 0.0f ? -INFINITY : above + log(denominator);
      }
      if (shape.has_sink != 0 && above != -INFINITY) {
        denominator += exp(sink[head] - above);
      }
      out[to_row * DIM_V + d] = OUT_TYPE(denominator == 0.0f ? 0.0f : tile[row * DIM_V + d] / denominator);
    }
  }
}

struct DecodeMerge {
  long splits;
  long rows;  // batch * queries * query heads
  long heads;  // query heads
  long has_sink;
};

kernel void decode_merge(
    const device float* parts [[buffer(0)]],
    const device float* lse_parts [[buffer(1)]],
    const device float* sink [[buffer(2)]],
    device MERGED_TYPE* out [[buffer(3)]],
    device float* lse [[buffer(4)]],
    constant DecodeMerge& shape [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]],
    uint simds [[simdgroups_per_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int spans = (DIM_V + MERGE_SPAN - 1) / MERGE_SPAN;
  const long item = long(group) * simds + simd;
  const long at = item / spans;
  if (at >= shape.rows) {
    return;
  }
  MergeRow row;
  row.parts = int(shape.splits);
  row.dim = DIM_V;
  row.part_step = shape.rows * DIM_V;
  row.lse_step = shape.rows;
  row.sum_step = -1;
  merge_row(
      parts + at * DIM_V,
      lse_parts + at,
      lse_parts,
      shape.has_sink != 0 ? sink + at % shape.heads : nullptr,
      out + at * DIM_V,
      lse + at,
      row,
      int(item % spans) * MERGE_SPAN,
      lane);
}
