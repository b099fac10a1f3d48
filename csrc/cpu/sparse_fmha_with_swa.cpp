// sparse_fmha_with_swa for few keys, in plain caches: a token's window and its entries as one list of rows, for all heads.
#include <algorithm>
#include <cmath>

#include "attention.h"
#include "kernels.h"

namespace attnkit {

bool sparse_fmha_with_swa(const Sparse& s, const float* q, const float* near, const int32_t* end, const float* far,
                          const int32_t* chosen, const int32_t* length, const int32_t* request_ids, const float* sink,
                          float* out, float* lse) {
  Keys keys;
  std::vector<int64_t> last(s.C, -1);  // the token that chose an entry last
  for (int64_t t = 0; t < s.Tq; t++) {
    const int64_t request = request_ids ? request_ids[t] : t * s.R / s.Tq, entries = length ? length[t] : s.C;
    if (request < 0 || request >= s.R || entries < 0 || entries > s.C || end[t] < 1 || end[t] > s.S) return false;
    keys.clear();
    const auto add = [&](const float* row) { keys.add(row, row); };
    for (int64_t i = std::max<int64_t>(0, end[t] - s.window); i < end[t]; i++)
      add(near + request * s.near[0] + i * s.near[1]);
    const auto entry = [&](int64_t i) { add(far + request * s.far[0] + i * s.far[1]); };
    for (int64_t j = 0; chosen && j < s.K; j++) {
      const int64_t i = chosen[t * s.chosen + j];
      if (i < -1 || i >= s.C || (i >= 0 && last[i] == t)) return false;
      if (i < 0) continue;
      last[i] = t;
      if (i < entries) entry(i);
    }
    for (int64_t i = 0; !chosen && far && i < entries; i++) entry(i);
    for (int64_t h = 0; h < s.Hq; h++, lse++, out += s.D) {
      *lse = attend(q + t * s.q[0] + h * s.q[1], keys, s.D, s.D, s.scale, 0, sink ? sink + h : nullptr, out);
      if (!std::isfinite(*lse)) return false;
    }
  }
  return true;
}

}  // namespace attnkit
