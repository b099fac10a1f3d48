// e^g of every channel of a head and every token of a step, in threadgroup memory. Defined by the host: TYPE, BIAS_TYPE,
// TOKENS, DIM, SIMDS, BOUNDED (g is lower_bound times a sigmoid).

#pragma once

#include "attnkit/softplus.h"

// All threads: an element each, the first-th and every so many behind it. a: of the head, its elements along tokens and channels apart by step_t
// and step_c; bias: of the head.
inline void channel_decays(const device TYPE* a, long step_t, long step_c, const device BIAS_TYPE* bias, float rate,
                           float lower_bound, threadgroup float* decays, int first) {
  for (int i = first; i < TOKENS * DIM; i += 32 * SIMDS) {
    const float gate = float(a[i / DIM * step_t + i % DIM * step_c]) + float(bias[i % DIM]);
#if BOUNDED
    decays[i] = exp(lower_bound / (1.0f + exp(-rate * gate)));
#else
    decays[i] = exp(-rate * softplus(gate));
#endif
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
