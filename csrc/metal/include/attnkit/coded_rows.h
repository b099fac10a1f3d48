// Encoded rows of a key-value cache: codes, channels in bfloat16, block scales, as formats/kv_cache.py has them.
//
// Defined by the host: DIM, ROPE (channels in bfloat16, a multiple of 8), WIDTH (4: rows start at multiples of 4 bytes),
// FORMAT: 0 none (rows are numbers), 1 fp8, 2 nvfp4, 3 mxfp4; DIVIDED: whether NVFP4 numbers are divided.

#if FORMAT != 0
constant constexpr int CODED_UNIT = 8;  // numbers that are decoded together
constant constexpr int CODED = DIM - ROPE;
constant constexpr int CODE_BYTES = FORMAT == 1 ? CODED : CODED / 2;
constant constexpr int SCALES_AT = CODE_BYTES + 2 * ROPE;
constant constexpr int SCALE_BLOCK = FORMAT == 1 ? 64 : FORMAT == 2 ? 16 : 32;

// Numbers d to d + 7 of a row, each rounded once. ``divisor``: the global scale of NVFP4 numbers.
template <typename T>
inline void decode_numbers(const device uchar* row, int d, float divisor, threadgroup T* to) {
  if (d >= CODED) {
    ATTNKIT_UNROLL
    for (int n = 0; n < 8; n += 2) {
      const uint pair = read_word(row + CODE_BYTES + 2 * (d - CODED + n));
      to[n] = T(as_type<float>(pair << 16));
      to[n + 1] = T(as_type<float>(pair & 0xffff0000u));
    }
    return;
  }
  const uint scale = row[SCALES_AT + d / SCALE_BLOCK];
#if FORMAT == 1
  ATTNKIT_UNROLL
  for (int n = 0; n < 8; n += 4) {
    const uint word = read_word(row + d + n);
    ATTNKIT_UNROLL
    for (int b = 0; b < 4; b++) {
      to[n + b] = T(times_power(e4m3_number((word >> (8 * b)) & 255u), scale));
    }
  }
#else
  const uint word = read_word(row + d / 2);
  ATTNKIT_UNROLL
  for (int n = 0; n < 8; n++) {
    const float x = e2m1_number((word >> (4 * n)) & 15u);
#if FORMAT == 3
    to[n] = T(times_power(x, scale));
#elif DIVIDED
    to[n] = T(x * e4m3_number(scale) / divisor);
#else
    to[n] = T(x * e4m3_number(scale));
#endif
  }
#endif
}
#endif
