// sdpa_decode over a KV cache in pages: k (Np, Ps, Hkv, D), v (Np, Ps, Hkv, Dv), and block_table (B, Mp) int with the
// page of every Ps keys of a sequence. Entries at or past the length are not read; a page that does not exist is cut
// to one that does.
//
// Grid and results as in sdpa_decode.metal; see attnkit/decode.h. Pages are whole in the host's arguments: k_batch and
// v_batch are the steps from page to page.

#define PAGED 1

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
