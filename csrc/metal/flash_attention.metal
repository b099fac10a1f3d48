// out = softmax(scale * q K') V for T queries over S keys per sequence, query i at position S - T + i, and its
// natural-log LSE. q (B, T, Hq, D), k (B, S, Hkv, D), v (B, S, Hkv, Dv) of TYPE, sink (Hq) float, kv_len and kv_start
// (B) int; out (B, T, Hq, Dv), lse and row_sum (B, T, Hq) float. Without normalize, out is the numerator and row_sum the
// denominator. With CODES q, k and v are bytes of E4M3 that stand for themselves times a scale (B, Hkv) float each, where
// given.
//
// prefill_rows: a threadgroup serves a tile of queries of all heads that share a KV head; see attnkit/prefill.h for the
// grid, which is exact: another number of simdgroups would leave rows out.

#define VARLEN 0
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
