// out = softmax(scale * q K') V for one query token per sequence against a KV cache, and its natural-log LSE.
// q (B, Hq, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv) of TYPE, kv_len (B) int, sink (Hq) float, kv_start (B) int; out
// (B, Hq, Dv), lse (B, Hq) float, or with more than one split (splits, B, Hq, Dv) and (splits, B, Hq), both float. With
// CODES k and v are bytes of E4M3, with TYPE uchar q too, and q, k and v stand for themselves times a scale (B, Hkv)
// float each, where given.
//
// decode_rows: the threads of one threadgroup serve all query heads of a KV head, for a share of its keys; see
// attnkit/decode.h for the grid. decode_merge: a simdgroup for every 128 elements of a row of out.

#define PAGED 0

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#include "attnkit/merge.h"
#include "attnkit/fragment.h"
#include "attnkit/visible.h"
#include "attnkit/rows.h"
#include "attnkit/pages.h"
#include "attnkit/e4m3.h"
#include "attnkit/elements.h"
#include "attnkit/decode.h"
