// The floating-point types of registers, as the values that arithmetic and comparisons see.
#pragma once
#include "machine/lanes.h"
#include "units/formats.h"

namespace ptx {

struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};

PTX_INLINE float value_of(F16 v) { return f32_of_f16(v.bits); }
PTX_INLINE float value_of(BF16 v) { return f32_of_bf16(v.bits); }
PTX_INLINE float value_of(float v) { return v; }
PTX_INLINE double value_of(double v) { return v; }

}  // namespace ptx
