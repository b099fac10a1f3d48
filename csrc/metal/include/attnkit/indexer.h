// Scores of cache entries: sum_h weights[t, h] * relu(q[t, h] . k[j]), in index_scores.
//
// Keys stay, tokens stream. A simdgroup has 8 * BLOCKS keys in registers; the threadgroup brings the queries of a token,
// HEADS heads at a time, to threadgroup memory in the order in which lanes will read them, a tile ahead of the products
//
//   S' (keys, heads) = K Q'      then scale, max with 0, times the weight; the heads are a lane's columns
//
// so that a key crosses the bus once for all tokens of a threadgroup, and a query once for all of its keys. The sum over
// heads stays in registers; lanes that have columns of the same key add up at the end.
//
// Grid: x blocks of SIMDS * 8 * BLOCKS keys, y requests, z shares of ``share`` tokens (of the request, or, where tokens
// name their request, of all); SIMDS simdgroups in a threadgroup, no other number.
//
// Defined by the host: FORMAT (0 none, 1 fp8, 2 mxfp4), TYPE (of the products, in which all numbers are exact; without
// a format that of q and k), W_TYPE, DIM (a multiple of 64), BLOCKS, SIMDS, WIDTH, PAGED, NAMED (tokens name their
// request), Q_SCALED (fp8 with scales of q). WIDTH 4 needs steps and offsets of q and k to be multiples of 4 elements.

#if FORMAT == 0
typedef TYPE Stored;
#else
typedef uchar Stored;
#endif
#if FORMAT == 2
typedef uchar Scale;
#else
typedef float Scale;
#endif
constant constexpr int FRAGMENTS = DIM / 8;
constant constexpr int HEADS = 32;
constant constexpr int THREADS = 32 * SIMDS;
constant constexpr int OWN_KEYS = 8 * BLOCKS;  // of a simdgroup
constant constexpr int KEYS = OWN_KEYS * SIMDS;
constant constexpr int SCALE_BLOCK = 32;  // numbers under one scale of MXFP4
constant constexpr int TILE = HEADS * DIM;

struct IndexShape {
  long tokens;
  long requests;
  long entries;
  long heads;
  long each;  // tokens of a request, where they do not name theirs
  long share;
  long q_token;
  long q_head;
  long q_scale_token;
  long q_scale_head;
  long weight_token;
  long k_first;  // from one request, or page, to the next
  long k_key;
  long k_scale_first;
  long k_scale_key;
  long page;  // keys of a page
  long pages;
  long table_row;
};

// Numbers d to d + 3 of a row, exact in TYPE but for MXFP4 numbers below and beyond bfloat's.
inline vec<TYPE, 4> read_numbers(const device Stored* row, const device Scale* scales, int d) {
  vec<TYPE, 4> x;
#if FORMAT == 0 && WIDTH == 4
  x = *reinterpret_cast<const device vec<TYPE, 4>*>(row + d);
#elif FORMAT == 0
  ATTNKIT_UNROLL
  for (int i = 0; i < 4; i++) {
    x[i] = row[d + i];
  }
#elif FORMAT == 1
  const uint word = read_word(row + d);
  ATTNKIT_UNROLL
  for (int i = 0; i < 4; i++) {
    x[i] = TYPE(e4m3_number((word >> (8 * i)) & 255u));
  }
#else
  const uint word = uint(row[d / 2]) | uint(row[d / 2 + 1]) << 8;
  const uint scale = scales[d / SCALE_BLOCK];
  ATTNKIT_UNROLL
  for (int i = 0; i < 4; i++) {
    x[i] = TYPE(times_power(e2m1_number((word >> (4 * i)) & 15u), scale));
  }
#endif
  return x;
}

struct Member {
  Lane at;  // its place in fragments
  int lane;
  int simd;

  int index() const {
    return simd * 32 + lane;
  }
};

// What a threadgroup has: keys from ``key0`` on of a request, and its share of the tokens.
struct Block {
  int request;
  int key0;
  int first;
  int end;
};

inline Block block_of(constant IndexShape& shape, uint3 group) {
  Block block;
  block.request = int(group.y);
  block.key0 = int(group.x) * KEYS;
  const int begin = NAMED ? 0 : block.request * int(shape.each);
  block.first = begin + int(group.z) * int(shape.share);
  block.end = min(block.first + int(shape.share), NAMED ? int(shape.tokens) : begin + int(shape.each));
  return block;
}

// How many entries token t sees; -1 if it is not one of the block's request.
inline int seen_by(
    const device int* k_len, const device int* ids, constant IndexShape& shape, thread const Block& block, int t) {
#if NAMED
  if (clamp(ids[t], 0, int(shape.requests) - 1) != block.request) {
    return -1;
  }
#endif
  return clamp(k_len[t], 0, int(shape.entries));
}

// The keys of a lane: of key 8 * block + row of the simdgroup the columns that its fragments have.
struct KeyTile {
  vec<TYPE, 2> of[BLOCKS][FRAGMENTS];
  float scale[BLOCKS];
};

// Keys from ``longest`` on nobody sees: they are zeros, and where they would lie is not looked up.
inline KeyTile load_keys(
    const device Stored* k,
    const device Scale* k_scale,
    const device int* table,
    constant IndexShape& shape,
    thread const Block& block,
    int longest,
    thread const Member& me) {
  KeyTile keys;
  ATTNKIT_UNROLL
  for (int b = 0; b < BLOCKS; b++) {
    const int key = block.key0 + me.simd * OWN_KEYS + b * 8 + me.at.row;
    bool live = key < longest;
    int first = block.request, slot = key;
#if PAGED
    const int size = int(shape.page);
    first = live ? table[block.request * shape.table_row + key / size] : 0;
    live = live && first >= 0 && first < int(shape.pages);
    slot = key % size;
#endif
    const device Stored* row = k + (live ? first * shape.k_first + slot * shape.k_key : 0);
    const device Scale* scales = k_scale + (live ? first * shape.k_scale_first + slot * shape.k_scale_key : 0);
    keys.scale[b] = FORMAT == 1 && live ? float(scales[0]) : 1.0f;
    ATTNKIT_UNROLL
    for (int f = 0; f < FRAGMENTS; f += 2) {
      vec<TYPE, 4> x = vec<TYPE, 4>(TYPE(0.0f));
      if (live) {
        x = read_numbers(row, scales, f * 8 + 2 * me.at.col);
      }
      keys.of[b][f] = vec<TYPE, 2>(x[0], x[1]);
      keys.of[b][f + 1] = vec<TYPE, 2>(x[2], x[3]);
    }
  }
  return keys;
}

// Threadgroup memory, two buffers each.
struct Shared {
  threadgroup TYPE* q;  // (2, HEADS / 8, FRAGMENTS, 8, 8): Q' in fragments
  threadgroup float* weights;  // (2, HEADS)
  threadgroup float* scales;  // (2, HEADS)
};

struct Queries {
  const device Stored* q;
  const device Scale* scales;
  const device W_TYPE* weights;
};

// Heads from ``head0`` on of token t into buffer ``turn``; those that there are not become zeros without a weight. A
// product's columns are permuted so that a lane reads four neighbouring numbers of a key: number 16 a + 4 b + i is row
// 2 b + i % 2 of fragment 2 a + i / 2.
inline void stage(
    thread const Queries& from,
    thread const Shared& to,
    constant IndexShape& shape,
    int t,
    int head0,
    int turn,
    thread const Member& me) {
  const int heads = int(shape.heads);
  for (int i = me.index() * 4; i < TILE; i += THREADS * 4) {
    const int head = i / DIM, d = i % DIM;
    vec<TYPE, 4> x = vec<TYPE, 4>(TYPE(0.0f));
    if (head0 + head < heads) {
      const device Scale* scales = from.scales + t * shape.q_scale_token + (head0 + head) * shape.q_scale_head;
      x = read_numbers(from.q + t * shape.q_token + (head0 + head) * shape.q_head, scales, d);
    }
    const int fragment = (head / 8) * FRAGMENTS + (d / 16) * 2;
    threadgroup TYPE* place = to.q + turn * TILE + fragment * 64 + (d % 16) / 4 * 16 + head % 8;
    place[0] = x[0];
    place[8] = x[1];
    place[64] = x[2];
    place[72] = x[3];
  }
  for (int head = me.index(); head < HEADS; head += THREADS) {
    const bool live = head0 + head < heads;
    to.weights[turn * HEADS + head] = live ? float(from.weights[t * shape.weight_token + head0 + head]) : 0.0f;
#if Q_SCALED
    to.scales[turn * HEADS + head] =
        live ? float(from.scales[t * shape.q_scale_token + (head0 + head) * shape.q_scale_head]) : 0.0f;
#endif
  }
}

// The sums over heads of a lane's keys, as far as its columns go.
struct Sums {
  float of[BLOCKS];
};

inline float2 rectified(float2 x) {
  // A maximum would lose NaN.
  return float2(x.x < 0.0f ? 0.0f : x.x, x.y < 0.0f ? 0.0f : x.y);
}

inline void add_heads(
    thread Sums& sums, thread const KeyTile& keys, thread const Shared& shared, int turn, thread const Member& me) {
  ATTNKIT_UNROLL
  for (int tile = 0; tile < HEADS / 8; tile++) {
    float2 even[BLOCKS], odd[BLOCKS];
    ATTNKIT_UNROLL
    for (int b = 0; b < BLOCKS; b++) {
      even[b] = odd[b] = float2(0.0f);
    }
    const threadgroup TYPE* q = shared.q + turn * TILE + tile * FRAGMENTS * 64 + me.at.row * 8 + me.at.col;
    ATTNKIT_UNROLL
    for (int f = 0; f < FRAGMENTS; f += 2) {
      const vec<TYPE, 2> qa = *reinterpret_cast<const threadgroup vec<TYPE, 2>*>(q + f * 64);
      const vec<TYPE, 2> qb = *reinterpret_cast<const threadgroup vec<TYPE, 2>*>(q + f * 64 + 64);
      ATTNKIT_UNROLL
      for (int b = 0; b < BLOCKS; b++) {
        const vec<TYPE, 2> ka = keys.of[b][f], kb = keys.of[b][f + 1];
        multiply_add(even[b], float2(float(ka[0]), float(ka[1])), float2(float(qa[0]), float(qa[1])));
        multiply_add(odd[b], float2(float(kb[0]), float(kb[1])), float2(float(qb[0]), float(qb[1])));
      }
    }
    const int head = turn * HEADS + tile * 8 + me.at.col;
    const float2 weight = float2(shared.weights[head], shared.weights[head + 1]);
#if Q_SCALED
    const float2 scale = float2(shared.scales[head], shared.scales[head + 1]);
#endif
    ATTNKIT_UNROLL
    for (int b = 0; b < BLOCKS; b++) {
      float2 x = even[b] + odd[b];
#if Q_SCALED
      x *= scale;
#endif
      x = rectified(FORMAT == 1 ? x * keys.scale[b] : x) * weight;
      sums.of[b] += x.x + x.y;
    }
  }
}

// The next token from t on that sees some of the block's keys, or the end of the share.
inline int next_token(
    const device int* k_len, const device int* ids, constant IndexShape& shape, thread const Block& block, int t) {
  while (t < block.end && seen_by(k_len, ids, shape, block, t) <= block.key0) {
    t++;
  }
  return t;
}

// -inf for the tokens that see none of the block's keys; gives the longest length of the others.
inline int leave_out(
    const device int* k_len,
    const device int* ids,
    device float* scores,
    constant IndexShape& shape,
    thread const Block& block,
    thread const Member& me) {
  int longest = 0;
  for (int t = block.first + me.lane; t < block.end; t += 32) {
    longest = max(longest, seen_by(k_len, ids, shape, block, t));
  }
  const int keys = min(KEYS, int(shape.entries) - block.key0);
  for (int t = block.first + me.simd; t < block.end; t += SIMDS) {
    const int seen = seen_by(k_len, ids, shape, block, t);
    if (seen >= 0 && seen <= block.key0) {
      for (int key = me.lane; key < keys; key += 32) {
        scores[t * shape.entries + block.key0 + key] = -INFINITY;
      }
    }
  }
  return simd_max(longest);
}

[[kernel, max_total_threads_per_threadgroup(32 * SIMDS)]] void index_scores(
    const device Stored* q [[buffer(0)]],  // (T, H, row)
    const device Stored* k [[buffer(1)]],  // (R, S, row), or in pages
    const device W_TYPE* weights [[buffer(2)]],  // (T, H)
    const device int* k_len [[buffer(3)]],  // (T)
    const device int* ids [[buffer(4)]],  // (T)
    const device int* table [[buffer(5)]],  // (R, M)
    const device Scale* q_scale [[buffer(6)]],  // as q, a scale for each block of a row
    const device Scale* k_scale [[buffer(7)]],  // as k
    device float* scores [[buffer(8)]],  // (T, S)
    constant IndexShape& shape [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup TYPE staged[2 * TILE];
  threadgroup float staged_weights[2 * HEADS];
  threadgroup float staged_scales[2 * HEADS];
  const Shared shared = {staged, staged_weights, staged_scales};
  const Member me = {fragment_lane(lane), int(lane), int(simd)};
  const Queries queries = {q, q_scale, weights};
  const Block block = block_of(shape, group);
  const int heads = int(shape.heads);

  const int longest = leave_out(k_len, ids, scores, shape, block, me);
  int t = next_token(k_len, ids, shape, block, block.first);
  if (t == block.end) {
    return;
  }
  const KeyTile keys = load_keys(k, k_scale, table, shape, block, longest, me);
  stage(queries, shared, shape, t, 0, 0, me);
  int turn = 0;
  while (t < block.end) {
    const int following = next_token(k_len, ids, shape, block, t + 1);
    Sums sums;
    ATTNKIT_UNROLL
    for (int b = 0; b < BLOCKS; b++) {
      sums.of[b] = 0.0f;
    }
    for (int head0 = 0; head0 < heads; head0 += HEADS, turn = 1 - turn) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // this buffer is full, and the other has been used
      if (head0 + HEADS < heads) {
        stage(queries, shared, shape, t, head0 + HEADS, 1 - turn, me);
      } else if (following < block.end) {
        stage(queries, shared, shape, following, 0, 1 - turn, me);
      }
      add_heads(sums, keys, shared, turn, me);
    }
    const int seen = seen_by(k_len, ids, shape, block, t);
    ATTNKIT_UNROLL
    for (int b = 0; b < BLOCKS; b++) {
      // The lanes that have the other columns of a row.
      float sum = sums.of[b] + simd_shuffle_xor(sums.of[b], ushort(1));
      sum += simd_shuffle_xor(sum, ushort(8));
      const int key = block.key0 + me.simd * OWN_KEYS + b * 8 + me.at.row;
      if (me.at.col == 0 && key < int(shape.entries)) {
        scores[t * shape.entries + key] = key < seen ? sum : -INFINITY;
      }
    }
    t = following;
  }
}
