// binary16 and bfloat16 in plain integers, because not every C++ compiler here has the types.
#pragma once
#include <cstdint>
#include <cstring>

namespace sim {

inline float bits_to_float(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline uint32_t float_to_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

struct Bfloat {
  uint16_t bits;
  Bfloat() = default;
  explicit Bfloat(float f) {
    uint32_t u = float_to_bits(f);
    bits = (u & 0x7fffffff) > 0x7f800000 ? uint16_t(u >> 16 | 64) : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
  explicit operator float() const { return bits_to_float(uint32_t(bits) << 16); }
};

struct Half {
  uint16_t bits;
  Half() = default;
  explicit Half(float f) {
    uint32_t u = float_to_bits(f), magnitude = u & 0x7fffffff;
    uint16_t sign = uint16_t(u >> 16 & 0x8000);
    if (magnitude > 0x7f800000) {
      bits = sign | 0x7e00 | uint16_t(magnitude >> 13 & 0x3ff);
    } else if (magnitude >= 0x477ff000) {  // 65520 and above round to infinity
      bits = sign | 0x7c00;
    } else if (magnitude >= 0x38800000) {
      uint32_t m = magnitude - 0x38000000;
      bits = uint16_t(sign | ((m + 0xfff + (m >> 13 & 1)) >> 13));
    } else {  // subnormal: let the adder of float do the rounding
      bits = uint16_t(sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000));
    }
  }
  explicit operator float() const {
    uint32_t sign = uint32_t(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
    if (magnitude >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    if (magnitude >= 0x400) return bits_to_float(sign | ((magnitude << 13) + 0x38000000));
    float f = float(magnitude) * 0x1p-24f;
    return bits_to_float(sign | float_to_bits(f));
  }
};

}  // namespace sim
