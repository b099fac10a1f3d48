// The routers: of each token the experts, and their weights. They refuse, with false and nothing said, what the
// definition refuses: logits of NaN or +inf and ids out of range.
#include <cmath>
#include <limits>
#include <vector>

#include "kernels.h"

namespace attnkit {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kTiny = 1e-20f;  // oracle/routing.py: keeps 0 / 0 of a row whose chosen scores are all 0 at 0

bool accepted(const float* logits, int64_t E) {
  bool every = true;
  for (int64_t e = 0; e < E; e++) every = every && logits[e] < kInfinity;  // NaN compares false
  return every;
}

constexpr float kFar = -40.0f, kNothing = -104.0f;  // FAR and NOTHING of oracle/routing.py

float sqrt_softplus(float x) {
  if (x < kFar) return x < kNothing ? 0.0f : std::exp(0.5f * x);
  return std::sqrt(std::log1p(std::exp(-std::fabs(x))) + (x > 0 ? x : 0.0f));
}

// The K largest of x (E), descending, ties to the lowest index.
void largest(const float* x, int64_t E, int64_t K, int32_t* index) {
  int64_t found = 0;
  for (int64_t e = 0; e < E; e++) {
    if (found == K && !(x[e] > x[index[K - 1]])) continue;
    int64_t at = found < K ? found++ : K - 1;
    for (; at > 0 && x[e] > x[index[at - 1]]; at--) index[at] = index[at - 1];
    index[at] = int32_t(e);
  }
}

// Scores of the chosen (K), in place: over their sum if asked, then scaled.
void scale(float* chosen, int64_t K, bool renormalize, float route_scale) {
  double total = kTiny;
  for (int64_t k = 0; k < K; k++) total += chosen[k];
  for (int64_t k = 0; k < K; k++) chosen[k] = (renormalize ? chosen[k] / float(total) : chosen[k]) * route_scale;
}

}  // namespace

bool route_softmax(const SoftmaxRouter& r, const float* logits, float* weights, int32_t* indices) {
  for (int64_t row = 0; row < r.R; row++, logits += r.step, weights += r.K, indices += r.K) {
    if (!accepted(logits, r.E)) return false;
    largest(logits, r.E, r.K, indices);
    const float top = logits[indices[0]] == -kInfinity ? 0.0f : logits[indices[0]];
    double total = 0;  // one number after another: float32 would lose a bit in some hundred
    for (int64_t k = 0; k < r.K; k++) total += weights[k] = std::exp(logits[indices[k]] - top);
    if (r.over_all) {
      total = 0;
      for (int64_t e = 0; e < r.E; e++) total += std::exp(logits[e] - top);
    }
    for (int64_t k = 0; k < r.K; k++) weights[k] /= total == 0 ? 1.0f : float(total);
    scale(weights, r.K, r.renormalize, r.route_scale);
  }
  return true;
}

bool route_sqrt_softplus(const SqrtSoftplusRouter& r, const float* logits, const float* bias, float* weights,
                         int32_t* indices) {
  std::vector<float> score(r.E), ranked(bias ? r.E : 0);
  for (int64_t row = 0; row < r.R; row++, logits += r.step, weights += r.K, indices += r.K) {
    if (!accepted(logits, r.E)) return false;
    for (int64_t e = 0; e < r.E; e++) score[e] = sqrt_softplus(logits[e]);
    for (int64_t e = 0; bias && e < r.E; e++) {
      if (std::isnan(bias[e])) return false;
      ranked[e] = score[e] + bias[e];
    }
    largest(bias ? ranked.data() : score.data(), r.E, r.K, indices);
    for (int64_t k = 0; k < r.K; k++) weights[k] = score[indices[k]];
    scale(weights, r.K, r.renormalize, r.route_scale);
  }
  return true;
}

bool route_hash(const HashRouter& r, const float* logits, const void* ids, const void* table, float* weights,
                int32_t* indices) {
  const Integers token{ids, r.wide_ids}, expert{table, r.wide_table};
  for (int64_t row = 0; row < r.R; row++, logits += r.step, weights += r.K, indices += r.K) {
    const int64_t id = token[row];
    if (!accepted(logits, r.E) || id < 0 || id >= r.V) return false;
    for (int64_t k = 0; k < r.K; k++) {
      const int64_t e = expert[id * r.table_step + k];
      if (e < 0 || e >= r.E) return false;
      indices[k] = int32_t(e);
      weights[k] = sqrt_softplus(logits[e]);
    }
    scale(weights, r.K, r.renormalize, r.route_scale);
  }
  return true;
}

}  // namespace attnkit
