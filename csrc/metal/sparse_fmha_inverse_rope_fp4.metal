// Attention of tokens over a window and chosen entries, in which keys are values, to codes and scales of its output:
// attnkit/sparse.h, which states the grid. q (Tq, Hq, D) of TYPE; caches (R, S, row), or in pages; codes (Tq, Hq, D/2);
// scales (Tq, Hq, D/BLOCK), or a matrix in the 128x4 layout for each run of heads.

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#include "attnkit/fragment.h"
#include "attnkit/visible.h"
#include "attnkit/e4m3.h"
#include "attnkit/row_codes.h"
#include "attnkit/coded_rows.h"
#include "attnkit/sparse.h"
#include "attnkit/numbers.h"
#include "attnkit/cells.h"
#include "attnkit/quantize.h"
#include "attnkit/block_scales.h"
#include "attnkit/rotate.h"
#include "attnkit/sparse_codes.h"
