// Attention of tokens over a window and chosen entries, in which keys are values: attnkit/sparse.h, which states the
// grid. q (Tq, Hq, D) of TYPE; caches (R, S, row), or in pages; out (Tq, Hq, D), lse and row_sum (Tq, Hq) float.

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#include "attnkit/fragment.h"
#include "attnkit/visible.h"
#include "attnkit/e4m3.h"
#include "attnkit/row_codes.h"
#include "attnkit/coded_rows.h"
#include "attnkit/sparse.h"
#include "attnkit/sparse_numbers.h"
