// sdpa_decode for few keys.
#include <algorithm>
#include <cmath>

#include "attention.h"
#include "kernels.h"

namespace attnkit {

bool sdpa_decode(const Decode& d, const float* q, const float* k, const float* v, const int32_t* kv_len,
                 const int32_t* kv_start, const float* sink, float* out, float* lse) {
  Keys keys;
  for (int64_t b = 0; b < d.B; b++) {
    const int64_t end = kv_len[b], first = kv_start ? kv_start[b] : 0;
    if (end < 0 || end > d.S || first < 0 || first > d.S) return false;
    const int64_t start = d.window >= 0 ? std::max(first, end - d.window) : first;
    for (int64_t of = 0; of < d.Hkv; of++) {
      keys.clear();
      for (int64_t i = start; i < end; i++)
        keys.add(k + b * d.k[0] + of * d.k[1] + i * d.k[2], v + b * d.v[0] + of * d.v[1] + i * d.v[2]);
      const int64_t group = d.Hq / d.Hkv;
      for (int64_t h = of * group; h < (of + 1) * group; h++, lse++, out += d.Dv) {
        *lse = attend(q + b * d.q[0] + h * d.q[1], keys, d.D, d.Dv, d.scale, d.softcap, sink ? sink + h : nullptr, out);
        if (!std::isfinite(*lse)) return false;
      }
    }
  }
  return true;
}

}  // namespace attnkit
