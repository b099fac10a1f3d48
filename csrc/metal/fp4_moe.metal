// out[t] = sum_k weights[t, k] (w2[e] h + bias2[e]), h = swiglu(w13[e] x[t] + bias13[e]), for e = indices[t, k].
// x (Tq, N) of TYPE, weights (Tq, K) float, indices (Tq, K) of INDEX, w13 (E, 2 M, N/2) and w2 (E, N, M/2) E2M1 pairs
// with scales as bytes, biases of TYPE, global scales float; out (Tq, N) of TYPE.
//
// MANY chooses between attnkit/few_tokens.h, bound by the bytes of weights, and attnkit/many_tokens.h, bound by
// products; h (slots, M) of SEEN and parts (slots, N) float lie between their launches. Each header states its grid.

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#include "attnkit/fp4.h"
#include "attnkit/experts.h"
#if MANY
#include "attnkit/fragment.h"
#include "attnkit/many_tokens.h"
#else
#include "attnkit/few_tokens.h"
#endif
