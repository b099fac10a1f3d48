// log(1 + e^x) as gates have it.

#pragma once

#include "attnkit/numbers.h"
#include "attnkit/scores.h"

// log(1 + e^x); x itself above 20.
inline float softplus(float x) {
  const float small = exp(-fabs(x));
  return x > 20.0f ? x : fma(small, log1p_ratio(small), max(x, 0.0f));
}
