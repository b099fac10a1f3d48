// TOKENS tokens of each sequence through the gated delta rule: S <- exp(g) S + u k', u = beta (v - exp(g) S k'),
// out = S q', in float, with g = -exp(A_log) softplus(a + dt_bias) and beta = beta_scale sigmoid(b). With NORMALIZED q
// and k are divided by sqrt(sum of their squares + eps). q, k (B, TOKENS, Hk, DIM), v, out (B, TOKENS, Hv, DIM_V), a, b
// (B, TOKENS, Hv) of TYPE, A_log of LOG_TYPE and dt_bias of BIAS_TYPE (Hv), state (slots, Hv, DIM_V, DIM) float,
// state_index (B, TOKENS) and accepted (B) int. The step begins with the state of column accepted - 1, or 0; the state
// after token t goes to that of column t. A slot that does not exist keeps nothing; without a first one out is 0.
//
// attnkit/delta_step.h has the kernel and its grid.
//
// Defined by the host: TYPE, LOG_TYPE, BIAS_TYPE, TOKENS, DIM (a multiple of 16), DIM_V, NORMALIZED, SIMDS, WIDTH (4: q,
// k and rows of the state start at multiples of four elements).

#include <metal_stdlib>
using namespace metal;
#define CHANNELS 0
#include "attnkit/delta_step.h"
