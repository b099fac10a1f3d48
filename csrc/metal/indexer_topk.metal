// Where the K largest scores of each row stand, in ascending order of place: attnkit/topk.h, which states the grid.
// scores (Tq, S) of TYPE, k_len (Tq) int; indices (Tq, K) int.

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#include "attnkit/topk.h"
