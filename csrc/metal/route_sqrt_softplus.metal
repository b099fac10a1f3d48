// The experts of tokens with the largest keys, weighted by sqrt(softplus(logit)), to which a bias may be added for the
// choice. attnkit/routing.h states the shapes and the grid.

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#include "attnkit/numbers.h"
#include "attnkit/scores.h"
#include "attnkit/routing.h"
