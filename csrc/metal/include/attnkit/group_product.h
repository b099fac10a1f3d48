// Products of groups, out[t, g, n] = sum_k x[t, g, k] w[g, n, k], in group_products.
//
//   out' (n, tokens) = W X'
//
// A simdgroup has 8 * ROWS rows of W, which it reads from memory as fragments, so each is read once for the tokens of a
// threadgroup. These, 8 * COLUMNS of them, come to threadgroup memory CHUNK numbers at a time, a chunk ahead of the
// products, in the order in which lanes will read them. A lane reads RUN neighbouring numbers of a row at once; K is
// permuted by this, on both sides alike.
//
// FP4 numbers are decoded eight at a time: codes are moved to the sign, the lowest exponent bits and the highest bit of
// the significand of halves, which stand for 2^-14 times their numbers (the way of gpt-oss' Metal kernels, in words of
// 32 bits). Halves on the way may be subnormal, which Apple's GPUs keep.
//
// Grid: x blocks of SIMDS * 8 * ROWS rows of W, y groups, z blocks of 8 * COLUMNS tokens; SIMDS simdgroups in a
// threadgroup, no other number.
//
// Defined by the host: FORMAT (0 none, 1 nvfp4, 2 mxfp4), TYPE (that holds the numbers of x exactly; without a format
// that of x and w), OUT_TYPE, ROWS, COLUMNS, SIMDS, WIDTH, SWIZZLED (scales in the 128x4 layout), X_DIVIDED, W_DIVIDED.
// WIDTH 4 needs K, steps and offsets to be multiples of 4 elements.

#if FORMAT == 0
typedef TYPE Stored;
constant constexpr int RUN = 4;
#else
typedef uchar Stored;
constant constexpr int RUN = 8;
#endif
constant constexpr int CHUNK = 128;
constant constexpr int FRAGMENTS = CHUNK / 8;
constant constexpr int TOKENS = 8 * COLUMNS;
constant constexpr int OWN_ROWS = 8 * ROWS;  // of a simdgroup
constant constexpr int THREADS = 32 * SIMDS;
constant constexpr int TILE = TOKENS * CHUNK;
constant constexpr int BLOCK = FORMAT == 1 ? 16 : 32;  // numbers under one scale

struct ProductShape {
  long tokens;
  long groups;
  long k;
  long n;
  long x_token;  // elements; bytes of FP4 numbers
  long x_group;
  long w_group;
  long w_row;
  long x_scale_token;  // of the 128x4 layout only the groups' are looked at
  long x_scale_group;
  long w_scale_group;
  long w_scale_row;
};

// A row of x or of w, or none.
struct Numbers {
  const device Stored* at;
  const device uchar* scales;  // of its group, in the 128x4 layout
  int row;
  bool live;
};

// Where the numbers of a run go: number i is a column of this fragment, of 4 * RUN / 8 that lanes fill with it ...
inline int fragment_of(int i) {
  return FORMAT == 0 ? i / 2 : i % 4;
}

// ... and of the two columns that a lane has this one.
inline int side_of(int i) {
  return FORMAT == 0 ? i % 2 : i / 4;
}

struct NumberRun {
  float2 of[RUN / 2];  // by fragment
};

#if FORMAT != 0
inline uint scale_at(thread const Numbers& from, int block, int blocks) {
#if SWIZZLED
  const int tile = from.row / 128 * ((blocks + 3) / 4) + block / 4;
  return from.scales[long(tile) * 512 + from.row % 32 * 16 + from.row % 128 / 32 * 4 + block % 4];
#else
  return from.scales[block];
#endif
}

inline NumberRun decoded(uint word, uint scale) {
  const uint even = (((word << 1) & 0x1e1e1e1eu) + 0x70707070u) & 0x8e8e8e8eu;
  const uint odd = (((word >> 3) & 0x1e1e1e1eu) + 0x70707070u) & 0x8e8e8e8eu;
  const half2 halves[4] = {
      as_type<half2>((even << 8) & 0xff00ff00u),
      as_type<half2>((odd << 8) & 0xff00ff00u),
      as_type<half2>(even & 0xff00ff00u),
      as_type<half2>(odd & 0xff00ff00u),
  };
#if FORMAT == 1
  const float2 factors = float2(0x1p14f, e4m3_number(scale));
#else
  const float2 powers = powers_of(scale), factors = float2(0x1p14f * powers.x, powers.y);
#endif
  NumberRun run;
  ATTNKIT_UNROLL
  for (int f = 0; f < 4; f++) {
    run.of[f] = float2(float(halves[f].x), float(halves[f].y)) * factors.x * factors.y;
  }
  return run;
}
#endif

// Numbers k to k + RUN - 1 of a row; zeros behind its end, which lies at a multiple of RUN or, of numbers, anywhere.
inline NumberRun read_run(thread const Numbers& from, int k, int length) {
  NumberRun run;
  ATTNKIT_UNROLL
  for (int f = 0; f < RUN / 2; f++) {
    run.of[f] = float2(0.0f);
  }
  if (!from.live || k >= length) {
    return run;
  }
#if FORMAT != 0
  return decoded(read_word(from.at + k / 2), scale_at(from, k / BLOCK, length / BLOCK));
#elif WIDTH == 4
  float4 x;
  read(from.at + k, x);
  run.of[0] = x.xy;
  run.of[1] = x.zw;
#else
  ATTNKIT_UNROLL
  for (int i = 0; i < RUN; i++) {
    run.of[i / 2][i % 2] = k + i < length ? float(from.at[k + i]) : 0.0f;
  }
#endif
  return run;
}

struct Member {
  Lane at;  // its place in fragments
  int lane;
  int simd;

  int index() const {
    return simd * 32 + lane;
  }
};

struct Tokens {
  const device Stored* x;
  const device uchar* scales;
  int group;
  int first;
};

inline Numbers token_row(thread const Tokens& from, constant ProductShape& shape, int token) {
  const int t = from.first + token;
  const bool live = t < int(shape.tokens);
  Numbers row = {from.x, from.scales, t, live};
  if (live) {
    row.at += t * shape.x_token + from.group * shape.x_group;
    row.scales += from.group * shape.x_scale_group + (SWIZZLED ? 0 : t * shape.x_scale_token);
  }
  return row;
}

// A chunk of all tokens to threadgroup memory: (COLUMNS, FRAGMENTS, 8 numbers, 8 tokens).
inline void stage(
    thread const Tokens& from, threadgroup TYPE* to, constant ProductShape& shape, int k0, thread const Member& me) {
  for (int i = me.index() * RUN; i < TILE; i += THREADS * RUN) {
    const int token = i / CHUNK, k = i % CHUNK;
    const NumberRun run = read_run(token_row(from, shape, token), k0 + k, int(shape.k));
    const int fragment = token / 8 * FRAGMENTS + k / (4 * RUN) * (RUN / 2);
    threadgroup TYPE* place = to + fragment * 64 + k % (4 * RUN) / RUN * 16 + token % 8;
    ATTNKIT_UNROLL
    for (int n = 0; n < RUN; n++) {
      place[fragment_of(n) * 64 + side_of(n) * 8] = TYPE(run.of[fragment_of(n)][side_of(n)]);
    }
  }
}

struct Sums {
  float2 of[ROWS][COLUMNS];  // of row 8 * r + row, and tokens 8 * c + col and the next
};

struct WeightRows {
  Numbers of[ROWS];
};

inline void multiply(
    thread Sums& sums,
    thread const WeightRows& weights,
    const threadgroup TYPE* staged,
    int k0,
    int length,
    Lane at) {
  ATTNKIT_UNROLL
  for (int k = 0; k < CHUNK; k += 4 * RUN) {
    NumberRun w[ROWS];
    ATTNKIT_UNROLL
    for (int r = 0; r < ROWS; r++) {
      w[r] = read_run(weights.of[r], k0 + k + at.col / 2 * RUN, length);
    }
    ATTNKIT_UNROLL
    for (int f = 0; f < RUN / 2; f++) {
      ATTNKIT_UNROLL
      for (int c = 0; c < COLUMNS; c++) {
        const int fragment = c * FRAGMENTS + k / 8 + f;
        const vec<TYPE, 2> x =
            *reinterpret_cast<const threadgroup vec<TYPE, 2>*>(staged + fragment * 64 + at.row * 8 + at.col);
        const float2 numbers = float2(float(x[0]), float(x[1]));
        ATTNKIT_UNROLL
        for (int r = 0; r < ROWS; r++) {
          multiply_add(sums.of[r][c], w[r].of[f], numbers);
        }
      }
    }
  }
}

[[kernel, max_total_threads_per_threadgroup(32 * SIMDS)]] void group_products(
    const device Stored* x [[buffer(0)]],  // (T, G, K)
    const device Stored* w [[buffer(1)]],  // (G, N, K)
    const device uchar* x_scale [[buffer(2)]],  // (T, G, K / BLOCK), or each group's in the 128x4 layout
    const device uchar* w_scale [[buffer(3)]],
    const device float* x_divisor [[buffer(4)]],  // ()
    const device float* w_divisor [[buffer(5)]],
    device OUT_TYPE* out [[buffer(6)]],  // (T, G, N)
    constant ProductShape& shape [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup TYPE staged[2 * TILE];
  const Member me = {fragment_lane(lane), int(lane), int(simd)};
  const int g = int(group.y), length = int(shape.k), n_end = int(shape.n);
  const Tokens tokens = {x, x_scale, g, int(group.z) * TOKENS};
  const int n0 = (int(group.x) * SIMDS + me.simd) * OWN_ROWS + me.at.row;
  WeightRows weights;
  Sums sums;
  ATTNKIT_UNROLL
  for (int r = 0; r < ROWS; r++) {
    const int n = n0 + 8 * r;
    const bool live = n < n_end;
    weights.of[r] = {w + g * shape.w_group, w_scale + g * shape.w_scale_group, n, live};
    if (live) {
      weights.of[r].at += n * shape.w_row;
      weights.of[r].scales += SWIZZLED ? 0 : n * shape.w_scale_row;
    }
    ATTNKIT_UNROLL
    for (int c = 0; c < COLUMNS; c++) {
      sums.of[r][c] = float2(0.0f);
    }
  }

  stage(tokens, staged, shape, 0, me);
  for (int k0 = 0, turn = 0; k0 < length; k0 += CHUNK, turn = 1 - turn) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // this buffer is full, and the other has been used
    if (k0 + CHUNK < length) {
      stage(tokens, staged + (1 - turn) * TILE, shape, k0 + CHUNK, me);
    }
    multiply(sums, weights, staged + turn * TILE, k0, length, me.at);
  }

  ATTNKIT_UNROLL
  for (int r = 0; r < ROWS; r++) {
    ATTNKIT_UNROLL
    for (int c = 0; c < COLUMNS; c++) {
      ATTNKIT_UNROLL
      for (int e = 0; e < 2; e++) {
        const int t = tokens.first + 8 * c + me.at.col + e, n = n0 + 8 * r;
        if (t < int(shape.tokens) && n < n_end) {
          float sum = sums.of[r][c][e];
#if X_DIVIDED
          sum /= x_divisor[0];
#endif
#if W_DIVIDED
          sum /= w_divisor[0];
#endif
          out[(t * shape.groups + g) * shape.n + n] = OUT_TYPE(sum);
        }
      }
    }
  }
}
