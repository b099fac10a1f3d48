// Routed experts of many tokens, bound by products: experts_sort, experts_round, experts_many_up, experts_many_down.
//
// Slots are sorted by expert, and tiles of up to TILE_TOKENS of them, each of one expert, go down a list: expert e's
// begin at (slots of experts before e) / TILE_TOKENS + e, which leaves room for every expert's last, partly filled tile;
// what is left over is empty. So an expert knows its part of both lists from the indices alone, and no atomics are
// needed: the order is the same in every run.
//
// A work tile is TILE_TOKENS tokens by 128 rows of weights (64 features, gate and up). A thread brings 32 numbers of its
// row to threadgroup memory in a step, decoded and scaled to bfloat, which holds them exactly, and 8 or 4 numbers of a
// token. 4 simdgroups multiply all tokens by 32 rows each:
//
//   C (tokens, rows) = X (tokens, k) W' (k, rows)
//
// in float, from operands in bfloat where tokens are bfloat, in float elsewhere. A lane's numbers for four products are
// neighbours: product j takes what lies at 4 k' + j. A row of weights lies as it is decoded, 0 4 1 5 2 6 3 7 of eight
// numbers; tokens lie in order, and a lane picks what meets them.
//
//   experts_sort        order of slots, list of tiles        grid: ceil(experts / 4) threadgroups of 128 threads
//   experts_round       x rounded as activations says        grid: ceil(N / 256), tokens; 256 threads
//   experts_many_up     h[slot] = swiglu(w13 x), rounded     grid: ceil(M / 64), tiles; 128 threads
//   experts_many_down   parts[slot] = weight (w2 h + bias)   grid: ceil(N / 128), tiles; 128 threads
//
// Defined by the host: TILE_TOKENS (16 or 32), WIDTH (of reads of x: 4, or 1 where its rows are not aligned) and what
// attnkit/experts.h needs.

constant constexpr int SIMDS = 4;
constant constexpr int THREADS = 32 * SIMDS;
constant constexpr int TILE_ROWS = 128;  // of weights, one a thread
constant constexpr int TILE_FEATURES = TILE_ROWS / 2;
constant constexpr int TILE_K = 32;
constant constexpr int TOKEN_BLOCKS = TILE_TOKENS / 8;  // 8x8 blocks of a simdgroup
constant constexpr int SIMD_ROWS = TILE_ROWS / SIMDS;
constant constexpr int ROW_BLOCKS = SIMD_ROWS / 8;
constant constexpr int SIMD_FEATURES = SIMD_ROWS / 2;
constant constexpr int TOKEN_THREADS = THREADS / TILE_TOKENS;  // that bring a token's numbers
constant constexpr int TOKEN_NUMBERS = TILE_K / TOKEN_THREADS;  // that one of them brings
// 16 bytes more than a row: then the rows of a fragment lie in different banks.
constant constexpr int STEP_X = TILE_K + 16 / sizeof(SEEN);
constant constexpr int STEP_W = TILE_K / 8 + 1;  // uint4 of eight weights
static_assert(THREADS == TILE_ROWS, "a thread has a row of weights");
static_assert(TILE_TOKENS * TILE_FEATURES * 4 <= TILE_ROWS * STEP_W * 16, "features to round have room");

// What products take. The values of a token's number and a weight are both kept.
template <typename T>
struct OperandOf {
  typedef float type;
};

template <>
struct OperandOf<bfloat> {
  typedef bfloat type;
};

typedef OperandOf<SEEN>::type OPERAND;
typedef vec<OPERAND, 2> Operand2;
typedef vec<OPERAND, 4> Operand4;

[[kernel, max_total_threads_per_threadgroup(128)]] void experts_sort(
    const device INDEX* indices [[buffer(0)]],
    device int* order [[buffer(1)]],
    device int4* tiles [[buffer(2)]],
    constant ExpertShape& shape [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int expert = int(group * SIMDS + simd), experts = int(shape.experts);
  const int slots = int(shape.tokens * shape.choices);
  if (expert >= experts) {
    return;
  }
  int before = 0, count = 0;
  for (int slot = int(lane); slot < slots; slot += 32) {
    const int other = expert_of(indices, shape, slot);
    before += other >= 0 && other < expert ? 1 : 0;
    count += other == expert ? 1 : 0;
  }
  before = simd_sum(before);
  count = simd_sum(count);
  int at = before;
  for (int first = 0; first < slots; first += 32) {
    const int slot = first + int(lane);
    const int same = slot < slots && expert_of(indices, shape, min(slot, slots - 1)) == expert ? 1 : 0;
    const int rank = at + simd_prefix_exclusive_sum(same);
    if (same != 0) {
      order[rank] = slot;
    }
    at += simd_sum(same);
  }
  const int tile0 = before / TILE_TOKENS + expert;
  const int tile1 = expert == experts - 1 ? slots / TILE_TOKENS + experts
                                          : (before + count) / TILE_TOKENS + expert + 1;
  for (int tile = tile0 + int(lane); tile < tile1; tile += 32) {
    const int done = (tile - tile0) * TILE_TOKENS;
    tiles[tile] = int4(expert, before + done, clamp(count - done, 0, TILE_TOKENS), 0);
  }
}

[[kernel, max_total_threads_per_threadgroup(256)]] void experts_round(
    const device TYPE* x [[buffer(0)]],
    const device float* x_global [[buffer(1)]],
    device SEEN* to [[buffer(2)]],
    constant ExpertShape& shape [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 thread_index [[thread_position_in_threadgroup]]) {
  const int n = int(group.x * 256 + thread_index.x), token = int(group.y);
  const bool live = n < shape.hidden;
  const float global = shape.up.has_act_global != 0 ? x_global[0] : 1.0f;
  const float value = rounded(live ? float(x[token * shape.x_step + n]) : 0.0f, global);
  if (live) {
    to[token * shape.hidden + n] = SEEN(value);
  }
}

// Four numbers as operands.
inline void operands(float4 x, thread float4& to) {
  to = x;
}

inline void operands(vec<half, 4> x, thread float4& to) {
  to = float4(float(x[0]), float(x[1]), float(x[2]), float(x[3]));
}

inline void operands(vec<bfloat, 4> x, thread vec<bfloat, 4>& to) {
  to = x;
}

// Four weights, which are bfloat in two words.
inline void operands(uint2 words, thread float4& to) {
  to = float4(
      as_type<float>(words.x << 16),
      as_type<float>(words.x & 0xffff0000u),
      as_type<float>(words.y << 16),
      as_type<float>(words.y & 0xffff0000u));
}

inline void operands(uint2 words, thread vec<bfloat, 4>& to) {
  to = as_type<vec<bfloat, 4>>(words);
}

inline Operand2 pair_of(OPERAND first, OPERAND second) {
  Operand2 pair;
  pair[0] = first;
  pair[1] = second;
  return pair;
}

// sum += a b
inline void multiply_operands(thread float2& sum, Operand2 a, Operand2 b) {
  simdgroup_matrix<OPERAND, 8, 8> ma, mb;
  simdgroup_matrix<float, 8, 8> mc;
  reinterpret_cast<thread Operand2&>(ma.thread_elements()) = a;
  reinterpret_cast<thread Operand2&>(mb.thread_elements()) = b;
  reinterpret_cast<thread float2&>(mc.thread_elements()) = sum;
  simdgroup_multiply_accumulate(mc, ma, mb, mc);
  sum = reinterpret_cast<thread float2&>(mc.thread_elements());
}

// The 32 weights of a row from ``column`` on, decoded and scaled, to threadgroup memory; zeros behind the last column.
inline void stage_weights(thread const Matrix& m, thread const MatrixRow& row, int column, threadgroup uint4* to) {
  const uint4 codes = read_codes(m, row.codes, column);
  ATTNKIT_UNROLL
  for (int b = 0; b < TILE_K / BLOCK; b++) {
    uint4 made[BLOCK / 8];
    if (b == 0 || column + b * BLOCK < m.columns) {
      uint words[BLOCK / 8];
      ATTNKIT_UNROLL
      for (int w = 0; w < BLOCK / 8; w++) {
        words[w] = codes[b * (BLOCK / 8) + w];
      }
      bfloat_block(words, scale_byte(m, row, column / BLOCK + b), made);
    } else {
      ATTNKIT_UNROLL
      for (int w = 0; w < BLOCK / 8; w++) {
        made[w] = uint4(0u);
      }
    }
    ATTNKIT_UNROLL
    for (int w = 0; w < BLOCK / 8; w++) {
      to[b * (BLOCK / 8) + w] = made[w];
    }
  }
}

inline vec<SEEN, 4> read_four(const device SEEN* from) {
#if WIDTH == 4
  return *reinterpret_cast<const device vec<SEEN, 4>*>(from);
#else
  vec<SEEN, 4> x;
  ATTNKIT_UNROLL
  for (int i = 0; i < 4; i++) {
    x[i] = from[i];
  }
  return x;
#endif
}

// The sums of a simdgroup: of all tokens and SIMD_ROWS rows.
struct Sums {
  float2 of[TOKEN_BLOCKS][ROW_BLOCKS];
};

// All of K for a work tile. ``weight_row`` is what this thread stages of every step, ``token`` the row of the slot whose
// numbers it brings, null where there is none.
inline Sums tile_products(
    thread const Matrix& m,
    thread const MatrixRow& weight_row,
    const device SEEN* token,
    threadgroup SEEN* tile_x,
    threadgroup uint4* tile_w,
    int thread_index,
    Lane at) {
  typedef vec<SEEN, 4> Vector;
  Sums sums;
  ATTNKIT_UNROLL
  for (int a = 0; a < TOKEN_BLOCKS; a++) {
    ATTNKIT_UNROLL
    for (int b = 0; b < ROW_BLOCKS; b++) {
      sums.of[a][b] = float2(0.0f);
    }
  }
  const threadgroup SEEN* x = tile_x + at.row * STEP_X + 4 * at.col;
  const threadgroup uint2* w = reinterpret_cast<const threadgroup uint2*>(
      tile_w + (thread_index / 32 * SIMD_ROWS + at.col) * STEP_W) + at.row;
  const int column = thread_index % TOKEN_THREADS * TOKEN_NUMBERS;
  threadgroup SEEN* x_to = tile_x + thread_index / TOKEN_THREADS * STEP_X + column;
  for (int k0 = 0; k0 < m.columns; k0 += TILE_K) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the last step has been multiplied
    const bool there = token != nullptr && k0 + column < m.columns;
    ATTNKIT_UNROLL
    for (int i = 0; i < TOKEN_NUMBERS; i += 4) {
      Vector values = Vector(SEEN(0.0f));
      if (there) {
        values = read_four(token + k0 + column + i);
      }
      *reinterpret_cast<threadgroup Vector*>(x_to + i) = values;
    }
    stage_weights(m, weight_row, k0, tile_w + thread_index * STEP_W);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Operand2 xs[TOKEN_BLOCKS][4];  // of product j, this lane's two k
    ATTNKIT_UNROLL
    for (int a = 0; a < TOKEN_BLOCKS; a++) {
      Operand4 first, second;
      operands(*reinterpret_cast<const threadgroup Vector*>(x + a * 8 * STEP_X), first);
      operands(*reinterpret_cast<const threadgroup Vector*>(x + a * 8 * STEP_X + 4), second);
      xs[a][0] = pair_of(first[0], first[2]);
      xs[a][1] = pair_of(second[0], second[2]);
      xs[a][2] = pair_of(first[1], first[3]);
      xs[a][3] = pair_of(second[1], second[3]);
    }
    ATTNKIT_UNROLL
    for (int b = 0; b < ROW_BLOCKS; b++) {
      Operand4 even, odd;
      operands(w[b * 8 * STEP_W * 2], even);
      operands(w[(b * 8 + 1) * STEP_W * 2], odd);
      ATTNKIT_UNROLL
      for (int j = 0; j < 4; j++) {
        ATTNKIT_UNROLL
        for (int a = 0; a < TOKEN_BLOCKS; a++) {
          multiply_operands(sums.of[a][b], xs[a][j], pair_of(even[j], odd[j]));
        }
      }
    }
  }
  return sums;
}

// Slots order[first], ... order[first + count - 1] of an expert; none where the list has room left over.
struct WorkTile {
  int expert;
  int first;
  int count;
};

inline WorkTile work_tile(int4 entry) {
  WorkTile work;
  work.expert = entry.x;
  work.first = entry.y;
  work.count = entry.z;
  return work;
}

[[kernel, max_total_threads_per_threadgroup(128)]] void experts_many_up(
    const device SEEN* x [[buffer(0)]],  // (tokens, N), rounded
    const device int* order [[buffer(1)]],
    const device int4* tiles [[buffer(2)]],
    const device uchar* w13 [[buffer(3)]],
    const device uchar* w13_scale [[buffer(4)]],
    const device float* w13_global [[buffer(5)]],
    const device TYPE* bias13 [[buffer(6)]],
    const device float* x_global [[buffer(7)]],
    const device float* h_global [[buffer(8)]],
    device SEEN* h [[buffer(9)]],
    constant ExpertShape& shape [[buffer(10)]],
    constant float& alpha [[buffer(11)]],
    constant float& limit [[buffer(12)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup SEEN tile_x[TILE_TOKENS * STEP_X];
  threadgroup uint4 tile_w[TILE_ROWS * STEP_W];
  const WorkTile work = work_tile(tiles[group.y]);
  if (work.count == 0) {
    return;
  }
  const Lane at = fragment_lane(lane);
  const int thread_index = int(simd * 32 + lane), features = int(shape.features);
  const int feature0 = int(group.x) * TILE_FEATURES, choices = int(shape.choices);
  const Matrix m = matrix_of(w13, w13_scale, shape.up, work.expert, int(shape.hidden));
  // Of the rows of a simdgroup the first half are gates, the others the ups of the same features.
  const int mine = min(feature0 + int(simd) * SIMD_FEATURES + int(lane) % SIMD_FEATURES, features - 1);
  const bool is_up = int(lane) >= SIMD_FEATURES;
  const MatrixRow weight_row = row_of(m, is_up ? up_row(mine, features) : gate_row(mine, features));
  const int row = thread_index / TOKEN_THREADS;
  const device SEEN* token = nullptr;
  if (row < work.count) {
    token = x + order[work.first + row] / choices * (ACT == 0 ? shape.x_step : shape.hidden);
  }
  const Sums sums = tile_products(m, weight_row, token, tile_x, tile_w, thread_index, at);

  const float act_global = shape.up.has_act_global != 0 ? x_global[0] : 1.0f;
  const float global = shape.up.has_global != 0 ? w13_global[work.expert] : 1.0f;
  const float slope = alpha, bound = limit;
#if ACT != 0
  // Features to round lie where weights were, once all of these have been multiplied.
  threadgroup float* tile_h = reinterpret_cast<threadgroup float*>(tile_w);
  threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
  ATTNKIT_UNROLL
  for (int b = 0; b < ROW_BLOCKS / 2; b++) {
    const int f = int(simd) * SIMD_FEATURES + b * 8 + at.col;  // and the next
    float2 gate_bias = float2(0.0f), up_bias = float2(0.0f);
    if (shape.up.bias >= 0) {
      ATTNKIT_UNROLL
      for (int i = 0; i < 2; i++) {
        const int feature = min(feature0 + f + i, features - 1);
        gate_bias[i] = float(bias13[work.expert * shape.up.bias + gate_row(feature, features)]);
        up_bias[i] = float(bias13[work.expert * shape.up.bias + up_row(feature, features)]);
      }
    }
    ATTNKIT_UNROLL
    for (int a = 0; a < TOKEN_BLOCKS; a++) {
      const int t = a * 8 + at.row;
      const float2 gate = sums.of[a][b], up = sums.of[a][b + ROW_BLOCKS / 2];
      float2 made;
      ATTNKIT_UNROLL
      for (int i = 0; i < 2; i++) {
        const float g = divided(gate[i], global, act_global) + gate_bias[i];
        made[i] = swiglu(g, divided(up[i], global, act_global) + up_bias[i], slope, bound);
      }
#if ACT == 0
      if (t < work.count && feature0 + f < features) {
        vec<SEEN, 2> stored;
        stored[0] = SEEN(made[0]);
        stored[1] = SEEN(made[1]);
        *reinterpret_cast<device vec<SEEN, 2>*>(h + order[work.first + t] * shape.features + feature0 + f) = stored;
      }
#else
      tile_h[t * TILE_FEATURES + f] = feature0 + f < features ? made[0] : 0.0f;
      tile_h[t * TILE_FEATURES + f + 1] = feature0 + f < features ? made[1] : 0.0f;
#endif
    }
  }
#if ACT != 0
  // Lanes have the features of a token, which are rounded together.
  const float divisor = shape.down.has_act_global != 0 ? h_global[0] : 1.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = thread_index; i < TILE_TOKENS * TILE_FEATURES; i += THREADS) {
    const int t = i / TILE_FEATURES, feature = feature0 + i % TILE_FEATURES;
    const float value = rounded(tile_h[i], divisor);
    if (t < work.count && feature < features) {
      h[order[work.first + t] * shape.features + feature] = SEEN(value);
    }
  }
#endif
}

[[kernel, max_total_threads_per_threadgroup(128)]] void experts_many_down(
    const device SEEN* h [[buffer(0)]],
    const device int* order [[buffer(1)]],
    const device int4* tiles [[buffer(2)]],
    const device float* weights [[buffer(3)]],
    const device uchar* w2 [[buffer(4)]],
    const device uchar* w2_scale [[buffer(5)]],
    const device float* w2_global [[buffer(6)]],
    const device TYPE* bias2 [[buffer(7)]],
    const device float* h_global [[buffer(8)]],
    device float* parts [[buffer(9)]],
    constant ExpertShape& shape [[buffer(10)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup SEEN tile_x[TILE_TOKENS * STEP_X];
  threadgroup uint4 tile_w[TILE_ROWS * STEP_W];
  const int thread_index = int(simd * 32 + lane), hidden = int(shape.hidden), choices = int(shape.choices);
  const WorkTile work = work_tile(tiles[group.y]);
  if (work.count == 0) {
    return;
  }
  const Lane at = fragment_lane(lane);
  const int row0 = int(group.x) * TILE_ROWS;
  const Matrix m = matrix_of(w2, w2_scale, shape.down, work.expert, int(shape.features));
  const MatrixRow weight_row = row_of(m, min(row0 + thread_index, hidden - 1));
  const int row = thread_index / TOKEN_THREADS;
  const device SEEN* token = row < work.count ? h + order[work.first + row] * shape.features : nullptr;
  const Sums sums = tile_products(m, weight_row, token, tile_x, tile_w, thread_index, at);

  const float act_global = shape.down.has_act_global != 0 ? h_global[0] : 1.0f;
  const float global = shape.down.has_global != 0 ? w2_global[work.expert] : 1.0f;
  ATTNKIT_UNROLL
  for (int a = 0; a < TOKEN_BLOCKS; a++) {
    const int t = a * 8 + at.row;
    if (t < work.count) {
      const int slot = order[work.first + t];
      const float weight = weights[slot / choices * shape.weight_step + slot % choices];
      ATTNKIT_UNROLL
      for (int b = 0; b < ROW_BLOCKS; b++) {
        const int n = row0 + int(simd) * SIMD_ROWS + b * 8 + at.col;
        if (n < hidden) {
          float2 y;
          ATTNKIT_UNROLL
          for (int i = 0; i < 2; i++) {
            y[i] = divided(sums.of[a][b][i], global, act_global);
            if (shape.down.bias >= 0) {
              y[i] += float(bias2[work.expert * shape.down.bias + n + i]);
            }
          }
          *reinterpret_cast<device float2*>(parts + slot * shape.hidden + n) = y * weight;
        }
      }
    }
  }
}
