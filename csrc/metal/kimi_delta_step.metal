// TOKENS tokens of each sequence through the delta rule with a gate for each channel: S <- S diag(exp(g)) + u k',
// u = beta (v - S diag(exp(g)) k'), out = S q', in float, with beta = sigmoid(b) and g = -exp(A_log) softplus(a + dt_bias),
// or with BOUNDED lower_bound sigmoid(exp(A_log) (a + dt_bias)). With NORMALIZED q and k are divided by sqrt(sum of their
// squares + eps). q, k, a (B, TOKENS, H, DIM), v, out (B, TOKENS, H, DIM_V), b (B, TOKENS, H) of TYPE, A_log (H) of
// LOG_TYPE and dt_bias (H, DIM) of BIAS_TYPE, state (slots, H, DIM_V, DIM) float, state_index (B, TOKENS) and accepted (B)
// int. The step begins with the state of column accepted - 1, or 0; the state after token t goes to that of column t. A
// slot that does not exist keeps nothing; without a first one out is 0.
//
// attnkit/delta_step.h has the kernel and its grid.
//
// Defined by the host: TYPE, LOG_TYPE, BIAS_TYPE, TOKENS, DIM (a multiple of 16), DIM_V, NORMALIZED, BOUNDED, SIMDS, WIDTH
// (4: q, k and rows of the state start at multiples of four elements).

#include <metal_stdlib>
using namespace metal;
#define CHANNELS 1
#include "attnkit/channel_decays.h"
#include "attnkit/delta_step.h"
