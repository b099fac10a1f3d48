// The rest of integer arithmetic, in a file of its own: carries, bit fields, permutations, dot products.
#pragma once
#include "front/decode.h"

namespace ptx {

void decode_carry(Decoder&, Op&);  // add.cc addc sub.cc subc mad.cc madc
void decode_bits(Decoder&, Op&);   // popc clz brev bfind bfe bfi bmsk szext fns prmt lop3 shf sad dp4a dp2a mul24 mad24

}  // namespace ptx
