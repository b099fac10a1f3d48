// Attention of tokens that each have keys of their own: what sparse_rows and sparse_merge do but for their results, which
// attnkit/sparse_numbers.h or attnkit/sparse_codes.h stores. A threadgroup has a token, up to HEADS of its heads and a
// share of its keys; it brings KEYS rows at a time to threadgroup memory, where they serve both products. Each head tile
// of 8 belongs to PARTS simdgroups, which have SLICE columns each: of Q' and of O' in registers, and of the rows in both
// products.
//
//   S' (keys, heads) = K Q'      each simdgroup adds up its columns; the sums of PARTS simdgroups meet in memory
//   O' (dims, heads) = V' S'     the weights, which all PARTS have, never leave their lanes
//
// The token's keys are those of its window and then its entries. Which they are is looked up a tile ahead. A row that
// does not count is not read: it stands as zeros, with a score of -inf.
//
// The first ``whole`` tokens have a threadgroup for all of their keys, which stores results. The keys of the others are
// split; each split leaves a part, its output over its sum, rounded to TYPE, with maximum and sum in float.
//
// Grid: x tiles of HEADS heads, y the whole tokens and then the splits of the others, z 1; 32 * SIMDS threads in a
// threadgroup, no other number. sparse_merge: a simdgroup for every SPAN elements of a row whose keys are split, of any
// number of simdgroups.
//
// Defined by the host: TYPE, DIM, SLICE (a multiple of 64 that divides DIM), HEADS, KEYS (multiples of 8), WIDTH, LISTED,
// NEAR_PAGED, FAR_PAGED, and FORMAT, ROPE and DIVIDED of attnkit/coded_rows.h.
// WIDTH 4 needs steps and offsets of the caches to be multiples of 4 elements.

#if FORMAT == 0
typedef TYPE RowType;
#else
typedef uchar RowType;
#endif
constant constexpr int PARTS = DIM / SLICE;
constant constexpr int HEAD_TILES = HEADS / 8;
constant constexpr int SIMDS = HEAD_TILES * PARTS;
constant constexpr int THREADS = 32 * SIMDS;
constant constexpr int BLOCKS = KEYS / 8;
constant constexpr int FRAGMENTS = SLICE / 8;
constant constexpr int SUMS = PARTS > 1 ? SIMDS * BLOCKS * 32 : 1;
constant constexpr int RUN = 4;  // neighbouring dims of V that a lane reads
// 32 bytes more than a row: then the rows of a fragment lie in different banks.
constant constexpr int STEP = DIM + 32 / sizeof(TYPE);

struct CacheShape {
  long first;  // elements from one request, or page, to the next
  long key;
  long page;  // keys of a page
  long pages;
  long table_row;
};

struct SparseShape {
  long heads;
  long requests;
  long each;  // tokens of a request, where they do not name theirs
  long capacity;  // window keys of a request
  long window;
  long entries;  // of a request
  long listed;
  long list_row;
  long q_token;
  long q_head;
  long whole;  // tokens whose keys are not split
  long rest;  // the others
  long splits;  // of the keys of each of these
  long has_length;
  long has_requests;
  long has_sink;
  long normalize;
  CacheShape near;
  CacheShape far;
};

// What a token attends: ``near`` keys from ``first`` on, then entries.
struct Keys {
  int request;
  int first;
  int near;
  int limit;  // entries from this one on do not count
  int count;
  const device int* list;
};

inline Keys keys_of(
    const device int* end,
    const device int* chosen,
    const device int* length,
    const device int* requests,
    constant SparseShape& shape,
    int token) {
  Keys keys;
  keys.request = shape.has_requests != 0 ? requests[token] : token / int(shape.each);
  const bool there = keys.request >= 0 && keys.request < int(shape.requests);
  const int last = clamp(end[token], 0, int(shape.capacity));
  keys.near = there ? min(last, int(shape.window)) : 0;
  keys.first = last - keys.near;
  const int entries = there ? int(shape.entries) : 0;
  keys.limit = shape.has_length != 0 ? clamp(length[token], 0, entries) : entries;
#if LISTED
  keys.list = chosen + token * shape.list_row;
  keys.count = keys.near + (keys.limit > 0 ? int(shape.listed) : 0);
#else
  keys.list = nullptr;
  keys.count = keys.near + keys.limit;
#endif
  return keys;
}

// Where key ``key`` of a request lies in a cache, in elements; -1 where its page is not one.
inline long offset_of(constant CacheShape& cache, const device int* table, int request, int key, bool paged) {
  if (!paged) {
    return request * cache.first + key * cache.key;
  }
  const int size = int(cache.page);
  const int page = table[request * cache.table_row + key / size];
  return page >= 0 && page < int(cache.pages) ? page * cache.first + (key % size) * cache.key : -1;
}

// Twice the offset of key number i of the token, and 1 more if it is an entry; -1 if it does not count.
inline long place_of(
    thread const Keys& keys,
    const device int* near_table,
    const device int* far_table,
    constant SparseShape& shape,
    int i) {
  if (i < keys.near) {
    const long at = offset_of(shape.near, near_table, keys.request, keys.first + i, NEAR_PAGED);
    return at < 0 ? -1 : 2 * at;
  }
  int entry = i - keys.near;
#if LISTED
  entry = keys.list[entry];
#endif
  if (entry < 0 || entry >= keys.limit) {
    return -1;
  }
  const long at = offset_of(shape.far, far_table, keys.request, entry, FAR_PAGED);
  return at < 0 ? -1 : 2 * at + 1;
}

struct Member {
  Lane at;  // its place in fragments
  int lane;
  int simd;

  int index() const {
    return simd * 32 + lane;
  }

  int tile() const {
    return simd / PARTS;
  }

  int part() const {
    return simd % PARTS;
  }
};

// Threadgroup memory.
struct Shared {
  threadgroup TYPE* rows;  // (KEYS, STEP)
  threadgroup long* places;  // (2, KEYS): of the tile at hand, and of the next
  threadgroup float2* sums;  // (SIMDS, BLOCKS, 32): S' of a simdgroup's columns
};

inline void look_up(
    thread const Shared& shared,
    thread const Keys& keys,
    const device int* near_table,
    const device int* far_table,
    constant SparseShape& shape,
    int i0,
    int end,
    int turn,
    thread const Member& me) {
  for (int i = me.index(); i < KEYS; i += THREADS) {
    shared.places[turn * KEYS + i] = i0 + i < end ? place_of(keys, near_table, far_table, shape, i0 + i) : -1;
  }
}

#if FORMAT == 0
constant constexpr int UNIT = WIDTH;  // numbers that a thread copies at a time

inline void copy_numbers(const device TYPE* row, int d, float divisor, threadgroup TYPE* to) {
#if WIDTH == 4
  typedef vec<TYPE, 4> Vector;
  *reinterpret_cast<threadgroup Vector*>(to) = *reinterpret_cast<const device Vector*>(row + d);
#else
  to[0] = row[d];
#endif
}
#else
constant constexpr int UNIT = CODED_UNIT;

inline void copy_numbers(const device uchar* row, int d, float divisor, threadgroup TYPE* to) {
  decode_numbers(row, d, divisor, to);
}
#endif

// The rows of a tile, decoded; zeros for those that do not count, because 0 * nan is nan.
inline void copy_rows(
    const device RowType* near,
    const device RowType* far,
    thread const Shared& shared,
    int turn,
    float divisor,
    thread const Member& me) {
  for (int i = me.index() * UNIT; i < KEYS * DIM; i += THREADS * UNIT) {
    const int row = i / DIM, d = i % DIM;
    const long place = shared.places[turn * KEYS + row];
    threadgroup TYPE* to = shared.rows + row * STEP + d;
    if (place < 0) {
      ATTNKIT_UNROLL
      for (int n = 0; n < UNIT; n++) {
        to[n] = TYPE(0.0f);
      }
    } else {
      copy_numbers((place % 2 != 0 ? far : near) + place / 2, d, divisor, to);
    }
  }
}

// Q' of this simdgroup's heads and columns. The columns are permuted so that the lane that holds columns c, c + 1 of two
// neighbouring fragments of K reads four neighbouring elements.
struct Query {
  vec<TYPE, 2> of[FRAGMENTS];
};

inline Query load_q(const device TYPE* q, constant SparseShape& shape, int head0, thread const Member& me) {
  Query query;
  ATTNKIT_UNROLL
  for (int e = 0; e < 2; e++) {
    const int head = head0 + me.at.col + e;
    const bool live = head < int(shape.heads);
    const device TYPE* from = q + (live ? head : 0) * shape.q_head + me.part() * SLICE;
    ATTNKIT_UNROLL
    for (int f = 0; f < FRAGMENTS; f++) {
      const int d = (f / 2) * 16 + (me.at.row / 2) * 4 + (f % 2) * 2 + me.at.row % 2;
      query.of[f][e] = live ? from[d] : TYPE(0.0f);
    }
  }
  return query;
}

inline float4 read_tile(const threadgroup TYPE* from) {
  const vec<TYPE, 4> x = *reinterpret_cast<const threadgroup vec<TYPE, 4>*>(from);
  return float4(float(x[0]), float(x[1]), float(x[2]), float(x[3]));
}

struct Scores {
  float2 of[BLOCKS];  // of key 8 * block + row, and heads col and col + 1 of the tile
};

// S' = K Q' of this simdgroup's columns. Sums over 64 dims each are short chains, which round less.
inline Scores multiply_keys(thread const Shared& shared, thread const Query& q, thread const Member& me) {
  Scores s;
  ATTNKIT_UNROLL
  for (int block = 0; block < BLOCKS; block++) {
    const threadgroup TYPE* row = shared.rows + (block * 8 + me.at.row) * STEP + me.part() * SLICE + 2 * me.at.col;
    s.of[block] = float2(0.0f);
    ATTNKIT_UNROLL
    for (int d0 = 0; d0 < SLICE; d0 += 64) {
      float2 even = float2(0.0f), odd = float2(0.0f);
      ATTNKIT_UNROLL
      for (int d = d0; d < d0 + 64; d += 16) {
        const float4 x = read_tile(row + d);
        const vec<TYPE, 2> qa = q.of[d / 8], qb = q.of[d / 8 + 1];
        multiply_add(even, x.xy, float2(float(qa[0]), float(qa[1])));
        multiply_add(odd, x.zw, float2(float(qb[0]), float(qb[1])));
      }
      s.of[block] += even + odd;
    }
  }
  return s;
}

// The sums of all columns, from those of the PARTS simdgroups of a head tile, in one order for all of them.
inline void add_parts(thread Scores& s, thread const Shared& shared, thread const Member& me) {
  ATTNKIT_UNROLL
  for (int block = 0; block < BLOCKS; block++) {
    shared.sums[(me.simd * BLOCKS + block) * 32 + me.lane] = s.of[block];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  ATTNKIT_UNROLL
  for (int block = 0; block < BLOCKS; block++) {
    s.of[block] = float2(0.0f);
    ATTNKIT_UNROLL
    for (int part = 0; part < PARTS; part++) {
      s.of[block] += shared.sums[((me.tile() * PARTS + part) * BLOCKS + block) * 32 + me.lane];
    }
  }
}

// The online softmax of a simdgroup's heads. One that has seen no key has row_max -inf and row_sum 0.
struct HeadState {
  float2 row_max;
  float2 row_sum;  // of the keys that this lane holds: the lanes of a head are joined at the end
  float2 o[FRAGMENTS];  // O', to be divided by the whole row_sum
};

// A step of it: products become scores, scores weights.
inline void softmax_step(
    thread HeadState& state, thread Scores& s, thread const Shared& shared, int turn, float scale, Lane at) {
  float2 row_max = float2(-INFINITY);
  ATTNKIT_UNROLL
  for (int block = 0; block < BLOCKS; block++) {
    const bool counts = shared.places[turn * KEYS + block * 8 + at.row] >= 0;
    s.of[block] = counts ? s.of[block] * scale : float2(-INFINITY);
    row_max = max(row_max, s.of[block]);
  }
  row_max = max(state.row_max, column_max(row_max));
  const float2 base = safe_max(row_max);
  if (simd_any(row_max.x != state.row_max.x || row_max.y != state.row_max.y)) {
    const float2 factor = exp(state.row_max - base);
    state.row_sum *= factor;
    ATTNKIT_UNROLL
    for (int f = 0; f < FRAGMENTS; f++) {
      state.o[f] *= factor;
    }
  }
  state.row_max = row_max;
  ATTNKIT_UNROLL
  for (int block = 0; block < BLOCKS; block++) {
    s.of[block] = exp(s.of[block] - base);
    state.row_sum += s.of[block];
  }
}

// O' += V' S'. Of 8 * RUN dims, fragment f holds dims RUN * row + f.
inline void multiply_values(
    thread HeadState& state, thread const Scores& weights, thread const Shared& shared, thread const Member& me) {
  ATTNKIT_UNROLL
  for (int block = 0; block < BLOCKS; block++) {
    const threadgroup TYPE* row =
        shared.rows + (block * 8 + me.at.col) * STEP + me.part() * SLICE + RUN * me.at.row;
    ATTNKIT_UNROLL
    for (int d = 0; d < SLICE; d += 8 * RUN) {
      const float4 x = read_tile(row + d), y = read_tile(row + STEP + d);
      ATTNKIT_UNROLL
      for (int f = 0; f < RUN; f++) {
        multiply_add(state.o[d / 8 + f], float2(x[f], y[f]), weights.of[block]);
      }
    }
  }
}

// What becomes of a row's sums: its log-sum-exp, and the number that divides its elements.
struct Result {
  float lse;
  float divisor;
};

// The sink joins the denominator only; a row that saw nothing gives 0 and -inf.
inline Result result_of(float row_max, float row_sum, const device float* sink, bool normalize) {
  Result result;
  result.lse = row_sum == 0.0f ? -INFINITY : row_max + log(row_sum);
  float denominator = row_sum;
  if (sink != nullptr && row_max != -INFINITY) {
    denominator += exp(sink[0] - row_max);
  }
  result.divisor = denominator == 0.0f || !normalize ? 1.0f : denominator;
  return result;
}

// What a threadgroup does: a share of the keys of a token, and heads from ``head0`` on, which are this simdgroup's.
struct Task {
  int token;
  int split;
  int splits;
  int head0;
};

inline Task task_of(uint3 group, constant SparseShape& shape, thread const Member& me) {
  Task task;
  const int turn = int(group.y) - int(shape.whole);
  task.splits = turn < 0 ? 1 : int(shape.splits);
  task.token = turn < 0 ? int(group.y) : int(shape.whole) + turn / task.splits;
  task.split = turn < 0 ? 0 : turn % task.splits;
  task.head0 = int(group.x) * HEADS + me.tile() * 8;
  return task;
}

// Everything that is read.
struct Inputs {
  const device TYPE* q;
  const device RowType* near;
  const device RowType* far;
  const device int* near_table;
  const device int* far_table;
  float divided_by;
  float scale;
};

// The sums of a task's keys, of all lanes of a head.
inline void attend(
    thread HeadState& state,
    thread const Inputs& in,
    thread const Keys& keys,
    thread const Shared& shared,
    constant SparseShape& shape,
    thread const Task& task,
    thread const Member& me) {
  const int steps = task.splits * KEYS;
  const int share = (keys.count + steps - 1) / steps * KEYS;
  const int begin = task.split * share, behind = min(keys.count, begin + share);
  look_up(shared, keys, in.near_table, in.far_table, shape, begin, behind, 0, me);
  const Query query = load_q(in.q + task.token * shape.q_token, shape, task.head0, me);

  state.row_max = float2(-INFINITY);
  state.row_sum = float2(0.0f);
  ATTNKIT_UNROLL
  for (int f = 0; f < FRAGMENTS; f++) {
    state.o[f] = float2(0.0f);
  }
  for (int i0 = begin, turn = 0; i0 < behind; i0 += KEYS, turn = 1 - turn) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the last tile has been used, the places of this one are there
    copy_rows(in.near, in.far, shared, turn, in.divided_by, me);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    look_up(shared, keys, in.near_table, in.far_table, shape, i0 + KEYS, behind, 1 - turn, me);
    Scores s = multiply_keys(shared, query, me);
    if (PARTS > 1) {
      add_parts(s, shared, me);
    }
    softmax_step(state, s, shared, turn, in.scale, me.at);
    multiply_values(state, s, shared, me);
  }
  state.row_sum = column_sum(state.row_sum);
}

// A head's elements of this simdgroup's columns, divided and rounded once.
inline void store_row(
    device TYPE* out, thread const HeadState& state, int e, float divisor, thread const Member& me) {
  device TYPE* to = out + me.part() * SLICE + RUN * me.at.row;
  ATTNKIT_UNROLL
  for (int d = 0; d < SLICE; d += 8 * RUN) {
    vec<TYPE, RUN> run;
    ATTNKIT_UNROLL
    for (int f = 0; f < RUN; f++) {
      run[f] = TYPE(state.o[d / 8 + f][e] / divisor);
    }
    *reinterpret_cast<device vec<TYPE, RUN>*>(to + d) = run;
  }
}

// What splits leave: (splits, rest, H) rows.
struct Parts {
  device TYPE* out;
  device float* row_max;
  device float* row_sum;
};

inline void store_part(
    thread const HeadState& state,
    thread const Parts& to,
    constant SparseShape& shape,
    thread const Task& task,
    thread const Member& me) {
  const long row0 = (task.split * shape.rest + task.token - shape.whole) * shape.heads;
  ATTNKIT_UNROLL
  for (int e = 0; e < 2; e++) {
    const long head = task.head0 + me.at.col + e;
    if (head < shape.heads) {
      const float row_sum = state.row_sum[e];
      if (me.at.row == 0 && me.part() == 0) {
        to.row_max[row0 + head] = state.row_max[e];
        to.row_sum[row0 + head] = row_sum;
      }
      store_row(to.out + (row0 + head) * DIM, state, e, row_sum == 0.0f ? 1.0f : row_sum, me);
    }
  }
}

struct SparseMerge {
  long splits;
  long rows;  // tokens whose keys are split, times heads
  long first;  // which row of the results is the first of these
  long heads;
  long has_sink;
  long normalize;
};

// RUNS runs of four neighbouring elements of a row, from ``d`` on, and the row's maximum and sum.
template <int RUNS>
struct Merged {
  float4 of[RUNS];
  float row_max;
  float row_sum;
};

template <int RUNS>
inline Merged<RUNS> merge_parts(
    const device TYPE* parts,
    const device float* max_parts,
    const device float* sum_parts,
    constant SparseMerge& shape,
    long row,
    int d,
    int lane) {
  const int splits = int(shape.splits);
  // Of every 32 splits a lane reads the statistics of one, once; the others get its weight from it.
  Merged<RUNS> merged;
  merged.row_max = -INFINITY;
  for (int split = lane; split < splits; split += 32) {
    merged.row_max = max(merged.row_max, max_parts[split * shape.rows + row]);
  }
  merged.row_max = simd_max(merged.row_max);
  const float base = safe_max(merged.row_max);
  float sum = 0.0f;
  ATTNKIT_UNROLL
  for (int run = 0; run < RUNS; run++) {
    merged.of[run] = float4(0.0f);
  }
  for (int split0 = 0; split0 < splits; split0 += 32) {
    const int mine = split0 + lane;
    float weight = 0.0f;
    if (mine < splits) {
      const long at = mine * shape.rows + row;
      weight = exp(max_parts[at] - base) * sum_parts[at];
      sum += weight;
    }
    for (int i = 0; i < min(32, splits - split0); i++) {
      const float its = simd_shuffle(weight, ushort(i));
      if (d < DIM) {
        const device TYPE* part = parts + ((split0 + i) * shape.rows + row) * DIM + d;
        ATTNKIT_UNROLL
        for (int run = 0; run < RUNS; run++) {
          float4 x;
          read(part + 4 * run, x);
          merged.of[run] = fma(float4(its), x, merged.of[run]);
        }
      }
    }
  }
  merged.row_sum = simd_sum(sum);
  return merged;
}
