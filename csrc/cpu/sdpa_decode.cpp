// sdpa_decode for few keys: scores, softmax and weighted sum of a query's keys in one go.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels.h"
#include "numbers.h"

namespace attnkit {

namespace {

// q (D), scaled, over n keys (D) and values (Dv): out (Dv) and the log-sum, which is not finite where a score is not.
// weights (n) is room to work in.
ATTNKIT_KERNEL float attend(const Decode& d, const float* q, const float* k, const float* v, int64_t n, float* weights,
                            float* out) {
  float top = -std::numeric_limits<float>::infinity();
  double all = 0;
  for (int64_t i = 0; i < n; i++) {
    float score = dot(q, k + i * d.k[2], d.D);
    if (d.softcap > 0) score = d.softcap * std::tanh(score / d.softcap);
    weights[i] = score;
    top = score > top ? score : top;
  }
  for (int64_t i = 0; i < n; i++) weights[i] = exp_of(weights[i] - top);
  for (int64_t i = 0; i < n; i++) all += weights[i];
  const auto total = float(all);
  std::fill_n(out, d.Dv, 0.0f);
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < d.Dv; j++) out[j] += weights[i] * v[i * d.v[2] + j];
  for (int64_t j = 0; j < d.Dv; j++) out[j] /= total;
  return top + std::log(total);
}

}  // namespace

bool sdpa_decode(const Decode& d, const float* q, const float* k, const float* v, const int32_t* kv_len,
                 const int32_t* kv_start, const float* sink, float* out, float* lse) {
  std::vector<float> weights(d.S), scaled(d.D);
  for (int64_t b = 0; b < d.B; b++) {
    const int64_t end = kv_len[b], first = kv_start ? kv_start[b] : 0;
    if (end < 0 || end > d.S || first < 0 || first > d.S) return false;
    const int64_t start = d.window >= 0 ? std::max(first, end - d.window) : first;
    if (start >= end) return false;
    for (int64_t h = 0; h < d.Hq; h++) {
      const int64_t of = h / (d.Hq / d.Hkv);  // the KV head
      for (int64_t i = 0; i < d.D; i++) scaled[i] = q[b * d.q[0] + h * d.q[1] + i] * d.scale;
      float *const o = out + (b * d.Hq + h) * d.Dv, &l = lse[b * d.Hq + h];
      l = attend(d, scaled.data(), k + b * d.k[0] + of * d.k[1] + start * d.k[2],
                 v + b * d.v[0] + of * d.v[1] + start * d.v[2], end - start, weights.data(), o);
      if (!std::isfinite(l)) return false;
      if (!sink) continue;
      const float share = 1.0f / (1.0f + std::exp(sink[h] - l));  // it joins the denominator only
      for (int64_t j = 0; j < d.Dv; j++) o[j] *= share;
    }
  }
  return true;
}

}  // namespace attnkit
