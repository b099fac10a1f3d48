// Attention of many query rows per KV head: prefill_rows.
//
// The rows of one KV head are its T queries times the query heads that share it, so the heads share every tile of K and
// V. A threadgroup takes ROWS of them, a simdgroup 8 * TILES. The threads bring KEYS keys and values at a time to
// threadgroup memory; each simdgroup multiplies them transposed, so that the weights are used as they lie:
//
//   S' (keys, rows) = K Q'        Q' stays in registers, scores are scaled and capped in float
//   O' (dims, rows) = V' S'       the weights never leave their lanes
//
// Grid: x tiles of ROWS rows (the last first, they are the longest under causal), y KV heads, z batch, and with VARLEN
// one more in z for the tokens past the last sequence; SIMDS simdgroups in a threadgroup, no other number.
//
// Defined by the host: TYPE of q, OUT_TYPE, CODES (k and v are E4M3, else of TYPE: attnkit/elements.h), DIM, DIM_V, TILES
// (attnkit/rows.h), SIMDS, KEYS (8, 16, 24 or 32), WIDTH, VARLEN, IN_CACHE (the queries are the last keys of the cache:
// positions count from kv_len, and a negative one sees nothing), PAGED (with VARLEN: the keys of a sequence lie in pages,
// and kv_len counts them). WIDTH 4 needs every step and offset to be a multiple of 4.

constant constexpr int BLOCKS = KEYS / 8;
constant constexpr int ROWS = 8 * TILES * SIMDS;
constant constexpr int THREADS = 32 * SIMDS;
// 32 bytes more than a row: then the rows of a fragment lie in different banks.
constant constexpr int PAD = 32 / sizeof(Held);
constant constexpr int STEP_K = DIM + PAD;
constant constexpr int STEP_V = DIM_V + PAD;
typedef ScoreTile<BLOCKS> Scores;
typedef decltype(decoded(TYPE(0.0f))) Queried;  // a number of q, as registers hold it

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
  Steps steps;
  long page;  // keys of a page
  long pages;
  long table_row;
  long has_q_scale;
  long has_k_scale;
  long has_v_scale;
};

// Neighbouring elements from device to threadgroup memory; zeros where there is no key, because 0 * nan is nan.
inline void copy_vector(const device Stored* from, threadgroup Held* to, bool live) {
  const HeldVector none = HeldVector(Held(0.0f));
  *reinterpret_cast<threadgroup HeldVector*>(to) = live ? held(from) : none;
}

template <int N>
inline void read_tile(const threadgroup Held* from, thread float* to) {
  typedef vec<Held, N> Vector;
  const Vector x = *reinterpret_cast<const threadgroup Vector*>(from);
  ATTNKIT_UNROLL
  for (int i = 0; i < N; i++) {
    to[i] = float(x[i]);
  }
}

// A work tile: ROWS rows of a KV head, of which this simdgroup has 8 * TILES, and what they see.
struct WorkTile {
  int simd_row0;  // first row of this simdgroup
  bool whole;  // all rows of this simdgroup are there, and none is blind
  // What the first and the last row of this simdgroup see decides which keys it can leave out, and which need no mask.
  Visible low;
  Visible high;
  Walk keys;  // that any row of the threadgroup sees
};

inline WorkTile work_tile(thread const Sequence& s, int row0, int simd) {
  WorkTile tile;
  tile.simd_row0 = row0 + simd * 8 * TILES;
  const Visible lowest = s.at_position(s.position0 + row0 / s.heads);
  const Visible highest = s.at_position(s.position0 + (min(row0 + ROWS, s.rows) - 1) / s.heads);
  tile.keys = walk(s.first, lowest, highest);
  tile.low = s.at_position(s.position0 + tile.simd_row0 / s.heads);
  tile.high = s.at_position(s.position0 + (min(tile.simd_row0 + 8 * TILES, s.rows) - 1) / s.heads);
  tile.whole = tile.simd_row0 + 8 * TILES <= s.rows && (!IN_CACHE || s.position0 + tile.simd_row0 / s.heads >= 0);
  return tile;
}

// What a threadgroup serves: a sequence, the KV head's part of its tensors, and where its tokens begin in out and lse.
struct Head {
  Sequence sequence;
  const device TYPE* q;
  const device Stored* k;  // its first key, or page 0
  const device Stored* v;
#if PAGED
  Pages pages;
#endif
  long token0;
  int kv_head;
};

inline Head head_of(
    const device TYPE* q,
    const device Stored* k,
    const device Stored* v,
    const device int* first_ints,
    const device int* second_ints,
    const device int* table,
    constant PrefillShape& shape,
    uint3 group) {
  Head head;
  head.kv_head = int(group.y);
  const int b = int(group.z);
  Sequence s;
  s.heads = int(shape.heads);
  s.in_cache = IN_CACHE;
  s.masks.causal = shape.causal != 0;
  s.masks.window = int(shape.window);
  s.masks.sink_tokens = int(shape.sink_tokens);
  const int queries = int(shape.queries), keys = int(shape.keys);
#if VARLEN
  const int last = int(shape.batch);
  const int q0 = clamp(first_ints[min(b, last)], 0, queries);
  const bool tail = b == last;  // tokens that belong to no sequence
  s.queries = (tail ? queries : clamp(first_ints[b + 1], q0, queries)) - q0;
  s.first = 0;
#if PAGED
  s.end = tail ? 0 : clamp(second_ints[b], 0, keys);
  head.pages.table = table + b * shape.table_row;
  head.pages.keys = int(shape.page);
  head.pages.last = int(shape.pages) - 1;
#else
  const int k0 = clamp(second_ints[min(b, last)], 0, keys);
  s.end = tail ? 0 : clamp(second_ints[b + 1], k0, keys) - k0;
  k += k0 * shape.steps.k_key;
  v += k0 * shape.steps.v_key;
#endif
  s.position0 = s.end - s.queries;
  head.token0 = q0;
  q += q0 * shape.steps.q_token;
#else
  s.queries = queries;
  s.first = shape.has_start != 0 ? clamp(second_ints[b], 0, keys) : 0;
  s.end = shape.has_len != 0 ? clamp(first_ints[b], 0, keys) : keys;
  s.position0 = (IN_CACHE ? s.end : keys) - queries;
  head.token0 = long(b) * queries;
  q += b * shape.steps.q_batch;
  k += b * shape.steps.k_batch;
  v += b * shape.steps.v_batch;
#endif
  s.rows = s.queries * s.heads;
  head.sequence = s;
  head.q = q + head.kv_head * s.heads * shape.steps.q_head;
  head.k = k + head.kv_head * shape.steps.k_head;
  head.v = v + head.kv_head * shape.steps.v_head;
  return head;
}

// Q' of this simdgroup's rows, in registers.
struct QueryTile {
  vec<Queried, 2> of[TILES][PARTS_Q];
};

inline QueryTile load_q(thread const Head& head, constant PrefillShape& shape, int simd_row0, Lane at) {
  QueryTile q;
  const int heads = head.sequence.heads;
  ATTNKIT_UNROLL
  for (int n = 0; n < TILES; n++) {
    ATTNKIT_UNROLL
    for (int e = 0; e < 2; e++) {
      const int row = simd_row0 + n * 8 + at.col + e;
      const bool live = row < head.sequence.rows;
      const device TYPE* from = head.q + (row / heads) * shape.steps.q_token + (row % heads) * shape.steps.q_head;
      ATTNKIT_UNROLL
      for (int part = 0; part < PARTS_Q; part++) {
        q.of[n][part][e] = live ? decoded(from[dim_of_part(part, at)]) : Queried(0.0f);
      }
    }
  }
  return q;
}

// The keys i0 .. i0 + KEYS - 1 of the walk; those from ``count`` on are not there.
struct KeyTile {
  Walk keys;
  int i0;
#if PAGED
  Place place;  // lane l looks key l up for all of the simdgroup
#endif

  bool live(int row) const {
    return i0 + row < keys.count;
  }
};

inline KeyTile key_tile(thread const Head& head, thread const Walk& keys, int i0, int lane) {
  KeyTile tile;
  tile.keys = keys;
  tile.i0 = i0;
#if PAGED
  tile.place = place_of(head.pages, keys.key(min(i0 + min(lane, KEYS - 1), keys.count - 1)));
#endif
  return tile;
}

// Rows of ROW elements of K or V to threadgroup memory. The simdgroups' shares are whole: KEYS * ROW are a multiple of
// 128 elements.
template <int ROW, int STEP>
inline void copy_keys(
    const device Stored* from,
    long page_step,
    long key_step,
    threadgroup Held* to,
    thread const KeyTile& tile,
    int thread_index) {
  for (int i = thread_index * WIDTH; i < KEYS * ROW; i += THREADS * WIDTH) {
    const int row = i / ROW, d = i % ROW;
    const bool live = tile.live(row);
#if PAGED
    const long offset = offset_of(tile.place, row, page_step, key_step);
#else
    const long offset = (live ? tile.keys.key(tile.i0 + row) : 0) * key_step;
#endif
    copy_vector(from + offset + d, to + row * STEP + d, live);
  }
}

// What this simdgroup does with the keys i0 .. i0 + KEYS - 1 of the walk.
struct Step {
  bool skipped;  // none of its rows sees any of them
  bool masked;  // not all of its rows see all of them
};

inline Step step_of(thread const WorkTile& tile, int rows, int i0) {
  Step step;
  const int count = tile.keys.count;
  const int key0 = tile.keys.key(i0), key1 = tile.keys.key(min(i0 + KEYS, count) - 1);
  const bool beyond = key0 >= tile.high.cap || (key0 >= tile.high.high && key0 >= tile.high.sinks);
  const bool before = key1 < tile.low.low && key0 >= tile.low.sinks;
  step.skipped = tile.simd_row0 >= rows || beyond || before;
  step.masked = !tile.whole || i0 + KEYS > count || key1 >= tile.low.cap || key0 < tile.high.low ||
      key1 >= tile.low.high;
  return step;
}

// S' = K Q'. The sums over 64 dims each are short chains, which round less and do not wait for each other.
inline Scores multiply_keys(const threadgroup Held* tile_k, thread const QueryTile& q, Lane at) {
  Scores s;
  clear(s);
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
        const vec<Queried, 2> qa = q.of[n][d / 8], qb = q.of[n][d / 8 + 1];
        multiply_add(even[n], float2(x[0], x[1]), float2(float(qa[0]), float(qa[1])));
        multiply_add(odd[n], float2(x[2], x[3]), float2(float(qb[0]), float(qb[1])));
      }
    }
    ATTNKIT_UNROLL
    for (int n = 0; n < TILES; n++) {
      s.of[block][n] += even[n] + odd[n];
    }
  }
  return s;
}

// A step of the online softmax over the keys, which are the rows here: products become scores, scores weights.
inline void softmax_step(
    thread RowState& rows,
    thread Scores& s,
    thread const RowMasks& sees,
    thread const Walk& keys,
    int i0,
    bool masked,
    float scale,
    float cap,
    Lane at) {
  ATTNKIT_UNROLL
  for (int n = 0; n < TILES; n++) {
    const float2 here = score(s, n, sees, keys, i0, keys.count, masked, scale, cap, at);
    const float2 row_max = max(rows.row_max[n], column_max(here));
    const float2 base = safe_max(row_max);
    if (simd_any(row_max.x != rows.row_max[n].x || row_max.y != rows.row_max[n].y)) {
      rescale(rows, n, exp(rows.row_max[n] - base));
    }
    rows.row_max[n] = row_max;
    exponentiate(s, rows, n, base);
  }
}

// O' += V' S'.
inline void multiply_values(
    thread RowState& rows, thread const Scores& weights, const threadgroup Held* tile_v, Lane at) {
  ATTNKIT_UNROLL
  for (int block = 0; block < BLOCKS; block++) {
    ATTNKIT_UNROLL
    for (int d = 0; d < DIM_V; d += 8 * RUN) {
      ValueRun x;
      const threadgroup Held* from = tile_v + (block * 8 + at.col) * STEP_V + d + RUN * at.row;
      read_tile<RUN>(from, x.of[0]);
      read_tile<RUN>(from + STEP_V, x.of[1]);
      add_values(rows, weights, block, d, x);
    }
  }
}

// One rounding at the store. The sink joins the denominator only; a row that saw nothing gives 0 and -inf. ``unit`` is
// what the values of codes are to be multiplied by.
inline void store(
    device OUT_TYPE* out,
    device float* lse,
    device float* row_sum,
    const device float* sink,
    float unit,
    constant PrefillShape& shape,
    thread const Head& head,
    thread RowState& rows,
    int simd_row0,
    int all_heads,
    Lane at) {
  const int heads = head.sequence.heads;
  ATTNKIT_UNROLL
  for (int n = 0; n < TILES; n++) {
    rows.row_sum[n] = column_sum(rows.row_sum[n]);
    ATTNKIT_UNROLL
    for (int e = 0; e < 2; e++) {
      const int row = simd_row0 + n * 8 + at.col + e;
      if (row < head.sequence.rows) {
        const int q_head = head.kv_head * heads + row % heads;
        const long to_row = (head.token0 + row / heads) * all_heads + q_head;
        const float row_max = rows.row_max[n][e];
        float denominator = rows.row_sum[n][e];
        // A sequence that nobody sees may have any scale.
        const float times = denominator == 0.0f ? 1.0f : unit;
        if (at.row == 0) {
          lse[to_row] = denominator == 0.0f ? -INFINITY : row_max + log(denominator);
          if (shape.normalize == 0) {
            row_sum[to_row] = denominator;
          }
        }
        if (shape.has_sink != 0 && row_max != -INFINITY) {
          denominator += exp(sink[q_head] - row_max);
        }
        const float divisor = denominator == 0.0f || shape.normalize == 0 ? 1.0f : denominator;
        ATTNKIT_UNROLL
        for (int d = 0; d < DIM_V; d += 8 * RUN) {
          device OUT_TYPE* to = out + to_row * DIM_V + d + RUN * at.row;
          vec<OUT_TYPE, RUN> run;
          ATTNKIT_UNROLL
          for (int f = 0; f < RUN; f++) {
            const float x = rows.o[n][d / 8 + f][e] / divisor;
            run[f] = OUT_TYPE(CODES ? x * times : x);
          }
          *reinterpret_cast<device vec<OUT_TYPE, RUN>*>(to) = run;
        }
      }
    }
  }
}

[[kernel, max_total_threads_per_threadgroup(32 * SIMDS)]] void prefill_rows(
    const device TYPE* q [[buffer(0)]],
    const device Stored* k [[buffer(1)]],
    const device Stored* v [[buffer(2)]],
    const device float* sink [[buffer(3)]],
    const device int* first_ints [[buffer(4)]],  // kv_len, or cu_seqlens_q
    const device int* second_ints [[buffer(5)]],  // kv_start, or cu_seqlens_k, or of pages kv_len
    const device int* table [[buffer(6)]],
    const device float* q_scale [[buffer(7)]],  // (B, Hkv), and the two below
    const device float* k_scale [[buffer(8)]],
    const device float* v_scale [[buffer(9)]],
    device OUT_TYPE* out [[buffer(10)]],
    device float* lse [[buffer(11)]],
    device float* row_sum [[buffer(12)]],
    constant PrefillShape& shape [[buffer(13)]],
    constant float& scale [[buffer(14)]],
    constant float& cap [[buffer(15)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup Held tile_k[KEYS * STEP_K];
  threadgroup Held tile_v[KEYS * STEP_V];
  const Lane at = fragment_lane(lane);
  const int thread_index = int(simd * 32 + lane);
  const Head head = head_of(q, k, v, first_ints, second_ints, table, shape, group);
  const int tiles = (head.sequence.rows + ROWS - 1) / ROWS;
  // Read once, not in every step.
  const long k_key = shape.steps.k_key, v_key = shape.steps.v_key;
  const long k_page = shape.steps.k_batch, v_page = shape.steps.v_batch;
  const float softcap = cap;
  float slope = scale, unit = STORED_UNIT;
#if CODES
  slope *= STORED_UNIT;
  if (int(group.z) < int(shape.batch)) {  // tokens that belong to no sequence have no scales
    const int at_scale = int(group.z) * int(groups.y) + head.kv_head;
    slope *= (shape.has_q_scale != 0 ? q_scale[at_scale] : 1.0f) * (shape.has_k_scale != 0 ? k_scale[at_scale] : 1.0f);
    unit *= shape.has_v_scale != 0 ? v_scale[at_scale] : 1.0f;
  }
#endif

  // One tile a threadgroup, unless there are more tiles than the host expected.
  for (int count = int(group.x); count < tiles; count += int(groups.x)) {
    const WorkTile tile = work_tile(head.sequence, (tiles - 1 - count) * ROWS, int(simd));
    const QueryTile rq = load_q(head, shape, tile.simd_row0, at);
    const RowMasks sees = row_masks(head.sequence, tile.simd_row0, at);
    RowState rows;
    clear(rows);
    for (int i0 = 0; i0 < tile.keys.count; i0 += KEYS) {
      const KeyTile keys = key_tile(head, tile.keys, i0, int(lane));
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the last tile has been used
      copy_keys<DIM, STEP_K>(head.k, k_page, k_key, tile_k, keys, thread_index);
      copy_keys<DIM_V, STEP_V>(head.v, v_page, v_key, tile_v, keys, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const Step step = step_of(tile, head.sequence.rows, i0);
      if (step.skipped) {
        continue;
      }
      Scores s = multiply_keys(tile_k, rq, at);
      softmax_step(rows, s, sees, tile.keys, i0, step.masked, slope, softcap, at);
      multiply_values(rows, s, tile_v, at);
    }
    store(out, lse, row_sum, sink, unit, shape, head, rows, tile.simd_row0, head.sequence.heads * int(groups.y), at);
  }
}
