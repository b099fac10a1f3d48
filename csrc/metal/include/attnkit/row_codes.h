// Numbers of 8 and 4 bits as float, and words of them. Everything is built from integers, so that no float on the way
// is too small to be kept: the smallest E4M3 numbers are normal floats, but their bits as they lie are none.

// Four bytes at a multiple of 4, or, with WIDTH 1, anywhere.
inline uint read_word(const device uchar* from) {
#if WIDTH == 4
  return *reinterpret_cast<const device uint*>(from);
#else
  return uint(from[0]) | uint(from[1]) << 8 | uint(from[2]) << 16 | uint(from[3]) << 24;
#endif
}

// The numbers are halves of 0, 1, 2, 3, 4, 6, 8 and 12.
inline float e2m1_number(uint code) {
  const float x = float((0xc8643210u >> (4u * (code & 7u))) & 15u) * 0.5f;
  return (code & 8u) != 0u ? -x : x;
}

// Two numbers whose product is 2^(byte - 127), because 2^-127 is no normal float; NaN for 255.
inline float2 powers_of(uint byte) {
  const uint first = byte / 2u;
  const float x = as_type<float>((first + 64u) << 23);
  return float2(byte == 255u ? NAN : x, as_type<float>((byte - first + 63u) << 23));
}

// x * 2^(byte - 127), exact where the result is.
inline float times_power(float x, uint byte) {
  const float2 powers = powers_of(byte);
  return x * powers.x * powers.y;
}
