// Block-scaled 4-bit numbers: codes and scales of weights to floats, and activations rounded as their formats round.
//
// A word of eight E2M1 codes becomes eight halves with bytewise arithmetic: sign, exponent and mantissa move to where
// the upper byte of a half has them, and the eight numbers are off by 2^-14, the difference of the two exponents' bias.
// Subnormal halves count, which 0.5 needs. The factors of scales below put the 2^14 back, and so need no subnormal
// float for a scale of 2^-127. An E4M3 byte is a half that way, too, off by 2^-8.
//
// Defined by the host: BLOCK (16: NVFP4, E4M3 scales; 32: MXFP4, E8M0 scales), ACT (what activations are rounded to: 0
// nothing, 1 NVFP4, 2 MXFP4, 3 MXFP8).

constant constexpr int ACT_BLOCK = ACT == 1 ? 16 : 32;

struct Codes8 {
  half2 pairs[4];  // the numbers i and i + 4 times 2^-14
};

inline Codes8 decode(uint word) {
  const uint kept = 0x1e1e1e1eu, carry = 0x70707070u, number = 0x8e8e8e8eu, upper = 0xff00ff00u;
  // A nibble in bits 1..4 of a byte: the addition carries its sign from bit 4 to bit 7.
  const uint even = (((word << 1) & kept) + carry) & number;  // codes 0, 2, 4, 6, a byte each
  const uint odd = (((word >> 3) & kept) + carry) & number;  // 1, 3, 5, 7
  Codes8 codes;
  codes.pairs[0] = as_type<half2>((even << 8) & upper);
  codes.pairs[1] = as_type<half2>((odd << 8) & upper);
  codes.pairs[2] = as_type<half2>(even & upper);
  codes.pairs[3] = as_type<half2>(odd & upper);
  return codes;
}

// What numbers from decode() are multiplied by, one factor after the other: 2^14 times a scale has exponents of more
// than a float has.
struct Factor {
  float main;
  float rest;
};

inline Factor factor_of(uint byte) {
  Factor factor;
#if BLOCK == 16
  const half bits = as_type<half>(ushort(((byte & 0x80u) << 8) | ((byte & 0x7fu) << 7)));
  factor.main = (byte & 0x7fu) == 0x7fu ? NAN : float(bits) * 4194304.0f;  // 2^(8 + 14)
  factor.rest = 1.0f;
#else
  const uint low = min(byte, 240u);  // 2^(240 - 127 + 14) is the largest power of two
  factor.main = as_type<float>((low + 14u) << 23);
  factor.rest = byte == 255u ? NAN : as_type<float>((byte - low + 127u) << 23);
#endif
  return factor;
}

inline float scaled(float sum, thread const Factor& factor) {
#if BLOCK == 16
  return sum * factor.main;
#else
  return sum * factor.main * factor.rest;
#endif
}

// Two numbers that bfloat holds, in a word.
inline uint packed(float low, float high) {
  return as_type<uint>(low) >> 16 | (as_type<uint>(high) & 0xffff0000u);
}

// The numbers i and i + 4 of a word as two bfloat, times their scale.
inline uint4 scaled_pairs(uint word, thread const Factor& factor) {
  const Codes8 codes = decode(word);
  uint4 pairs;
  ATTNKIT_UNROLL
  for (int i = 0; i < 4; i++) {
    float low = float(codes.pairs[i].x) * factor.main, high = float(codes.pairs[i].y) * factor.main;
#if BLOCK == 32
    low *= factor.rest;
    high *= factor.rest;
#endif
    pairs[i] = packed(low, high);
  }
  return pairs;
}

#if BLOCK == 32
// The same by integers alone, where all numbers of a scale are normal: from ``unit``, the exponent of 0.5 under that
// scale as bfloat has it. A code's exponent and mantissa are added to it. 0.5 has no leading one, so its mantissa is
// taken away before; of 0 nothing is added.
inline uint4 normal_pairs(uint word, uint unit) {
  const uint ones = 0x11111111u;
  const uint upper = word >> 1 | word >> 2;  // bit 0 of a nibble: the number is 1 or more
  const uint some = (word | upper) & ones;  // is not 0
  const uint kept = word & (upper | ~ones);
  uint4 pairs;
  ATTNKIT_UNROLL
  for (int i = 0; i < 4; i++) {
    const uint moved = i < 2 ? kept << (6 - 4 * i) : kept >> (4 * i - 6);  // exponent and mantissa to bits 6..8
    // The addition carries the sign from bit 9 to bit 15.
    const uint fields = ((moved & 0x03c003c0u) + 0x7e007e00u) & 0x81c081c0u;
    pairs[i] = fields + (some >> (4 * i) & 0x00010001u) * unit;
  }
  return pairs;
}
#endif

// A block's numbers as bfloat, times the scale of ``byte``: of each word the pairs i and i + 4.
inline void bfloat_block(thread const uint (&words)[BLOCK / 8], uint byte, thread uint4 (&made)[BLOCK / 8]) {
#if BLOCK == 32
  // 0.5 is normal from byte 2 on, 6 up to byte 252.
  if (byte - 2u <= 250u) {
    ATTNKIT_UNROLL
    for (int w = 0; w < BLOCK / 8; w++) {
      made[w] = normal_pairs(words[w], (byte - 1u) << 7);
    }
    return;
  }
#endif
  const Factor factor = factor_of(byte);
  ATTNKIT_UNROLL
  for (int w = 0; w < BLOCK / 8; w++) {
    made[w] = scaled_pairs(words[w], factor);
  }
}

// To the nearest E2M1 number, ties to even, at most 6; NaN is 6.
inline float nearest_e2m1(float x) {
  const float a = fabs(x);
  const float unit = a < 2.0f ? 0.5f : a < 4.0f ? 1.0f : 2.0f;
  return isnan(x) ? 6.0f : copysign(min(rint(a / unit) * unit, 6.0f), x);
}

inline float power_of_two(int exponent) {
  return as_type<float>(uint(exponent + 127) << 23);
}

// To the nearest E4M3 number, ties to even, at most 448; NaN stays.
inline float nearest_e4m3(float x) {
  if (isnan(x)) {
    return x;
  }
  const float a = min(fabs(x), 448.0f);
  const int exponent = max(int(as_type<uint>(a) >> 23) - 127, -6);  // subnormal numbers share the lowest spacing
  return copysign(rint(a * power_of_two(3 - exponent)) * power_of_two(exponent - 3), x);
}

// The byte of 2^ceil(log2(amax / largest)) for a largest element of 2^exponent (1 + fraction / 2^23).
inline int e8m0_byte(float amax, int exponent, uint fraction) {
  const uint bits = as_type<uint>(amax);
  return clamp(int(bits >> 23) - exponent + ((bits & 0x7fffffu) > fraction ? 1 : 0), 0, 254);
}

// x quantised in the blocks that neighbouring lanes hold and read back, without the division by the global scale. All
// lanes take part; those of a block are the lanes of one block of the row.
inline float rounded(float x, float global) {
#if ACT == 0
  return x;
#else
  float amax = isnan(x) ? 0.0f : fabs(x);
  for (ushort apart = 1; apart < ACT_BLOCK; apart *= 2) {
    amax = max(amax, simd_shuffle_xor(amax, apart));
  }
#if ACT == 1
  const float scale = nearest_e4m3(amax / 6.0f * global);
  return scale == 0.0f ? 0.0f : nearest_e2m1(x * (global / scale)) * scale;
#else
  const int byte = ACT == 2 ? e8m0_byte(amax, 2, 0x400000u) : e8m0_byte(amax, 8, 0x600000u);
  const float y = x * power_of_two(127 - byte);
  const float element = ACT == 2 ? nearest_e2m1(y) : nearest_e4m3(y);
  // 2^-127 is no normal float: the last factor halves.
  return element * power_of_two(max(byte, 1) - 127) * (byte == 0 ? 0.5f : 1.0f);
#endif
#endif
}
