#include "attention.h"

#include <cmath>
#include <limits>

#include "numbers.h"

namespace attnkit {

namespace {

// q is scaled already.
ATTNKIT_KERNEL float attend_rows(const float* q, const float* const* k, const float* const* v, int64_t n, int64_t D,
                                 int64_t Dv, float softcap, const float* sink, float* weights, float* out) {
  float top = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < n; i++) {
    float score = dot(q, k[i], D);
    if (softcap > 0) score = softcap * std::tanh(score / softcap);
    weights[i] = score;
    top = score > top ? score : top;
  }
  double total = 0;
  for (int64_t i = 0; i < n; i++) weights[i] = exp_of(weights[i] - top);
  for (int64_t i = 0; i < n; i++) total += weights[i];
  const float lse = top + std::log(float(total));
  // A sink joins the denominator only.
  const float share = (sink ? 1.0f / (1.0f + std::exp(*sink - lse)) : 1.0f) / float(total);
  for (int64_t j = 0; j < Dv; j++) out[j] = 0;
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < Dv; j++) out[j] += weights[i] * v[i][j];
  for (int64_t j = 0; j < Dv; j++) out[j] *= share;
  return lse;
}

}  // namespace

float attend(const float* q, Keys& keys, int64_t D, int64_t Dv, float scale, float softcap, const float* sink,
             float* out) {
  const auto n = int64_t(keys.k.size());
  keys.weights.resize(size_t(n + D));
  float* const scaled = keys.weights.data() + n;
  for (int64_t i = 0; i < D; i++) scaled[i] = q[i] * scale;
  return attend_rows(scaled, keys.k.data(), keys.v.data(), n, D, Dv, softcap, sink, keys.weights.data(), out);
}

}  // namespace attnkit
