// Each group of heads through its own matrix: attnkit/group_product.h, which states the grid.
// o (Tq, G, K) and wo_a (G, R, K) of TYPE, or pairs of FP4 numbers with scales; out (Tq, G, R) of OUT_TYPE.

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#include "attnkit/fragment.h"
#include "attnkit/e4m3.h"
#include "attnkit/row_codes.h"
#include "attnkit/group_product.h"
