// The kernels, as torch_attnkit/cpu calls them: addresses of float32 tensors whose last axis is contiguous, sizes, and
// steps from row to row in elements. Those that return bool say whether they took the call; if not, outputs hold anything.
// What follows from a call's signature is a struct, so that all calls of one need nothing but addresses.
#pragma once

#include <cstdint>

namespace attnkit {

// Indices in 32 or 64 bits.
struct Integers {
  const void* data;
  bool wide;
  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

struct Norm {
  int64_t rows, N;
  float eps;
};

// y, z, out (rows, N), w (N).
void gated_rmsnorm(const Norm& n, const float* y, const float* z, const float* w, float* out);

struct SoftmaxRouter {
  int64_t R, E, K, step;  // from row to row of the logits
  bool over_all, renormalize;
  float route_scale;
};

struct SqrtSoftplusRouter {
  int64_t R, E, K, step;
  bool renormalize;
  float route_scale;
};

struct HashRouter {
  int64_t R, E, V, K, step, table_step;
  bool wide_ids, wide_table;  // in 64 bits
  bool renormalize;
  float route_scale;
};

// logits (R, E), bias (E) or null, ids (R), table (V, K); weights, indices (R, K).
bool route_softmax(const SoftmaxRouter& r, const float* logits, float* weights, int32_t* indices);
bool route_sqrt_softplus(const SqrtSoftplusRouter& r, const float* logits, const float* bias, float* weights,
                         int32_t* indices);
bool route_hash(const HashRouter& r, const float* logits, const void* ids, const void* table, float* weights,
                int32_t* indices);

// FP4 matrices of all experts, linear scales.
struct Matrices {
  const uint8_t *codes, *scales;
  int64_t codes_expert, codes_row, scales_expert, scales_row;  // steps
  const float* global;                                         // (E) or null
  const float* bias;                                           // (E, rows) or null
  int64_t rows, columns;
};

enum class Rounding : int { kNone, kBfloat16, kFloat16 };

struct Experts {
  Matrices up, down;        // (2M, N) and (N, M) each
  const float* scale_of;    // (256) the number of a scale byte
  int64_t block;            // numbers under a scale
  float most_global;        // what a global scale may be at most
  bool gptoss, interleaved;
  float alpha, limit;       // no limit: infinity
  Rounding rounding;        // of the gated unit
};

// x, out (T, N), weights and indices (T, K).
bool fp4_moe(const Experts& experts, const float* x, const float* weights, Integers indices, float* out, int64_t T,
             int64_t K, int64_t E, int threads);

struct Decode {
  int64_t B, Hq, Hkv, S, D, Dv, window;
  float scale, softcap;
  int64_t q[2], k[3], v[3];  // steps of q (B, Hq), and of k and v (B, Hkv, S)
};

// q (B, Hq, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv), kv_len and kv_start (B), sink (Hq), the latter two or null;
// out (B, Hq, Dv), lse (B, Hq).
bool sdpa_decode(const Decode& d, const float* q, const float* k, const float* v, const int32_t* kv_len,
                 const int32_t* kv_start, const float* sink, float* out, float* lse);

struct Sparse {
  int64_t Tq, Hq, D, R, S, C, K, window;
  float scale;
  int64_t q[2], near[2], far[2], chosen;  // steps of q (Tq, Hq), of both caches (R, S or C), of the lists (Tq)
};

// q, out (Tq, Hq, D), near (R, S, D), end (Tq); far (R, C, D), chosen (Tq, K), length, request_ids (Tq), sink (Hq), these
// or null; lse (Tq, Hq).
bool sparse_fmha_with_swa(const Sparse& s, const float* q, const float* near, const int32_t* end, const float* far,
                          const int32_t* chosen, const int32_t* length, const int32_t* request_ids, const float* sink,
                          float* out, float* lse);

}  // namespace attnkit
