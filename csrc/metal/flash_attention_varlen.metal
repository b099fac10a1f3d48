// flash_attention over packed sequences: sequence b has the queries [cu_seqlens_q[b], cu_seqlens_q[b + 1]) and the keys
// [cu_seqlens_k[b], cu_seqlens_k[b + 1]). q (Tq, Hq, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv) of TYPE, both cu_seqlens
// (B + 1) int, sink (Hq) float; out (Tq, Hq, Dv), lse and row_sum (Tq, Hq) float. Tokens past the last sequence
// give 0 and -inf. CODES and scales are flash_attention's.
//
// Grid as in attnkit/prefill.h, with B + 1 in z: the last serves the tokens that belong to no sequence. There are as
// many tiles in x as the longest sequence needs; where it turns out longer, the threadgroups take several.

#define VARLEN 1
#define PAGED 0

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#include "attnkit/fragment.h"
#include "attnkit/visible.h"
#include "attnkit/rows.h"
#include "attnkit/pages.h"
#include "attnkit/e4m3.h"
#include "attnkit/elements.h"
#include "attnkit/prefill.h"
