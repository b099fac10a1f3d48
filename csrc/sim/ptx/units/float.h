// The rest of floating-point arithmetic, in a file of its own: reciprocals, roots, exponentials, tests.
#pragma once
#include "front/decode.h"

namespace ptx {

void decode_special(Decoder&, Op&);  // rcp sqrt rsqrt ex2 lg2 sin cos tanh copysign testp

}  // namespace ptx
