// out = softmax(scale * q K') V for a block of T query tokens per sequence, which are the last keys of a KV cache.
// q (B, T, Hq, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv) of TYPE, kv_len (B) int, sink (Hq) float, kv_start (B) int; out
// (B, T, Hq, Dv), lse (B, T, Hq) float. CODES and scales are flash_attention's.
//
// A short block is a decode with more rows (attnkit/decode.h: the keys are split, so that few rows fill the machine), a
// long one a prefill (attnkit/prefill.h: more rows share what is read). Each header states its grid. MANY chooses.

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#include "attnkit/fragment.h"
#include "attnkit/visible.h"
#include "attnkit/rows.h"
#include "attnkit/pages.h"
#include "attnkit/e4m3.h"
#include "attnkit/elements.h"
#define PAGED 0
#if MANY
#define VARLEN 0
#include "attnkit/prefill.h"
#else
#include "attnkit/merge.h"
#include "attnkit/decode.h"
#endif
