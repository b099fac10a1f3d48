// Where block scales lie, and the loads and stores of codes.

constant constexpr int TILE_ROWS = 128;
constant constexpr int TILE_COLUMNS = 4;

// In the 128x4 layout of a matrix of ``columns`` columns, a multiple of 4.
inline long place_128x4(long row, long column, long columns) {
  const long tile = row / TILE_ROWS * (columns / TILE_COLUMNS) + column / TILE_COLUMNS;
  return tile * (TILE_ROWS * TILE_COLUMNS) + (row % 32) * 16 + (row % TILE_ROWS) / 32 * 4 + column % TILE_COLUMNS;
}

// Four bytes, at once where WORDS says that they lie at a multiple of four.
inline uint load_word(const device uchar* from) {
#if WORDS
  return *reinterpret_cast<const device uint*>(from);
#else
  return uint(from[0]) | uint(from[1]) << 8 | uint(from[2]) << 16 | uint(from[3]) << 24;
#endif
}

inline void store_word(device uchar* to, uint word) {
#if WORDS
  *reinterpret_cast<device uint*>(to) = word;
#else
  ATTNKIT_UNROLL
  for (int i = 0; i < 4; i++) {
    to[i] = uchar(word >> (8 * i));
  }
#endif
}
