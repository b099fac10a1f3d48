// flash_attention_varlen over a KV cache in pages: sequence b has the queries [cu_seqlens_q[b], cu_seqlens_q[b + 1]), the
// last of its kv_len[b] keys. q (Tq, Hq, D) of TYPE, k (Np, Ps, Hkv, D), v (Np, Ps, Hkv, Dv) of TYPE or, with CODES,
// bytes of E4M3, cu_seqlens_q (B + 1), kv_len (B) and block_table (B, Mp) int with the page of every Ps keys of a
// sequence, sink (Hq) float, with CODES scales of q, k and v (B, Hkv) float; out (Tq, Hq, Dv) of OUT_TYPE, lse (Tq, Hq)
// float. Entries at or past a length are not read; a page that does not exist is cut to one that does.
// Queries at a negative position and tokens past the last sequence give 0 and -inf.
//
// Grid as in flash_attention_varlen.metal. k_batch and v_batch are the steps from page to page.

#define VARLEN 1
#define PAGED 1

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
