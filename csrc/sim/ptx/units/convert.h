// The parts of cvt, by file.
#pragma once
#include "front/decode.h"

namespace ptx {

void decode_scalar_cvt(Decoder&, Op&);  // convert.cpp: one value to one value
void decode_packed_cvt(Decoder&, Op&);  // convert_packed.cpp: x2, x4, tf32 and the 8, 6 and 4-bit formats
void decode_pack(Decoder&, Op&);        // convert_packed.cpp: cvt.pack

}  // namespace ptx
