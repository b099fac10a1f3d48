// Attention of a few query rows per KV head over a KV cache: decode_rows, and decode_merge for its partial results.
//
// The rows of one KV head are its T queries times the query heads that share it, so each key and value crosses the bus
// once for all of them (for every TILES * 8 of them, where there are more: then threadgroups that follow each other
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
// Defined by the host: TYPE of q and the cache, OUT_TYPE of what is stored (float if splits > 1), DIM, DIM_V, TILES
// (attnkit/rows.h), WIDTH, PAGED, CODES (the cache is E4M3: attnkit/elements.h). WIDTH 4 needs every step and offset to
// be a multiple of 4.

constant constexpr int KEYS = 16;  // of a simdgroup's step
constant constexpr int BLOCKS = KEYS / 8;
constant constexpr int ROWS = 8 * TILES;
constant constexpr int MOST_SIMDGROUPS = 8;
constant constexpr int WIDEST = DIM > DIM_V ? DIM : DIM_V;
typedef ScoreTile<BLOCKS> Scores;

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
  Steps steps;
  long page;  // keys of a page
  long pages;
  long table_row;
  long has_q_scale;
  long has_k_scale;
  long has_v_scale;
};

inline float4 read_four(const device Stored* from, bool live) {
  return live ? stored_four(from) : float4(0.0f);
}

inline void read_run(const device Stored* from, bool live, thread float* to) {
  float4 x = float4(0.0f);
  if (RUN == 4) {
    x = read_four(from, live);
  } else if (live) {
    x.xy = stored_two(from);
  }
  ATTNKIT_UNROLL
  for (int i = 0; i < RUN; i++) {
    to[i] = x[i];
  }
}

// A thread of the threadgroup.
struct Member {
  Lane at;  // its place in fragments
  int lane;
  int simd;
  int simds;

  int index() const {
    return simd * 32 + lane;
  }

  int count() const {
    return simds * 32;
  }
};

// Threadgroup memory. Q' and O are never there at the same time.
struct Shared {
  threadgroup float2* q;  // (TILES, PARTS_Q, 32 lanes): Q' in fragment order, until all keys have been multiplied
  threadgroup float* o;  // (ROWS, DIM_V), the same memory: O, after that
  threadgroup float* row_max;  // (simdgroups, ROWS)
  threadgroup float* row_sum;  // (simdgroups, ROWS)
};

// What a threadgroup computes: ROWS rows of a KV head of a sequence, and its split of the keys that these see.
struct WorkTile {
  Sequence sequence;
  int b;
  int kv_head;
  int row0;
  int split;
  Walk keys;  // that any of the rows sees
  int begin;  // of the walk, this split's share
  int end;
};

inline WorkTile work_tile(
    const device int* kv_len, const device int* kv_start, constant DecodeShape& shape, uint3 group) {
  WorkTile tile;
  tile.row0 = int(group.x) * ROWS;
  tile.split = int(group.y);
  const int kv_heads = int(shape.kv_heads);
  tile.b = int(group.z) / kv_heads;
  tile.kv_head = int(group.z) % kv_heads;

  Sequence s;
  s.masks.causal = shape.causal != 0;
  s.masks.window = int(shape.window);
  s.masks.sink_tokens = int(shape.sink_tokens);
  s.queries = int(shape.queries);
  s.heads = int(shape.heads);
  s.rows = s.queries * s.heads;
  const int capacity = int(shape.capacity);
  s.end = clamp(kv_len[tile.b], 0, capacity);
  s.first = shape.has_start != 0 ? clamp(kv_start[tile.b], 0, capacity) : 0;
  s.position0 = s.end - s.queries;
  s.in_cache = true;
  tile.sequence = s;

  const int lowest = max(0, s.position0 + tile.row0 / s.heads);
  const int highest = s.position0 + (min(tile.row0 + ROWS, s.rows) - 1) / s.heads;
  const Visible from = s.at_position(lowest), to = s.at_position(highest);
  tile.keys = walk(s.first, from, to);
  const int steps = int(shape.splits) * KEYS;
  const int share = (tile.keys.count + steps - 1) / steps * KEYS;
  tile.begin = tile.split * share;
  tile.end = min(tile.keys.count, tile.begin + share);
  return tile;
}

// The part of the cache that a threadgroup reads: steps are in elements.
struct Cache {
  const device Stored* k;  // of the sequence, or of page 0
  const device Stored* v;
  long k_key;
  long v_key;
#if PAGED
  Pages pages;
  long k_page;
  long v_page;
#endif
};

inline Cache cache_of(
    const device Stored* k,
    const device Stored* v,
    const device int* table,
    constant DecodeShape& shape,
    thread const WorkTile& tile) {
  Cache cache;
  cache.k = k + tile.kv_head * shape.steps.k_head;
  cache.v = v + tile.kv_head * shape.steps.v_head;
  cache.k_key = shape.steps.k_key;
  cache.v_key = shape.steps.v_key;
#if PAGED
  cache.pages.table = table + tile.b * shape.table_row;
  cache.pages.keys = int(shape.page);
  cache.pages.last = int(shape.pages) - 1;
  cache.k_page = shape.steps.k_batch;
  cache.v_page = shape.steps.v_batch;
#else
  cache.k += tile.b * shape.steps.k_batch;
  cache.v += tile.b * shape.steps.v_batch;
#endif
  return cache;
}

// Where the keys of a lane lie: that of its row of K, and those of its two columns of V.
struct KeyOffsets {
  long k[BLOCKS];
  long v[BLOCKS][2];
};

// Of the keys i0 .. i0 + KEYS - 1 of the walk. In a cache with pages, lane l looks key l up for all.
inline KeyOffsets key_offsets(thread const Cache& cache, thread const WorkTile& tile, int i0, thread const Member& me) {
  KeyOffsets offsets;
#if PAGED
  const Place place = place_of(cache.pages, tile.keys.key(min(i0 + me.lane % KEYS, tile.end - 1)));
#endif
  ATTNKIT_UNROLL
  for (int block = 0; block < BLOCKS; block++) {
    const int i_k = block * 8 + me.at.row, i_v = block * 8 + me.at.col;
#if PAGED
    offsets.k[block] = offset_of(place, i_k, cache.k_page, cache.k_key);
#else
    offsets.k[block] = tile.keys.key(i0 + i_k) * cache.k_key;
#endif
    ATTNKIT_UNROLL
    for (int e = 0; e < 2; e++) {
#if PAGED
      offsets.v[block][e] = offset_of(place, i_v + e, cache.v_page, cache.v_key);
#else
      offsets.v[block][e] = tile.keys.key(i0 + i_v + e) * cache.v_key;
#endif
    }
  }
  return offsets;
}

// Q' to threadgroup memory, as the lanes of the product will read it. Rows past the last are 0.
inline void load_q(
    const device TYPE* q,
    thread const Shared& shared,
    constant DecodeShape& shape,
    thread const WorkTile& tile,
    thread const Member& me) {
  const int heads = tile.sequence.heads;
  threadgroup float* to = reinterpret_cast<threadgroup float*>(shared.q);
  q += tile.b * shape.steps.q_batch + tile.kv_head * heads * shape.steps.q_head;
  for (int i = me.index(); i < TILES * PARTS_Q * 32; i += me.count()) {
    const Lane at = fragment_lane(uint(i % 32));
    const int d = dim_of_part((i / 32) % PARTS_Q, at);
    ATTNKIT_UNROLL
    for (int e = 0; e < 2; e++) {
      const int row = tile.row0 + (i / (32 * PARTS_Q)) * 8 + at.col + e;
      const bool live = row < tile.sequence.rows;
      const long from = (row / heads) * shape.steps.q_token + (row % heads) * shape.steps.q_head + d;
      to[2 * i + e] = live ? float(decoded(q[from])) : 0.0f;
    }
  }
}

// S' = K Q', in float. The sums over 32 dims each are short chains, which round less and do not wait for each other.
inline Scores multiply_keys(
    thread const Cache& cache,
    thread const KeyOffsets& offsets,
    thread const Shared& shared,
    int i0,
    int end,
    thread const Member& me) {
  Scores s;
  clear(s);
  ATTNKIT_UNROLL
  for (int d0 = 0; d0 < DIM; d0 += 32) {
    Scores even, odd;
    clear(even);
    clear(odd);
    ATTNKIT_UNROLL
    for (int d = d0; d < d0 + 32 && d < DIM; d += 16) {
      float4 x[BLOCKS];
      ATTNKIT_UNROLL
      for (int block = 0; block < BLOCKS; block++) {
        x[block] = read_four(cache.k + offsets.k[block] + d + 2 * me.at.col, i0 + block * 8 + me.at.row < end);
      }
      ATTNKIT_UNROLL
      for (int n = 0; n < TILES; n++) {
        const int part = (n * PARTS_Q + d / 8) * 32 + me.lane;
        ATTNKIT_UNROLL
        for (int block = 0; block < BLOCKS; block++) {
          multiply_add(even.of[block][n], x[block].xy, shared.q[part]);
          multiply_add(odd.of[block][n], x[block].zw, shared.q[part + 32]);
        }
      }
    }
    ATTNKIT_UNROLL
    for (int c = 0; c < BLOCKS * TILES; c++) {
      s.of[c / TILES][c % TILES] += even.of[c / TILES][c % TILES] + odd.of[c / TILES][c % TILES];
    }
  }
  return s;
}

// A step of the online softmax over the keys, which are the rows here: products become scores, scores weights.
inline void softmax_step(
    thread RowState& rows,
    thread Scores& s,
    thread const RowMasks& sees,
    thread const WorkTile& tile,
    int i0,
    float scale,
    float cap,
    Lane at) {
  ATTNKIT_UNROLL
  for (int n = 0; n < TILES; n++) {
    const float2 here = score(s, n, sees, tile.keys, i0, tile.end, true, scale, cap, at);
    const float2 row_max = max(rows.row_max[n], column_max(here));
    const float2 base = safe_max(row_max);
    rescale(rows, n, exp(rows.row_max[n] - base));
    rows.row_max[n] = row_max;
    exponentiate(s, rows, n, base);
  }
}

// O' += V' S'.
inline void multiply_values(
    thread RowState& rows,
    thread const Scores& weights,
    thread const Cache& cache,
    thread const KeyOffsets& offsets,
    int i0,
    int end,
    Lane at) {
  ATTNKIT_UNROLL
  for (int block = 0; block < BLOCKS; block++) {
    const int i_v = i0 + block * 8 + at.col;
    ATTNKIT_UNROLL
    for (int d = 0; d < DIM_V; d += 8 * RUN) {
      ValueRun x;
      ATTNKIT_UNROLL
      for (int e = 0; e < 2; e++) {
        read_run(cache.v + offsets.v[block][e] + d + RUN * at.row, i_v + e < end, x.of[e]);
      }
      add_values(rows, weights, block, d, x);
    }
  }
}

// This simdgroup's row_max and row_sum, for the others.
inline void share(thread RowState& rows, thread const Shared& shared, thread const Member& me) {
  ATTNKIT_UNROLL
  for (int n = 0; n < TILES; n++) {
    rows.row_sum[n] = column_sum(rows.row_sum[n]);
    if (me.at.row == 0) {
      ATTNKIT_UNROLL
      for (int e = 0; e < 2; e++) {
        shared.row_max[me.simd * ROWS + n * 8 + me.at.col + e] = rows.row_max[n][e];
        shared.row_sum[me.simd * ROWS + n * 8 + me.at.col + e] = rows.row_sum[n][e];
      }
    }
  }
}

// Of a row over all simdgroups. Without a maximum it is -inf, also where every score was nan: a maximum leaves nan out.
inline float combined_max(thread const Shared& shared, int row, int simds) {
  float row_max = -INFINITY;
  for (int simd = 0; simd < simds; simd++) {
    row_max = max(row_max, shared.row_max[simd * ROWS + row]);
  }
  return row_max;
}

// O += this simdgroup's part of it; the first one sets O. The simdgroups come one after another.
inline void combine(thread const RowState& rows, thread const Shared& shared, bool first, thread const Member& me) {
  ATTNKIT_UNROLL
  for (int n = 0; n < TILES; n++) {
    ATTNKIT_UNROLL
    for (int e = 0; e < 2; e++) {
      const int row = n * 8 + me.at.col + e;
      const float factor = exp(rows.row_max[n][e] - safe_max(combined_max(shared, row, me.simds)));
      ATTNKIT_UNROLL
      for (int part = 0; part < PARTS_O; part++) {
        const int i = row * DIM_V + part / RUN * RUN * 8 + RUN * me.at.row + part % RUN;
        shared.o[i] = (first ? 0.0f : shared.o[i]) + rows.o[n][part][e] * factor;
      }
    }
  }
}

// One rounding at the store. The sink joins the denominator only; a row that saw nothing gives 0 and -inf. ``unit`` is
// what the values are to be multiplied by.
inline void store(
    device OUT_TYPE* out,
    device float* lse,
    const device float* sink,
    float unit,
    thread const Shared& shared,
    constant DecodeShape& shape,
    thread const WorkTile& tile,
    thread const Member& me) {
  const int heads = tile.sequence.heads;
  for (int i = me.index(); i < ROWS * DIM_V; i += me.count()) {
    const int row = i / DIM_V, d = i % DIM_V;
    const int r = tile.row0 + row;
    if (r < tile.sequence.rows) {
      const float row_max = combined_max(shared, row, me.simds);
      float denominator = 0.0f;
      for (int simd = 0; simd < me.simds; simd++) {
        denominator += shared.row_sum[simd * ROWS + row] * exp(shared.row_max[simd * ROWS + row] - safe_max(row_max));
      }
      const int head = tile.kv_head * heads + r % heads;
      const long token = (long(tile.split) * shape.batch + tile.b) * tile.sequence.queries + r / heads;
      const long to_row = token * shape.kv_heads * heads + head;
      if (d == 0) {
        lse[to_row] = denominator == 0.0f ? -INFINITY : row_max + log(denominator);
      }
      if (shape.has_sink != 0 && row_max != -INFINITY) {
        denominator += exp(sink[head] - row_max);
      }
      out[to_row * DIM_V + d] = OUT_TYPE(denominator == 0.0f ? 0.0f : shared.o[i] / denominator * unit);
    }
  }
}

[[kernel, max_total_threads_per_threadgroup(32 * MOST_SIMDGROUPS)]] void decode_rows(
    const device TYPE* q [[buffer(0)]],
    const device Stored* k [[buffer(1)]],
    const device Stored* v [[buffer(2)]],
    const device int* table [[buffer(3)]],
    const device int* kv_len [[buffer(4)]],
    const device float* sink [[buffer(5)]],
    const device int* kv_start [[buffer(6)]],
    const device float* q_scale [[buffer(7)]],  // (B, Hkv), and the two below
    const device float* k_scale [[buffer(8)]],
    const device float* v_scale [[buffer(9)]],
    device OUT_TYPE* out [[buffer(10)]],
    device float* lse [[buffer(11)]],
    constant DecodeShape& shape [[buffer(12)]],
    constant float& scale [[buffer(13)]],
    constant float& cap [[buffer(14)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simds [[simdgroups_per_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float2 q_or_o[ROWS * WIDEST / 2];
  threadgroup float row_max[MOST_SIMDGROUPS * ROWS];
  threadgroup float row_sum[MOST_SIMDGROUPS * ROWS];
  const Shared shared = {q_or_o, reinterpret_cast<threadgroup float*>(q_or_o), row_max, row_sum};
  const Member me = {fragment_lane(lane), int(lane), int(simd), int(simds)};
  const WorkTile tile = work_tile(kv_len, kv_start, shape, group);
  const Cache cache = cache_of(k, v, table, shape, tile);
  const RowMasks sees = row_masks(tile.sequence, tile.row0, me.at);
  const float softcap = cap;  // read once, not in every step
  float slope = scale * STORED_UNIT, unit = STORED_UNIT;
#if CODES
  const int at_scale = tile.b * int(shape.kv_heads) + tile.kv_head;
  slope *= (shape.has_q_scale != 0 ? q_scale[at_scale] : 1.0f) * (shape.has_k_scale != 0 ? k_scale[at_scale] : 1.0f);
  unit *= shape.has_v_scale != 0 ? v_scale[at_scale] : 1.0f;
#endif

  load_q(q, shared, shape, tile, me);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  RowState rows;
  clear(rows);
  for (int i0 = tile.begin + me.simd * KEYS; i0 < tile.end; i0 += me.simds * KEYS) {
    const KeyOffsets offsets = key_offsets(cache, tile, i0, me);
    Scores s = multiply_keys(cache, offsets, shared, i0, tile.end, me);
    softmax_step(rows, s, sees, tile, i0, slope, softcap, me.at);
    multiply_values(rows, s, cache, offsets, i0, tile.end, me.at);
  }

  share(rows, shared, me);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // row_max and row_sum are there, and Q' is not needed any more
  for (int turn = 0; turn < me.simds; turn++) {
    if (turn == me.simd) {
      combine(rows, shared, turn == 0, me);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  store(out, lse, sink, unit, shared, shape, tile, me);
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
  merge_row<false>(
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
