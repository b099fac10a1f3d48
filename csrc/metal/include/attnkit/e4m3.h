// E4M3 without infinities (largest 448, smallest 2^-9, NaN 0x7f and 0xff), rounded by integers.

constant constexpr float E4M3_MAX = 448.0f;
constant constexpr uint E4M3_NAN = 0x7fu;
constant constexpr float E4M3_LEAST_NORMAL = 0.015625f;  // 2^-6
constant constexpr float E4M3_STEP = 0.001953125f;  // 2^-9, of the numbers below it
constant constexpr uint E4M3_REBIAS = 120u << 23;  // between the exponents of float32, 127, and of E4M3, 7
// Added to a number below 2^22, it leaves that number's integer, ties to even, in the last bits.
constant constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23

// The byte of a number that is not negative and not NaN: to nearest, ties to even, saturating.
inline uint e4m3_of(float a) {
  const uint bits = as_type<uint>(min(a, E4M3_MAX));
  const uint normal = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) - E4M3_REBIAS) >> 20;
  const uint small = as_type<uint>(fma(a, 1.0f / E4M3_STEP, TO_INTEGER)) & 0xfu;  // 8 is 2^-6
  return a < E4M3_LEAST_NORMAL ? small : normal;
}

// What a byte stands for, exactly.
inline float e4m3_number(uint byte) {
  const uint magnitude = byte & 0x7fu;
  const float a = magnitude < 8u ? float(magnitude) * E4M3_STEP : as_type<float>((magnitude << 20) + E4M3_REBIAS);
  return magnitude == E4M3_NAN ? NAN : (byte & 0x80u) != 0u ? -a : a;
}

constant constexpr float E4M3_FROM_HALF = 256.0f;  // how far apart the exponents of half and E4M3 begin

// Bytes 0 and 2 of a word as halfs: their numbers over E4M3_FROM_HALF, but of NaN.
inline half2 e4m3_halves(uint word) {
  return as_type<half2>((word & 0x007f007fu) << 7 | (word & 0x00800080u) << 8);
}
