// Numbers of the model dtypes as the bits of float32.
//
// Apple GPUs take subnormal float32 numbers for zero wherever they calculate with them. Formats with block scales keep
// such numbers, so they are moved, compared and rounded as bits here. And no product is fused with a sum.

#pragma METAL fp contract(off)

constant constexpr uint MAGNITUDE = 0x7fffffffu;
constant constexpr uint INFINITE = 0x7f800000u;  // magnitudes above it are NaN
constant constexpr uint QUIET_NAN = 0x7fc00000u;
constant constexpr uint LEAST_NORMAL = 0x00800000u;
constant constexpr uint FRACTION = 0x007fffffu;

// For the exponents of normal numbers.
inline float power_of_two(int power) {
  return as_type<float>(uint(127 + power) << 23);
}

inline uint bits_of(float x) {
  return as_type<uint>(x);
}

inline uint bits_of(half x) {
  return as_type<uint>(float(x));
}

inline uint bits_of(bfloat x) {
  return uint(as_type<ushort>(x)) << 16;
}

// bfloat's bits of a float's, to nearest, ties to even; what was a bfloat stays what it is, NaN too.
inline uint bfloat_bits(uint x) {
  const uint rounded = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
  return (x & MAGNITUDE) > INFINITE ? (x >> 16) | ((x & 0xffffu) != 0u ? 0x40u : 0u) : rounded;
}

inline uint half_bits(uint x) {
  return as_type<ushort>(half(as_type<float>(x)));
}

inline void set(device float* to, uint x) {
  *to = as_type<float>(x);
}

inline void set(device half* to, uint x) {
  *to = half(as_type<float>(x));
}

inline void set(device bfloat* to, uint x) {
  *to = as_type<bfloat>(ushort(bfloat_bits(x)));
}
