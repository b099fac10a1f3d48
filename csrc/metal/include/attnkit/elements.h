// Elements of a cache as float: those of a model dtype, or codes of E4M3, decoded as they are read.
//
// Four codes become halfs by integers, two at a time (attnkit/e4m3.h). E4M3's subnormal numbers are half's then, which
// GPUs convert exactly; the numbers are their float over E4M3_FROM_HALF, a factor that is left to sums of them.
//
// Defined by the host: CODES, WIDTH (4: elements start at multiples of four).

#if CODES

typedef uchar Stored;
constant constexpr float STORED_UNIT = E4M3_FROM_HALF;  // what a number that was read is to be multiplied by

inline float4 numbers_of(uint word) {
  const half2 even = e4m3_halves(word), odd = e4m3_halves(word >> 8);
  float4 x = float4(float(even[0]), float(odd[0]), float(even[1]), float(odd[1]));
  if ((((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) != 0u) {  // a NaN among them
    ATTNKIT_UNROLL
    for (int i = 0; i < 4; i++) {
      x[i] = ((word >> (8 * i)) & 0x7fu) == E4M3_NAN ? NAN : x[i];
    }
  }
  return x;
}

inline float4 stored_four(const device uchar* from) {
#if WIDTH == 4
  return numbers_of(*reinterpret_cast<const device uint*>(from));
#else
  return numbers_of(uint(from[0]) | uint(from[1]) << 8 | uint(from[2]) << 16 | uint(from[3]) << 24);
#endif
}

inline float2 stored_two(const device uchar* from) {
  const float4 x = numbers_of(uint(from[0]) | uint(from[1]) << 8);
  return float2(x[0], x[1]);
}

#else

typedef TYPE Stored;
constant constexpr float STORED_UNIT = 1.0f;

inline float4 stored_four(const device TYPE* from) {
#if WIDTH == 4
  float4 x;
  read(from, x);
  return x;
#else
  return float4(float(from[0]), float(from[1]), float(from[2]), float(from[3]));
#endif
}

inline float2 stored_two(const device TYPE* from) {
  return float2(float(from[0]), float(from[1]));
}

#endif
