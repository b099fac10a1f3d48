// Elements of q, k and v: those of a model dtype, or codes of E4M3, decoded as they are read.
//
// Four codes become halfs by integers, two at a time (attnkit/e4m3.h). E4M3's subnormal numbers are half's then, which
// GPUs convert exactly; the numbers are their float over E4M3_FROM_HALF, a factor that is left to sums of them. Codes of
// q, which are few, become their numbers at once.
//
// Defined by the host: TYPE (of q; uchar stands for codes), CODES (k and v are codes), WIDTH (4: elements start at
// multiples of four).

inline float decoded(float x) {
  return x;
}

inline half decoded(half x) {
  return x;
}

inline bfloat decoded(bfloat x) {
  return x;
}

inline half decoded(uchar code) {
  return half(e4m3_number(code));
}

#if CODES

typedef uchar Stored;
typedef half Held;  // a number that was read, as threadgroup memory holds it
constant constexpr float STORED_UNIT = E4M3_FROM_HALF;  // what a number that was read is to be multiplied by

inline half4 halves_of(uint word) {
  const half2 even = e4m3_halves(word), odd = e4m3_halves(word >> 8);
  half4 x = half4(even[0], odd[0], even[1], odd[1]);
  if ((((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) != 0u) {  // a NaN among them
    ATTNKIT_UNROLL
    for (int i = 0; i < 4; i++) {
      x[i] = ((word >> (8 * i)) & 0x7fu) == E4M3_NAN ? half(NAN) : x[i];
    }
  }
  return x;
}

inline float4 numbers_of(uint word) {
  const half4 x = halves_of(word);
  return float4(float(x[0]), float(x[1]), float(x[2]), float(x[3]));
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

#if WIDTH == 4
typedef half4 HeldVector;

inline HeldVector held(const device uchar* from) {
  return halves_of(*reinterpret_cast<const device uint*>(from));
}
#else
typedef half HeldVector;

inline HeldVector held(const device uchar* from) {
  return halves_of(uint(from[0]))[0];
}
#endif

#else

typedef TYPE Stored;
typedef TYPE Held;
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

#if WIDTH == 4
typedef vec<TYPE, 4> HeldVector;

inline HeldVector held(const device TYPE* from) {
  return *reinterpret_cast<const device HeldVector*>(from);
}
#else
typedef TYPE HeldVector;

inline HeldVector held(const device TYPE* from) {
  return from[0];
}
#endif

#endif
