// The query rows of a simdgroup: what decode and prefill keep of them, and the steps of the online softmax they share.
//
// A simdgroup has 8 * TILES rows and works on transposed products, S' = K Q' and O' = V' S', in fragments of 8x8. Of
// tile n a lane holds the rows 8 * n + col and 8 * n + col + 1, its two columns (attnkit/fragment.h).
//
// The rows of one KV head are its T queries times the query heads that share it: row r is head r % heads of query
// r / heads.
//
// Defined by the host: DIM, DIM_V (multiples of 16), TILES.

constant constexpr int RUN = DIM_V % 32 == 0 ? 4 : 2;  // neighbouring dims of V that a lane reads
constant constexpr int PARTS_Q = DIM / 8;
constant constexpr int PARTS_O = DIM_V / 8;

// From one to the next, in elements. The host passes these, too, as longs in this order.
struct Steps {
  long q_batch;
  long q_token;
  long q_head;
  long k_batch;  // of a page, where the cache has pages
  long k_head;
  long k_key;
  long v_batch;
  long v_head;
  long v_key;
};

// One sequence as the rows of a KV head see it. The queries are its last keys, unless it has more of them than keys.
struct Sequence {
  int queries;
  int heads;  // query heads of a KV head
  int rows;  // queries * heads
  int position0;  // of query 0
  int first;  // its keys are [first, end)
  int end;
  bool in_cache;  // the queries are keys of it: one at a negative position sees nothing
  Masks masks;

  Visible row(int r) const {
    const int position = position0 + r / heads;
    return visible(position, first, r < rows && (!in_cache || position >= 0) ? end : 0, masks);
  }

  Visible at_position(int position) const {
    return visible(position, first, end, masks);
  }
};

// What each of a lane's rows sees.
struct RowMasks {
  Visible of[TILES][2];
};

inline RowMasks row_masks(thread const Sequence& sequence, int row0, Lane at) {
  RowMasks sees;
  ATTNKIT_UNROLL
  for (int n = 0; n < TILES; n++) {
    ATTNKIT_UNROLL
    for (int e = 0; e < 2; e++) {
      sees.of[n][e] = sequence.row(row0 + n * 8 + at.col + e);
    }
  }
  return sees;
}

// Which dim a lane holds in fragment ``part`` of Q'. DIM is permuted so that the lane that holds columns c, c + 1 of
// two neighbouring fragments of K reads four neighbouring elements.
inline int dim_of_part(int part, Lane at) {
  return (part / 2) * 16 + (at.row / 2) * 4 + (part % 2) * 2 + at.row % 2;
}

// S' of BLOCKS * 8 keys: scores, and then their weights.
template <int BLOCKS>
struct ScoreTile {
  float2 of[BLOCKS][TILES];
};

// The online softmax of the rows. A row that has seen no key has row_max -inf and row_sum 0.
struct RowState {
  float2 row_max[TILES];
  float2 row_sum[TILES];  // of the keys that this lane holds: the lanes of a row are joined at the end
  float2 o[TILES][PARTS_O];  // O', to be divided by the whole row_sum
};

inline void clear(thread RowState& rows) {
  ATTNKIT_UNROLL
  for (int n = 0; n < TILES; n++) {
    rows.row_max[n] = float2(-INFINITY);
    rows.row_sum[n] = float2(0.0f);
    ATTNKIT_UNROLL
    for (int part = 0; part < PARTS_O; part++) {
      rows.o[n][part] = float2(0.0f);
    }
  }
}

template <int BLOCKS>
inline void clear(thread ScoreTile<BLOCKS>& s) {
  ATTNKIT_UNROLL
  for (int c = 0; c < BLOCKS * TILES; c++) {
    s.of[c / TILES][c % TILES] = float2(0.0f);
  }
}

// Products of tile n become scores, -inf where a row does not see the key. Key i0 + i of the walk is row i of S', those
// from ``end`` on are not there; ``masked`` is false where nothing is to be hidden. Gives each row's maximum in a lane.
template <int BLOCKS>
inline float2 score(
    thread ScoreTile<BLOCKS>& s,
    int n,
    thread const RowMasks& sees,
    thread const Walk& keys,
    int i0,
    int end,
    bool masked,
    float scale,
    float cap,
    Lane at) {
  float2 row_max = float2(-INFINITY);
  ATTNKIT_UNROLL
  for (int block = 0; block < BLOCKS; block++) {
    s.of[block][n] = scores(s.of[block][n], scale, cap);
    if (masked) {
      const int i = i0 + block * 8 + at.row;
      const int key = keys.key(i);
      ATTNKIT_UNROLL
      for (int e = 0; e < 2; e++) {
        s.of[block][n][e] = i < end && sees.of[n][e].sees(key) ? s.of[block][n][e] : -INFINITY;
      }
    }
    row_max = max(row_max, s.of[block][n]);
  }
  return row_max;
}

// What rows of tile n have added up so far counts ``factor`` from now on.
inline void rescale(thread RowState& rows, int n, float2 factor) {
  rows.row_sum[n] *= factor;
  ATTNKIT_UNROLL
  for (int part = 0; part < PARTS_O; part++) {
    rows.o[n][part] *= factor;
  }
}

// The scores of tile n become weights, exp(s - base), and join the row sums.
template <int BLOCKS>
inline void exponentiate(thread ScoreTile<BLOCKS>& s, thread RowState& rows, int n, float2 base) {
  ATTNKIT_UNROLL
  for (int block = 0; block < BLOCKS; block++) {
    s.of[block][n] = exp(s.of[block][n] - base);
    rows.row_sum[n] += s.of[block][n];
  }
}

// Of the two keys that a lane holds of a block, RUN neighbouring dims of V.
struct ValueRun {
  float of[2][RUN];
};

// O' += V' S' for the keys of a block and a run of 8 * RUN dims from ``d`` on: its fragment f holds dims RUN * row + f.
template <int BLOCKS>
inline void add_values(
    thread RowState& rows, thread const ScoreTile<BLOCKS>& weights, int block, int d, thread const ValueRun& x) {
  ATTNKIT_UNROLL
  for (int f = 0; f < RUN; f++) {
    ATTNKIT_UNROLL
    for (int n = 0; n < TILES; n++) {
      multiply_add(rows.o[n][d / 8 + f], float2(x.of[0][f], x.of[1][f]), weights.of[block][n]);
    }
  }
}
