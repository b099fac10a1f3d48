// Cells to codes under block scales, and back: NVFP4, MXFP4, and E4M3 under powers of two. Bit for bit.
//
// The lanes of a block have neighbouring cells of it, 2 of NVFP4, 4 of MXFP4: they agree on amax by shuffles, and each
// works the scale out for itself.

constant constexpr uint E2M1_NAN = 7u;  // NaN becomes +6
constant constexpr int LIFT = 30;  // by which power of two cells of tiny numbers are raised
constant constexpr uint UE8M0_NAN = 255u;

// The largest magnitude of a cell, as bits; NaN does not count.
inline uint amax_of(thread const Cell& x) {
  uint top = 0u;
  ATTNKIT_UNROLL
  for (int i = 0; i < CELL; i++) {
    const uint a = x.of[i] & MAGNITUDE;
    top = max(top, a > INFINITE ? 0u : a);
  }
  return top;
}

// Of a block, whose cells neighbouring lanes have.
template <int LANES>
inline uint block_amax(thread const Cell& x) {
  uint top = amax_of(x);
  ATTNKIT_UNROLL
  for (int step = 1; step < LANES; step *= 2) {
    top = max(top, simd_shuffle_xor(top, ushort(step)));
  }
  return top;
}

// 2^power times a cell, exactly for what is normal afterwards, whether it was before or not.
inline void times_power(thread Cell& x, int power) {
  const float by = power_of_two(power), of_subnormal = power_of_two(power - 74);
  ATTNKIT_UNROLL
  for (int i = 0; i < CELL; i++) {
    const uint a = x.of[i] & MAGNITUDE;
    const float small = float(a) * of_subnormal * power_of_two(-75);  // a number of units of 2^-149
    const float y = a < LEAST_NORMAL ? small : as_type<float>(a) * by;
    x.of[i] = (x.of[i] & ~MAGNITUDE) | (as_type<uint>(y) & MAGNITUDE);
  }
}

// Codes of E2M1, the first in the lowest bits: to nearest, ties to even, saturating. ``by4`` is four times what the
// numbers are multiplied by.
//
// As a function of the magnitude a the code lies on three lines, 2 a, a + 2 and a / 2 + 4, and is the least of them. A
// fused multiply-add computes a line and rounds it to an integer.
inline uint e2m1_codes(thread const Cell& x, float by4) {
  uint codes = 0u;
  ATTNKIT_UNROLL
  for (int i = 0; i < CELL; i++) {
    const uint a = x.of[i] & MAGNITUDE;
    const float a4 = as_type<float>(a) * by4;
    const float low = min(fma(a4, 0.5f, TO_INTEGER), fma(a4, 0.25f, TO_INTEGER + 2.0f));
    const float high = min(fma(a4, 0.125f, TO_INTEGER + 4.0f), TO_INTEGER + 7.0f);
    const uint code = (as_type<uint>(min(low, high)) & 7u) | ((x.of[i] >> 28) & 8u);
    codes |= (a > INFINITE ? E2M1_NAN : code) << (4 * i);
  }
  return codes;
}

// The byte of 2^ceil(log2(top / limit)), or with ``down`` 2^(floor(log2 top) - floor(log2 limit)).
inline uint ue8m0_of(uint top, uint limit_exponent, uint limit_fraction, bool down) {
  const uint exponent = (top >> 23) + (!down && (top & FRACTION) > limit_fraction ? 1u : 0u);
  return exponent > limit_exponent ? exponent - limit_exponent : 0u;
}

// A cell of MXFP4, of a block whose largest magnitude is ``top``; 6 is 1.5 * 2^2.
inline uint mxfp4_encode(thread Cell& x, uint top, bool down, thread uint& scale) {
  scale = ue8m0_of(top, 2u, 0x400000u, down);
  int power = 127 - int(scale);
  if (scale < 3u) {  // only here do numbers below 2^-126 have codes
    times_power(x, LIFT);
    power -= LIFT;
  }
  return e2m1_codes(x, power_of_two(power + 2));
}

// A cell of E4M3 under a power of two, eight lanes a block; 448 is 1.75 * 2^8.
inline uint2 mxfp8_encode(thread Cell& x, thread uint& scale) {
  scale = ue8m0_of(block_amax<8>(x), 8u, 0x600000u, false);
  int power = 127 - int(scale);
  if (scale < 11u) {
    times_power(x, LIFT);
    power -= LIFT;
  }
  const float by = power_of_two(power);
  uint2 codes = uint2(0u);
  ATTNKIT_UNROLL
  for (int i = 0; i < CELL; i++) {
    const uint a = x.of[i] & MAGNITUDE;
    const uint code = e4m3_of(as_type<float>(a) * by) | ((x.of[i] >> 24) & 0x80u);
    codes[i / 4] |= (a > INFINITE ? E4M3_NAN : code) << (8 * (i % 4));
  }
  return codes;
}

// A global scale, any float32: ``value`` times 2^-``raised``, which is 0 unless that number is tiny.
struct GlobalScale {
  float value;
  int raised;
  uint bits;
};

constant constexpr int RAISED = 49;

inline GlobalScale global_scale(uint bits) {
  GlobalScale g;
  const uint a = bits & MAGNITUDE, sign = bits & ~MAGNITUDE;
  g.bits = bits;
  g.raised = a < (63u << 23) ? RAISED : 0;  // below 2^-64
  const float given = as_type<float>(a), units = float(a) * power_of_two(RAISED - 75) * power_of_two(-74);
  const float raised = a < LEAST_NORMAL ? units : given * power_of_two(RAISED);
  g.value = as_type<float>(as_type<uint>(g.raised != 0 ? raised : given) | sign);
  return g;
}

// global / sf, raised as it is, where that quotient is subnormal: a multiple of 2^-149, ties to even.
inline float subnormal_ratio(GlobalScale g, float sf) {
  const uint a = g.bits & MAGNITUDE, exponent = a >> 23;
  const uint units = exponent == 0u ? a : ((a & FRACTION) | LEAST_NORMAL) << (exponent - 1u);
  const ulong by = ulong(sf / E4M3_STEP), of = ulong(units) * 512u;  // both over 2^-9
  const ulong whole = of / by, rest = 2u * (of % by);
  const bool up = rest > by || (rest == by && (whole & 1u) != 0u);
  return float(uint(whole) + (up ? 1u : 0u)) * power_of_two(RAISED - 149);
}

// A cell of NVFP4, of a block whose largest magnitude is ``top``. Where float32 would be subnormal on the way to the
// scale, the scale is 0.
//
// Under an infinite global scale numbers are infinite but for 0, which is NaN; where that meets nothing but zeros, or 0
// an infinity, or under NaN, the scale is NaN. Up to 3 units of 2^-149 a sixth of ``top`` is 0.
inline uint nvfp4_encode(thread Cell& x, uint top, GlobalScale g, thread uint& scale) {
  const uint a = g.bits & MAGNITUDE, sign = (g.bits & ~MAGNITUDE) >> 24;
  if (a > INFINITE || (a == INFINITE && top <= 3u) || (a == 0u && top == INFINITE)) {
    scale = E4M3_NAN;
    return E2M1_NAN * 0x11111111u;
  }
  if (a == INFINITE) {
    scale = e4m3_of(E4M3_MAX) | sign;
    uint codes = E2M1_NAN * 0x11111111u;  // 6, as infinities
    for (int i = 0; i < CELL; i++) {
      const uint m = x.of[i] & MAGNITUDE;
      codes |= m == 0u || m > INFINITE ? 0u : ((x.of[i] >> 28) & 8u) << (4 * i);
    }
    return codes;
  }
  const float global = fabs(g.value);
  scale = e4m3_of(as_type<float>(top) / 6.0f * global * power_of_two(-g.raised));
  const float sf = e4m3_number(scale);
  float by = scale == 0u ? 0.0f : global / sf;
  if (g.raised != 0 && scale != 0u) {
    if (by < power_of_two(RAISED - 126)) {
      by = subnormal_ratio(g, sf);
      times_power(x, -RAISED);
    } else {
      by *= power_of_two(-RAISED);
    }
  }
  scale |= sign;
  return e2m1_codes(x, 4.0f * by);
}

// The codes of E2M1 i and i + 4 as halfs: their numbers over FROM_HALF.
inline half2 e2m1_halves(uint codes, int i) {
  const uint word = codes >> (4 * i);
  return as_type<half2>((word & 0x00070007u) << 9 | (word & 0x00080008u) << 12);
}

constant constexpr float FROM_HALF = 16384.0f;  // 2^14: how far apart the exponents of half and E2M1 begin

inline void e2m1_numbers(uint codes, thread float* of) {
  ATTNKIT_UNROLL
  for (int i = 0; i < CELL / 2; i++) {
    const half2 pair = e2m1_halves(codes, i);
    of[i] = float(pair[0]) * FROM_HALF;
    of[i + 4] = float(pair[1]) * FROM_HALF;
  }
}

// Numbers, each a zero or normal with few bits, times 2^(byte - 127): exactly, as bits, up to infinity.
inline void under_power(thread const float* numbers, uint byte, thread Cell& x) {
  constexpr uint ROOM = 10u;  // from here on 2^-9 times the scale is normal
  const float by = as_type<float>(byte == UE8M0_NAN ? QUIET_NAN : byte << 23);
  ATTNKIT_UNROLL
  for (int i = 0; i < CELL; i++) {
    x.of[i] = as_type<uint>(numbers[i] * by);
  }
  if (byte < ROOM) {
    ATTNKIT_UNROLL
    for (int i = 0; i < CELL; i++) {
      const uint bits = as_type<uint>(numbers[i]), a = bits & MAGNITUDE;
      const int exponent = int(a >> 23) + int(byte) - 127;
      const uint normal = uint(max(exponent, 0)) << 23 | (a & FRACTION);
      const uint small = ((a & FRACTION) | LEAST_NORMAL) >> uint(max(1 - exponent, 0));
      const uint y = a == 0u || a > INFINITE ? a : exponent > 0 ? normal : small;
      x.of[i] = (bits & ~MAGNITUDE) | y;
    }
  }
}

inline void mxfp4_decode(uint codes, uint scale, thread Cell& x) {
  float numbers[CELL];
  e2m1_numbers(codes, numbers);
  under_power(numbers, scale, x);
}

inline void mxfp8_decode(uint2 codes, uint scale, thread Cell& x) {
  float numbers[CELL];
  ATTNKIT_UNROLL
  for (int i = 0; i < CELL / 2; i++) {
    const uint word = codes[i / 2] >> (8 * (i % 2));
    const half2 pair = e4m3_halves(word);
    const int at = i / 2 * 4 + i % 2;
    numbers[at] = (word & 0x7fu) == E4M3_NAN ? NAN : float(pair[0]) * E4M3_FROM_HALF;
    numbers[at + 2] = (word >> 16 & 0x7fu) == E4M3_NAN ? NAN : float(pair[1]) * E4M3_FROM_HALF;
  }
  under_power(numbers, scale, x);
}

// The numbers of NVFP4 without a global scale: exact.
inline void nvfp4_decode(uint codes, uint scale, thread Cell& x) {
  float numbers[CELL];
  e2m1_numbers(codes, numbers);
  const float sf = e4m3_number(scale);
  ATTNKIT_UNROLL
  for (int i = 0; i < CELL; i++) {
    x.of[i] = as_type<uint>(numbers[i] * sf);
  }
}

// The same over a global scale. All numbers of a block are 1/2 or 3/4 of its scale times powers of two, so that two
// divisions are enough.
inline void nvfp4_decode(uint codes, uint scale, GlobalScale g, thread Cell& x) {
  const float sf = e4m3_number(scale), back = power_of_two(g.raised);
  const float even = 0.5f * sf / g.value * back, odd = 0.75f * sf / g.value * back, none = 0.0f * sf;
  ATTNKIT_UNROLL
  for (int i = 0; i < CELL; i++) {
    const uint code = (codes >> (4 * i)) & 15u, a = code & 7u;
    const float y = (a > 1u && (a & 1u) != 0u ? odd : even) * power_of_two(int(a >> 1));
    x.of[i] = as_type<uint>(a == 0u ? none : y) ^ (code & 8u) << 28;
  }
}
