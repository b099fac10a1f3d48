// Numbers to E2M1 under a power of two for every 32 numbers: attnkit/quantize_rows.h states the shapes and the grid.

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#include "attnkit/numbers.h"
#include "attnkit/cells.h"
#include "attnkit/e4m3.h"
#include "attnkit/quantize.h"
#include "attnkit/block_scales.h"
#include "attnkit/quantize_rows.h"
