// The number formats of PTX ISA 5.2.2 "Alternate Floating-Point Data Formats": exact decoders and rounding encoders.
//
// A format is sign, exponent and mantissa bits. What its largest exponent means differs: e5m2, f16, bf16 and tf32 keep
// infinities and NaNs there; e4m3 gives up only the all-ones code for NaN; e3m2, e2m3 and e2m1 have neither. ue8m0 is a
// bare power of two, 0xff is NaN; ue4m3 is e4m3 without its sign.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace ptx {

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

enum class Top : uint8_t { ieee, only_nan, finite };  // what the largest exponent holds

struct Format {
  unsigned exponent, mantissa;
  Top top;
  constexpr int bias() const { return (1 << (exponent - 1)) - 1; }
  constexpr unsigned bits() const { return 1 + exponent + mantissa; }
  constexpr uint32_t sign() const { return 1u << (exponent + mantissa); }
  constexpr uint32_t infinity() const { return ((1u << exponent) - 1) << mantissa; }   // ieee only
  // The largest finite magnitude.
  constexpr uint32_t largest() const {
    return top == Top::ieee ? infinity() - 1 : top == Top::only_nan ? sign() - 2 : sign() - 1;
  }
  // What a conversion makes of NaN: the canonical NaN, or the largest magnitude where the format has none
  // (PTX ISA 9.7.9.21 "cvt": e2m1, e2m3 and e3m2 give positive MAX_NORM).
  constexpr uint32_t canonical_nan() const { return sign() - 1; }
};
constexpr Format kE4M3{4, 3, Top::only_nan}, kE5M2{5, 2, Top::ieee}, kE3M2{3, 2, Top::finite}, kE2M3{2, 3, Top::finite},
    kE2M1{2, 1, Top::finite}, kF16{5, 10, Top::ieee}, kBF16{8, 7, Top::ieee};

// The exact value of a code (only the format's bits are looked at). All of these formats fit in a float.
inline float decode(const Format& f, uint32_t code) {
  const uint32_t magnitude = code & (f.sign() - 1), exponent = magnitude >> f.mantissa;
  const uint32_t mantissa = magnitude & ((1u << f.mantissa) - 1);
  float value;
  if (f.top == Top::ieee && magnitude >= f.infinity())
    value = magnitude > f.infinity() ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  else if (f.top == Top::only_nan && magnitude == f.sign() - 1)
    value = std::numeric_limits<float>::quiet_NaN();
  else if (exponent == 0)
    value = std::ldexp(static_cast<float>(mantissa), 1 - f.bias() - static_cast<int>(f.mantissa));
  else
    value = std::ldexp(static_cast<float>(mantissa | 1u << f.mantissa),
                       static_cast<int>(exponent) - f.bias() - static_cast<int>(f.mantissa));
  return code & f.sign() ? -value : value;
}

enum class Round : uint8_t { nearest_even, nearest_away, zero, down, up };

// `magnitude` (finite, >= 0) as a whole number under a rounding mode; `negative`: the sign it belongs to.
inline double round_whole(double magnitude, bool negative, Round mode) {
  switch (mode) {
    case Round::nearest_even: return std::nearbyint(magnitude);
    case Round::nearest_away: return std::round(magnitude);
    case Round::zero: return std::trunc(magnitude);
    case Round::down: return negative ? std::ceil(magnitude) : std::floor(magnitude);
    default: return negative ? std::floor(magnitude) : std::ceil(magnitude);
  }
}

// The code nearest to a value. Beyond the largest finite magnitude: that magnitude when `saturate` (infinities too) or
// when the rounding direction leads there, else infinity, or NaN for a format without infinities.
inline uint32_t encode(const Format& f, double value, Round mode = Round::nearest_even, bool saturate = false) {
  if (std::isnan(value)) return f.canonical_nan();
  const bool negative = std::signbit(value);
  const uint32_t sign = negative ? f.sign() : 0;
  const double magnitude = std::fabs(value);
  const uint32_t beyond = saturate || f.top == Top::finite ? f.largest()
                          : f.top == Top::ieee             ? f.infinity()
                                                           : f.canonical_nan();
  if (std::isinf(magnitude)) return sign | beyond;
  if (magnitude == 0) return sign;
  int exponent;
  std::frexp(magnitude, &exponent);                    // magnitude in [2^(exponent - 1), 2^exponent)
  const int least = 1 - f.bias();                      // exponent of the smallest normal number
  const int unit = (exponent - 1 > least ? exponent - 1 : least) - static_cast<int>(f.mantissa);
  const double steps = round_whole(std::ldexp(magnitude, -unit), negative, mode);
  // Steps of 2^unit counted from the code of 2^(unit + mantissa); carries run into the exponent as they should.
  const uint64_t base = static_cast<uint64_t>(unit + static_cast<int>(f.mantissa) - least) << f.mantissa;
  const uint64_t code = base + static_cast<uint64_t>(steps);
  if (code <= f.largest()) return sign | static_cast<uint32_t>(code);
  const bool inwards = mode == Round::zero || (mode == Round::down && !negative) || (mode == Round::up && negative);
  return sign | (inwards ? f.largest() : beyond);
}

// ue8m0: 2^(code - 127), 0xff NaN.
inline float decode_ue8m0(uint32_t code) {
  code &= 0xff;
  return code == 0xff ? std::numeric_limits<float>::quiet_NaN() : as_float(code == 0 ? 0x00400000u : code << 23);
}
// Sign dropped (the conversion takes magnitudes); `up` rounds to the next power of two, else towards zero. Saturates.
inline uint32_t encode_ue8m0(double value, bool up) {
  if (std::isnan(value)) return 0xff;
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return 0xfe;
  if (magnitude == 0) return 0;
  int exponent;
  const double fraction = std::frexp(magnitude, &exponent);  // in [0.5, 1)
  int code = exponent - 1 + 127 + (up && fraction > 0.5 ? 1 : 0);
  return static_cast<uint32_t>(code < 0 ? 0 : code > 0xfe ? 0xfe : code);
}
inline float decode_ue4m3(uint32_t code) { return decode(kE4M3, code & 0x7f); }

// Quick forms of the ones that run per element. f16 and bf16 to f32 are exact; back is round to nearest even.
inline float f32_of_bf16(uint32_t code) { return as_float(code << 16); }
inline float f32_of_f16(uint32_t code) {
  const uint32_t sign = (code & 0x8000u) << 16, magnitude = code & 0x7fffu;
  // Exponents are moved by multiplying: subnormal halves become normal floats without a branch.
  const uint32_t finite = as_bits(as_float(magnitude << 13) * as_float(0x77800000u));   // 2^112
  const uint32_t special = 0x7f800000u | magnitude << 13;
  return as_float(sign | (magnitude >= 0x7c00u ? special : finite));
}
inline uint32_t bf16_of_f32(float value) {
  const uint32_t bits = as_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded;
}
inline uint32_t f16_of_f32(float value) {
  const uint32_t bits = as_bits(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0xc8000fffu + (magnitude >> 13 & 1)) >> 13;
  // Below 2^-14: adding 0.5 lines the mantissa up with the subnormals' unit, and the addition rounds.
  const uint32_t small = as_bits(as_float(magnitude < 0x38800000u ? magnitude : 0) + 0.5f) - 0x3f000000u;
  const uint32_t code = magnitude < 0x38800000u ? small : magnitude >= 0x477ff000u ? 0x7c00u : normal;
  return magnitude > 0x7f800000u ? 0x7fffu : sign | code;
}
// What the tensor core reads of a 32-bit operand: sign, 8 exponent and 10 mantissa bits; the low 13 bits are ignored.
inline float f32_of_tf32(uint32_t bits) { return as_float(bits & 0xffffe000u); }
// cvt.{rn,rna,rz}.tf32.f32. NaN: canonical; beyond the largest: infinity, or the largest when `saturate`.
inline uint32_t tf32_of_f32(float value, Round mode, bool saturate = false) {
  const uint32_t bits = as_bits(value), sign = bits & 0x80000000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fffffffu;
  if (mode == Round::nearest_even) magnitude += 0xfffu + (magnitude >> 13 & 1);
  if (mode == Round::nearest_away) magnitude += 0x1000u;
  magnitude &= 0xffffe000u;
  if (magnitude >= 0x7f800000u) magnitude = saturate ? 0x7f7fe000u : 0x7f800000u;
  return sign | magnitude;
}

}  // namespace ptx
