// Which cache entries have the largest scores: attnkit/indexer.h scores them, attnkit/topk.h chooses; each header states
// its grid. CHOOSES says which of the two this is.

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#if CHOOSES
#include "attnkit/topk.h"
#else
#include "attnkit/fragment.h"
#include "attnkit/e4m3.h"
#include "attnkit/row_codes.h"
#include "attnkit/indexer.h"
#endif
