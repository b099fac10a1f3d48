// A cell: eight neighbouring numbers of a row, which is a lane's share, as the bits of float32 (attnkit/numbers.h).
//
// Defined by the host: WIDTH, 8 where rows of numbers start at multiples of eight elements and memory, else 1.

constant constexpr int CELL = 8;

struct Cell {
  uint of[CELL];
};

// All eight at once, in loads and stores of 16 bytes.
inline void load_whole(const device float* from, thread Cell& x) {
  const device uint4* words = reinterpret_cast<const device uint4*>(from);
  ATTNKIT_UNROLL
  for (int i = 0; i < CELL; i++) {
    x.of[i] = words[i / 4][i % 4];
  }
}

inline void load_whole(const device half* from, thread Cell& x) {
  const uint4 words = *reinterpret_cast<const device uint4*>(from);
  ATTNKIT_UNROLL
  for (int i = 0; i < CELL; i++) {
    x.of[i] = bits_of(as_type<half>(ushort(words[i / 2] >> (16 * (i % 2)))));
  }
}

inline void load_whole(const device bfloat* from, thread Cell& x) {
  const uint4 words = *reinterpret_cast<const device uint4*>(from);
  ATTNKIT_UNROLL
  for (int i = 0; i < CELL; i++) {
    x.of[i] = i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u;
  }
}

inline void store_whole(device float* to, thread const Cell& x) {
  device uint4* words = reinterpret_cast<device uint4*>(to);
  words[0] = uint4(x.of[0], x.of[1], x.of[2], x.of[3]);
  words[1] = uint4(x.of[4], x.of[5], x.of[6], x.of[7]);
}

inline void store_whole(device half* to, thread const Cell& x) {
  uint4 words;
  ATTNKIT_UNROLL
  for (int i = 0; i < 4; i++) {
    words[i] = half_bits(x.of[2 * i]) | half_bits(x.of[2 * i + 1]) << 16;
  }
  *reinterpret_cast<device uint4*>(to) = words;
}

inline void store_whole(device bfloat* to, thread const Cell& x) {
  uint4 words;
  ATTNKIT_UNROLL
  for (int i = 0; i < 4; i++) {
    words[i] = bfloat_bits(x.of[2 * i]) | bfloat_bits(x.of[2 * i + 1]) << 16;
  }
  *reinterpret_cast<device uint4*>(to) = words;
}

// The first ``count`` numbers of a cell, zeros after them.
template <typename T>
inline void load(const device T* from, int count, thread Cell& x) {
  if (WIDTH == CELL && count >= CELL) {
    load_whole(from, x);
    return;
  }
  ATTNKIT_UNROLL
  for (int i = 0; i < CELL; i++) {
    x.of[i] = i < count ? bits_of(from[i]) : 0u;
  }
}

// The first ``count`` numbers of a cell, rounded once.
template <typename T>
inline void store(device T* to, int count, thread const Cell& x) {
  if (WIDTH == CELL && count >= CELL) {
    store_whole(to, x);
    return;
  }
  ATTNKIT_UNROLL
  for (int i = 0; i < CELL; i++) {
    if (i < count) {
      set(to + i, x.of[i]);
    }
  }
}

// Where a row lies: batch axes that step evenly have been merged by the host, so there is mostly one.
struct Axis {
  long size;
  long step;  // elements
  long scale_step;  // of the scales of these rows, where a kernel reads them
};
