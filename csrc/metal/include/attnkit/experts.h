// What the products of few and of many tokens share: where the matrices of experts lie, their numbers, SwiGLU, and the
// sum over a token's experts: experts_combine.
//
// A slot is a choice of a token: slot = token * choices + k. An index that names no expert is one of none.
//
// Defined by the host: TYPE, SEEN (what products see of tokens: TYPE, or bfloat, which holds every rounded activation),
// INDEX_BYTES (of an index, 4 or 8), GPTOSS, INTERLEAVED, SCALES (0: linear, 1: 128x4 in rows one after another, 2: further apart),
// CODES (alignment of rows of codes in bytes: 16, 8 or 1), and what attnkit/fp4.h needs.

#if INDEX_BYTES == 8
typedef long INDEX;
#else
typedef int INDEX;
#endif

struct ExpertWeights {
  long expert;  // steps in bytes
  long row;
  long scale_expert;
  long scale_row;
  long scale_columns;
  long bias;  // elements from an expert to the next; negative without biases
  long has_global;
  long has_act_global;
};

struct ExpertShape {
  long tokens;
  long choices;
  long experts;
  long hidden;  // N
  long features;  // M
  long x_step;  // elements
  long weight_step;
  long index_token;
  long index_choice;
  ExpertWeights up;
  ExpertWeights down;
};

// One expert's matrix.
struct Matrix {
  const device uchar* codes;
  const device uchar* scales;
  int columns;
  int row_bytes;
  int scale_row;
  int scale_columns;
};

inline Matrix matrix_of(
    const device uchar* codes, const device uchar* scales, constant ExpertWeights& of, int expert, int columns) {
  Matrix m;
  m.codes = codes + expert * of.expert;
  m.scales = scales + expert * of.scale_expert;
  m.columns = columns;
  m.row_bytes = int(of.row);
  m.scale_row = int(of.scale_row);
  m.scale_columns = int(of.scale_columns);
  return m;
}

struct MatrixRow {
  const device uchar* codes;
  const device uchar* scales;
#if SCALES == 2
  int first;  // place of its first scale among those of the matrix
#endif
};

inline MatrixRow row_of(thread const Matrix& m, int row) {
  MatrixRow r;
  r.codes = m.codes + long(row) * m.row_bytes;
#if SCALES == 0
  r.scales = m.scales + long(row) * m.scale_row;
#else
  // 128 rows x 4 scales are 512 bytes, of which a row has 4.
  const int first = row / 128 * (m.scale_columns / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4;
#if SCALES == 1
  r.scales = m.scales + first;
#else
  r.scales = m.scales;
  r.first = first;
#endif
#endif
  return r;
}

inline uint scale_byte(thread const Matrix& m, thread const MatrixRow& r, int block) {
#if SCALES == 0
  return r.scales[block];
#elif SCALES == 1
  return r.scales[block / 4 * 512 + block % 4];
#else
  const int at = r.first + block / 4 * 512 + block % 4;
  return r.scales[long(at / m.scale_columns) * m.scale_row + at % m.scale_columns];
#endif
}

inline uint2 read_eight(const device uchar* from) {
#if CODES >= 8
  return *reinterpret_cast<const device uint2*>(from);
#else
  uint words[2];
  ATTNKIT_UNROLL
  for (int w = 0; w < 2; w++) {
    words[w] = uint(from[4 * w]) | uint(from[4 * w + 1]) << 8 | uint(from[4 * w + 2]) << 16 | uint(from[4 * w + 3]) << 24;
  }
  return uint2(words[0], words[1]);
#endif
}

// The 32 codes from a multiple of 32 on; behind the last column zeros.
inline uint4 read_codes(thread const Matrix& m, const device uchar* row, int column) {
#if CODES == 16
  return *reinterpret_cast<const device uint4*>(row + column / 2);
#else
  const uint2 low = read_eight(row + column / 2);
  const uint2 high = column + 16 < m.columns ? read_eight(row + column / 2 + 8) : uint2(0u);
  return uint4(low.x, low.y, high.x, high.y);
#endif
}

inline int expert_of(const device INDEX* indices, constant ExpertShape& shape, int slot) {
  const int choices = int(shape.choices);
  const long index = long(indices[slot / choices * shape.index_token + slot % choices * shape.index_choice]);
  return index >= 0 && index < shape.experts ? int(index) : -1;
}

// A comparison with NaN is false, so that NaN stays.
inline float swiglu(float gate, float up, float alpha, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
#if GPTOSS
  return gate * (1.0f / (1.0f + exp(-alpha * gate))) * (up + 1.0f);
#else
  return gate * (1.0f / (1.0f + exp(-gate))) * up;
#endif
}

// The rows of w13 that make feature f.
inline int gate_row(int feature, int features) {
  return INTERLEAVED ? 2 * feature : feature;
}

inline int up_row(int feature, int features) {
  return INTERLEAVED ? 2 * feature + 1 : features + feature;
}

// What a sum of products is divided by: the global scales of the weights and of what they were multiplied with.
inline float divided(float sum, float global, float act_global) {
  return sum / global / act_global;
}

// out (tokens, N) = the sum of a token's parts (slots, N) in the order of its choices, rounded once.
// Grid: 256 threads a threadgroup, ceil(N / 256) by tokens of them.
[[kernel, max_total_threads_per_threadgroup(256)]] void experts_combine(
    const device INDEX* indices [[buffer(0)]],
    const device float* parts [[buffer(1)]],
    device TYPE* out [[buffer(2)]],
    constant ExpertShape& shape [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 thread_index [[thread_position_in_threadgroup]]) {
  const int n = int(group.x * 256 + thread_index.x), token = int(group.y), choices = int(shape.choices);
  if (n >= shape.hidden) {
    return;
  }
  float sum = 0.0f;
  for (int slot = token * choices; slot < (token + 1) * choices; slot++) {
    if (expert_of(indices, shape, slot) >= 0) {
      sum += parts[slot * shape.hidden + n];
    }
  }
  out[token * shape.hidden + n] = TYPE(sum);
}
