// The experts of tokens with the largest keys, weighted by a softmax over them or over all experts.
// attnkit/routing.h states the shapes and the grid.

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#include "attnkit/numbers.h"
#include "attnkit/scores.h"
#include "attnkit/routing.h"
