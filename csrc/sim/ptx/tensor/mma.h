// mma.sync, decoded by decode_matrix.
#pragma once
#include "front/decode.h"

namespace ptx {

void decode_mma(Decoder&, Op&, Modifiers&);   // mma.cpp; .sync.aligned are consumed already

}  // namespace ptx
