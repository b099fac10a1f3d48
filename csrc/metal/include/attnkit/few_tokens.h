// Routed experts of few tokens, bound by the bytes of weights: experts_few_up, experts_few_down.
//
// A threadgroup multiplies a tile of an expert's rows with all tokens that chose it, up to TOKENS at once: a block of
// codes is read and decoded once for these. The threadgroup of the first slot of an expert does so, those of its other
// slots have nothing to do; every threadgroup looks through the slots itself. A simdgroup takes 4 rows at a time, a lane
// 32 numbers of each in a step: 16 bytes of codes. Tokens lie in threadgroup memory in the order in which lanes read
// them, STAGE numbers of each.
//
//   experts_few_up     h[slot] = swiglu(w13 x), rounded as activations says   UP_PASSES * SIMDS * 2 features
//   experts_few_down   parts[slot] = weight * (w2 h + bias)                   DOWN_PASSES * SIMDS * 4 rows
//
// Grid: x tiles of features or rows, y slots (at most MOST_SLOTS); SIMDS simdgroups in a threadgroup, no other number.
//
// Defined by the host: TOKENS (1, 2 or 4), STAGE (a multiple of 1024), SIMDS, UP_PASSES (FEATURES must be a multiple of
// 32), DOWN_PASSES, MOST_SLOTS and what attnkit/experts.h needs.

constant constexpr int THREADS = 32 * SIMDS;
constant constexpr int ROWS = 4;  // of a simdgroup at a time
constant constexpr int STEP = 32 * 32;  // numbers of a row that a simdgroup takes in a step
constant constexpr int FEATURES = UP_PASSES * SIMDS * ROWS / 2;  // of a tile of experts_few_up
constant constexpr int DOWN_ROWS = DOWN_PASSES * SIMDS * ROWS;
constant constexpr int MOST_ROWS = 2 * FEATURES > DOWN_ROWS ? 2 * FEATURES : DOWN_ROWS;

// The slots of an expert, in threadgroup memory, where their number follows the last that there may be.
struct Members {
  threadgroup int* slots;
  int count;  // 0: another threadgroup has them
  int expert;
};

inline Members members_of(
    const device INDEX* indices,
    constant ExpertShape& shape,
    threadgroup int* slots,
    int slot,
    int simd,
    int lane) {
  Members members;
  members.slots = slots;
  members.expert = expert_of(indices, shape, slot);
  members.count = 0;
  if (members.expert < 0) {
    return members;
  }
  if (simd == 0) {
    const int all = int(shape.tokens * shape.choices);
    int before = 0, count = 0;
    for (int first = 0; first < all; first += 32) {
      const int other = first + lane;
      const int same = other < all && expert_of(indices, shape, min(other, all - 1)) == members.expert ? 1 : 0;
      const int rank = count + simd_prefix_exclusive_sum(same);
      if (same != 0) {
        slots[rank] = other;
      }
      before += same != 0 && other < slot ? 1 : 0;
      count += simd_sum(same);
    }
    before = simd_sum(before);
    if (lane == 0) {
      slots[MOST_SLOTS] = before == 0 ? count : 0;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  members.count = slots[MOST_SLOTS];
  return members;
}

// The rows of a matrix that a tile has. Gate and up of a feature are neighbours in a tile.
struct TileRows {
  int first;
  int last;  // the matrix ends there; what lies behind is computed from it and thrown away
  int halves;  // rows from the gates to the ups, 0 where rows of a tile are neighbours in the matrix
};

inline int matrix_row(thread const TileRows& rows, int row) {
  if (rows.halves == 0) {
    return min(rows.first + row, rows.last);
  }
  return min(rows.first + row / 2, rows.halves - 1) + row % 2 * rows.halves;
}

// Where number i of a stage lies: the lanes of a step read 4 numbers at a time, one lane's behind the other's.
inline int staged_at(int i) {
  return i / STEP * STEP + (i % 32 / 4 * 32 + i % STEP / 32) * 4 + i % 4;
}

template <typename In, bool ROUND>
inline void stage_token(
    const device In* from, threadgroup SEEN* tile, int count, float global, int thread_index) {
  const int padded = (count + 31) / 32 * 32;
  for (int i = thread_index; i < padded; i += THREADS) {
    float x = i < count ? float(from[i]) : 0.0f;
    if (ROUND) {
      x = rounded(x, global);
    }
    tile[staged_at(i)] = SEEN(x);
  }
}

// sum[r][t] += rows times tokens, over a lane's blocks of a stage. Where there are four sums for three ``staged`` tokens,
// the last is a copy.
template <int COUNT>
inline void multiply_rows(
    thread float (&sum)[ROWS][COUNT],
    thread const Matrix& m,
    thread const MatrixRow (&row)[ROWS],
    const threadgroup SEEN* tile,
    int staged,
    int first,
    int count,
    int lane) {
  typedef vec<SEEN, 4> Vector;
  for (int i = lane * 32; i < count; i += STEP) {
    uint4 codes[ROWS];
    Factor factors[ROWS][32 / BLOCK];
    ATTNKIT_UNROLL
    for (int r = 0; r < ROWS; r++) {
      codes[r] = read_codes(m, row[r].codes, first + i);
      ATTNKIT_UNROLL
      for (int b = 0; b < 32 / BLOCK; b++) {
        const bool there = b == 0 || first + i + BLOCK < m.columns;
        factors[r][b] = factor_of(there ? scale_byte(m, row[r], (first + i) / BLOCK + b) : 0u);
      }
    }
    const threadgroup SEEN* x = tile + i / STEP * STEP + lane * 4;
    ATTNKIT_UNROLL
    for (int b = 0; b < 32 / BLOCK; b++) {
      float part[ROWS][COUNT];
      ATTNKIT_UNROLL
      for (int w = 0; w < BLOCK / 8; w++) {
        const int word = b * (BLOCK / 8) + w;
        float low[COUNT][4], high[COUNT][4];
        ATTNKIT_UNROLL
        for (int t = 0; t < COUNT; t++) {
          const threadgroup SEEN* from = x + (COUNT < 3 ? t : min(t, staged - 1)) * STAGE + word * 256;
          const Vector a = *reinterpret_cast<const threadgroup Vector*>(from);
          const Vector c = *reinterpret_cast<const threadgroup Vector*>(from + 128);
          ATTNKIT_UNROLL
          for (int j = 0; j < 4; j++) {
            low[t][j] = float(a[j]);
            high[t][j] = float(c[j]);
          }
        }
        ATTNKIT_UNROLL
        for (int r = 0; r < ROWS; r++) {
          const Codes8 numbers = decode(codes[r][word]);
          ATTNKIT_UNROLL
          for (int t = 0; t < COUNT; t++) {
            float p = w == 0 ? 0.0f : part[r][t];
            ATTNKIT_UNROLL
            for (int j = 0; j < 4; j++) {
              p = fma(float(numbers.pairs[j].x), low[t][j], p);
              p = fma(float(numbers.pairs[j].y), high[t][j], p);
            }
            part[r][t] = p;
          }
        }
      }
      ATTNKIT_UNROLL
      for (int r = 0; r < ROWS; r++) {
        ATTNKIT_UNROLL
        for (int t = 0; t < COUNT; t++) {
          sum[r][t] += scaled(part[r][t], factors[r][b]);
        }
      }
    }
  }
}

// sums[row * COUNT + t] of a tile of rows: products with the tokens of up to COUNT slots from ``member`` on. A token is a
// row of ``from``, one for every ``shared`` slots.
template <typename In, bool ROUND, int COUNT, int PASSES>
inline void tile_products(
    const device In* from,
    long step,
    int shared,
    thread const Members& members,
    int member,
    thread const Matrix& m,
    thread const TileRows& rows,
    float global,
    threadgroup SEEN* tile,
    threadgroup float* sums,
    int thread_index) {
  const int lane = thread_index % 32, simd = thread_index / 32, staged = min(COUNT, members.count - member);
  for (int first = 0; first == 0 || first < m.columns; first += STAGE) {
    const int count = min(STAGE, m.columns - first);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the last stage has been used
    for (int t = 0; t < staged; t++) {
      const int slot = members.slots[member + t];
      stage_token<In, ROUND>(from + slot / shared * step + first, tile + t * STAGE, count, global, thread_index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int pass = 0; pass < PASSES; pass++) {
      const int row0 = (pass * SIMDS + simd) * ROWS;
      MatrixRow row[ROWS];
      float sum[ROWS][COUNT];
      ATTNKIT_UNROLL
      for (int r = 0; r < ROWS; r++) {
        row[r] = row_of(m, matrix_row(rows, row0 + r));
        ATTNKIT_UNROLL
        for (int t = 0; t < COUNT; t++) {
          sum[r][t] = 0.0f;
        }
      }
      multiply_rows<COUNT>(sum, m, row, tile, staged, first, count, lane);
      float mine = 0.0f;
      ATTNKIT_UNROLL
      for (int i = 0; i < ROWS * COUNT; i++) {
        const float total = simd_sum(sum[i / COUNT][i % COUNT]);
        mine = lane == i ? total : mine;
      }
      if (lane < ROWS * COUNT) {
        sums[row0 * COUNT + lane] = first == 0 ? mine : sums[row0 * COUNT + lane] + mine;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The tensors of the up product.
struct UpTensors {
  const device TYPE* x;
  const device float* global;
  const device TYPE* bias;
  const device float* x_global;
  const device float* h_global;
  device SEEN* h;
};

template <int COUNT>
inline void few_up(
    thread const UpTensors& of,
    constant ExpertShape& shape,
    thread const Members& members,
    int member,
    thread const Matrix& m,
    float alpha,
    float limit,
    int feature0,
    threadgroup SEEN* tile,
    threadgroup float* sums,
    int thread_index) {
  const int features = int(shape.features), e = members.expert;
  TileRows rows;
  rows.first = INTERLEAVED ? 2 * feature0 : feature0;
  rows.last = 2 * features - 1;
  rows.halves = INTERLEAVED ? 0 : features;
  const float x_global = shape.up.has_act_global != 0 ? of.x_global[0] : 1.0f;
  const float h_global = shape.down.has_act_global != 0 ? of.h_global[0] : 1.0f;
  const float global = shape.up.has_global != 0 ? of.global[e] : 1.0f;
  tile_products<TYPE, ACT != 0, COUNT, UP_PASSES>(
      of.x, shape.x_step, int(shape.choices), members, member, m, rows, x_global, tile, sums, thread_index);
  // Lanes have neighbouring features, which are rounded together.
  for (int i = thread_index; i < FEATURES * COUNT; i += THREADS) {
    const int t = i / FEATURES, f = i % FEATURES, feature = feature0 + f;
    const bool live = feature < features && member + t < members.count;
    float h = 0.0f;
    if (live) {
      float gate = divided(sums[2 * f * COUNT + t], global, x_global);
      float up = divided(sums[(2 * f + 1) * COUNT + t], global, x_global);
      if (shape.up.bias >= 0) {
        gate += float(of.bias[e * shape.up.bias + gate_row(feature, features)]);
        up += float(of.bias[e * shape.up.bias + up_row(feature, features)]);
      }
      h = swiglu(gate, up, alpha, limit);
    }
    if (ACT != 0) {
      h = rounded(h, h_global);
    }
    if (live) {
      of.h[members.slots[member + t] * shape.features + feature] = SEEN(h);
    }
  }
}

[[kernel, max_total_threads_per_threadgroup(32 * SIMDS)]] void experts_few_up(
    const device TYPE* x [[buffer(0)]],
    const device INDEX* indices [[buffer(1)]],
    const device uchar* w13 [[buffer(2)]],
    const device uchar* w13_scale [[buffer(3)]],
    const device float* w13_global [[buffer(4)]],
    const device TYPE* bias13 [[buffer(5)]],
    const device float* x_global [[buffer(6)]],
    const device float* h_global [[buffer(7)]],
    device SEEN* h [[buffer(8)]],
    constant ExpertShape& shape [[buffer(9)]],
    constant float& alpha [[buffer(10)]],
    constant float& limit [[buffer(11)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup SEEN tile[TOKENS * STAGE];
  threadgroup float sums[MOST_ROWS * TOKENS];
  threadgroup int slots[MOST_SLOTS + 1];
  const Members members = members_of(indices, shape, slots, int(group.y), int(simd), int(lane));
  const int feature0 = int(group.x) * FEATURES, thread_index = int(simd * 32 + lane);
  const Matrix m = matrix_of(w13, w13_scale, shape.up, max(members.expert, 0), int(shape.hidden));
  UpTensors of;
  of.x = x;
  of.global = w13_global;
  of.bias = bias13;
  of.x_global = x_global;
  of.h_global = h_global;
  of.h = h;
  const float slope = alpha, bound = limit;
  for (int member = 0; member < members.count; member += TOKENS) {
    const int count = min(TOKENS, members.count - member);
    if (count == 1) {
      few_up<1>(of, shape, members, member, m, slope, bound, feature0, tile, sums, thread_index);
    }
#if TOKENS >= 2
    else if (count == 2) {
      few_up<2>(of, shape, members, member, m, slope, bound, feature0, tile, sums, thread_index);
    }
#endif
#if TOKENS >= 4
    else {
      few_up<4>(of, shape, members, member, m, slope, bound, feature0, tile, sums, thread_index);
    }
#endif
  }
}

// The tensors of the down product.
struct DownTensors {
  const device SEEN* h;
  const device float* weights;
  const device float* global;
  const device TYPE* bias;
  const device float* h_global;
  device float* parts;
};

template <int COUNT>
inline void few_down(
    thread const DownTensors& of,
    constant ExpertShape& shape,
    thread const Members& members,
    int member,
    thread const Matrix& m,
    int row0,
    threadgroup SEEN* tile,
    threadgroup float* sums,
    int thread_index) {
  const int hidden = int(shape.hidden), choices = int(shape.choices), e = members.expert;
  TileRows rows;
  rows.first = row0;
  rows.last = hidden - 1;
  rows.halves = 0;
  const float h_global = shape.down.has_act_global != 0 ? of.h_global[0] : 1.0f;
  const float global = shape.down.has_global != 0 ? of.global[e] : 1.0f;
  tile_products<SEEN, false, COUNT, DOWN_PASSES>(
      of.h, shape.features, 1, members, member, m, rows, h_global, tile, sums, thread_index);
  for (int i = thread_index; i < DOWN_ROWS * COUNT; i += THREADS) {
    const int t = i / DOWN_ROWS, r = i % DOWN_ROWS, n = row0 + r;
    if (n < hidden && member + t < members.count) {
      const int slot = members.slots[member + t];
      float y = divided(sums[r * COUNT + t], global, h_global);
      if (shape.down.bias >= 0) {
        y += float(of.bias[e * shape.down.bias + n]);
      }
      of.parts[slot * shape.hidden + n] = y * of.weights[slot / choices * shape.weight_step + slot % choices];
    }
  }
}

[[kernel, max_total_threads_per_threadgroup(32 * SIMDS)]] void experts_few_down(
    const device SEEN* h [[buffer(0)]],
    const device float* weights [[buffer(1)]],
    const device INDEX* indices [[buffer(2)]],
    const device uchar* w2 [[buffer(3)]],
    const device uchar* w2_scale [[buffer(4)]],
    const device float* w2_global [[buffer(5)]],
    const device TYPE* bias2 [[buffer(6)]],
    const device float* h_global [[buffer(7)]],
    device float* parts [[buffer(8)]],
    constant ExpertShape& shape [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup SEEN tile[TOKENS * STAGE];
  threadgroup float sums[MOST_ROWS * TOKENS];
  threadgroup int slots[MOST_SLOTS + 1];
  const Members members = members_of(indices, shape, slots, int(group.y), int(simd), int(lane));
  const int row0 = int(group.x) * DOWN_ROWS, thread_index = int(simd * 32 + lane);
  const Matrix m = matrix_of(w2, w2_scale, shape.down, max(members.expert, 0), int(shape.features));
  DownTensors of;
  of.h = h;
  of.weights = weights;
  of.global = w2_global;
  of.bias = bias2;
  of.h_global = h_global;
  of.parts = parts;
  for (int member = 0; member < members.count; member += TOKENS) {
    const int count = min(TOKENS, members.count - member);
    if (count == 1) {
      few_down<1>(of, shape, members, member, m, row0, tile, sums, thread_index);
    }
#if TOKENS >= 2
    else if (count == 2) {
      few_down<2>(of, shape, members, member, m, row0, tile, sums, thread_index);
    }
#endif
#if TOKENS >= 4
    else {
      few_down<4>(of, shape, members, member, m, row0, tile, sums, thread_index);
    }
#endif
  }
}
