// Interleaved pairs at the end of a head, rotated back to position 0.
//
// A pair is two products and their sum, not fused, then one rounding to TYPE. Channels before the pairs are not
// touched, not even by a product with 1; of rotated ones a product or sum below 2^-126 may count as 0.
//
// Defined by the host: TYPE, ANGLE_TYPE, DIM, PAIRS.

constant constexpr int STILL = DIM - 2 * PAIRS;

inline uint rounded_to(float, uint bits) {
  return bits;
}

inline uint rounded_to(half, uint bits) {
  return bits_of(half(as_type<float>(bits)));
}

inline uint rounded_to(bfloat, uint bits) {
  return bfloat_bits(bits) << 16;
}

// The cell whose first channel of the head is ``first``: (a, b) becomes (a cos + b sin, b cos - a sin).
inline void rotate_back(
    thread Cell& x, int first, const device ANGLE_TYPE* cosines, const device ANGLE_TYPE* sines) {
  ATTNKIT_UNROLL
  for (int i = 0; i < CELL; i += 2) {
    const int pair = (first + i - STILL) / 2;
    if (first + i >= STILL) {
      const float a = as_type<float>(x.of[i]), b = as_type<float>(x.of[i + 1]);
      const float c = as_type<float>(bits_of(cosines[pair])), s = as_type<float>(bits_of(sines[pair]));
      x.of[i] = rounded_to(TYPE(0.0f), as_type<uint>(a * c + b * s));
      x.of[i + 1] = rounded_to(TYPE(0.0f), as_type<uint>(b * c - a * s));
    }
  }
}
