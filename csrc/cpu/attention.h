// One query over few keys, wherever they lie.
#pragma once

#include <cstdint>
#include <vector>

namespace attnkit {

struct Keys {
  std::vector<const float*> k, v;  // rows
  std::vector<float> weights;      // room to work in

  void clear() { k.clear(), v.clear(); }
  void add(const float* key, const float* value) { k.push_back(key), v.push_back(value); }
};

// q (D), times scale, over the keys (D) and values (Dv): out (Dv), with a sink, or null, in the denominator; returns the
// log-sum without it, which is not finite where a score is not, nor where there are no keys.
float attend(const float* q, Keys& keys, int64_t D, int64_t Dv, float scale, float softcap, const float* sink,
             float* out);

}  // namespace attnkit
