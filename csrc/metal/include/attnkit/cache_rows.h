// Rows of a key-value cache. Row i of numbers (rows, DIM) of TYPE belongs to row slots[i] of the cache, (slots, DIM) of
// CACHE_TYPE or, encoded, (slots, bytes): NoPE codes, from ROPE_AT on the other channels as bfloat, from SCALES_AT on a
// byte for every BLOCK NoPE channels, from END to SIZE zeros. Rows of either may lie apart.
//
// A simdgroup has a row, a lane a cell of eight channels, which is all NoPE or all RoPE; 256 channels are a turn.
// Grid: at least ``rows`` simdgroups along x, in threadgroups of any number of simdgroups.
//
// Defined by the host: TYPE, CACHE_TYPE (of rows of numbers), WIDE_SLOTS (long, not int), FORMAT (0 numbers, 1 E4M3
// under powers of two, 2 NVFP4, 3 MXFP4), GLOBAL, DIM, WIDTH, and of encoded rows NOPE, BLOCK, ROPE_AT, SCALES_AT, END,
// SIZE, and WORDS: rows start at multiples of four bytes.

#if WIDE_SLOTS
typedef long Slot;
#else
typedef int Slot;
#endif
#if FORMAT
typedef uchar Stored;
#else
typedef CACHE_TYPE Stored;
#endif

struct Shape {
  long rows;
  long slots;
  long step;  // elements from one row of numbers to the next
  long cache_step;  // the same of the cache
};

constant constexpr int TURN = 32 * CELL;

// The row of the cache for row ``row`` of the numbers; -1 where the slot names none.
inline long slot_of(const device Slot* slots, long row, long count) {
  const long slot = slots[row];
  return slot >= 0 && slot < count ? slot : -1;
}

#if FORMAT
// Codes, scales and RoPE channels of cells, at their first channel.
inline void encode(device uchar* row, int first, thread Cell& x, GlobalScale g) {
  uint scale;
#if FORMAT == 1
  const uint2 codes = mxfp8_encode(x, scale);
  if (first < NOPE) {
    store_word(row + first, codes[0]);
    store_word(row + first + 4, codes[1]);
  }
#else
#if FORMAT == 2
  const uint codes = nvfp4_encode(x, block_amax<BLOCK / CELL>(x), g, scale);
#else
  const uint codes = mxfp4_encode(x, block_amax<BLOCK / CELL>(x), false, scale);
#endif
  if (first < NOPE) {
    store_word(row + first / 2, codes);
  }
#endif
  if (first < NOPE && first % BLOCK == 0) {
    row[SCALES_AT + first / BLOCK] = uchar(scale);
  }
}

inline void decode(const device uchar* row, int first, thread Cell& x, GlobalScale g) {
  const uint scale = row[SCALES_AT + first / BLOCK];
#if FORMAT == 1
  mxfp8_decode(uint2(load_word(row + first), load_word(row + first + 4)), scale, x);
#elif FORMAT == 3
  mxfp4_decode(load_word(row + first / 2), scale, x);
#elif GLOBAL
  nvfp4_decode(load_word(row + first / 2), scale, g, x);
#else
  nvfp4_decode(load_word(row + first / 2), scale, x);
#endif
}

// Two RoPE channels are a word; the last one may be alone.
inline void store_rope(device uchar* to, int count, thread const Cell& x) {
  ATTNKIT_UNROLL
  for (int i = 0; i < CELL; i += 2) {
    const uint low = bfloat_bits(x.of[i]);
    if (i + 1 < count) {
      store_word(to + 2 * i, low | bfloat_bits(x.of[i + 1]) << 16);
    } else if (i < count) {
      to[2 * i] = uchar(low);
      to[2 * i + 1] = uchar(low >> 8);
    }
  }
}

inline void load_rope(const device uchar* from, int count, thread Cell& x) {
  ATTNKIT_UNROLL
  for (int i = 0; i < CELL; i += 2) {
    uint pair = 0u;
    if (i + 1 < count) {
      pair = load_word(from + 2 * i);
    } else if (i < count) {
      pair = uint(from[2 * i]) | uint(from[2 * i + 1]) << 8;
    }
    x.of[i] = pair << 16;
    x.of[i + 1] = pair & 0xffff0000u;
  }
}
#endif
