// Scores of cache entries by weighted, rectified products: attnkit/indexer.h, which states the grid.
// q (Tq, Hi, Qb) and k (R, S, Qb), or in pages, of TYPE or of bytes; weights (Tq, Hi) of W_TYPE; scores (Tq, S) float.

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#include "attnkit/fragment.h"
#include "attnkit/e4m3.h"
#include "attnkit/row_codes.h"
#include "attnkit/indexer.h"
