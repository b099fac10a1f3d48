// Matrix products of the tensor core units: operand bytes are decoded to float panels, panels are multiplied.
//
// The order of a sum is the same on every machine: for each element of D the products run over k from 0 upwards, each
// rounded to float and then added (no fused multiply-add, in no build of the kernel), and the finished sum is added to
// the accumulator. The ISA leaves the order open ("accumulation order ... unspecified"); products of f16, bf16, tf32
// and narrower operands are exact in float, so only the additions round. wgmma's of 8-bit floats: narrow_sums.h.
#pragma once
#include <cstdint>

#include "units/formats.h"

namespace ptx {

enum class Element : uint8_t { f16, bf16, tf32, e4m3, e5m2, e3m2, e2m3, e2m1, s8, u8, s4, u4 };

// How elements narrower than a byte lie in memory (PTX ISA 9.7.16.10.4 "Packing formats").
enum class Packing : uint8_t {
  dense,      // no gaps: two e2m1 to a byte, the first in the low half
  container,  // one to a byte: e2m1 in bits 2-5, e3m2 and e2m3 in bits 0-5
  padded,     // 16 elements packed at the start of every 16 bytes (8 bytes of e2m1, 12 of e3m2 and e2m3)
};

// Bytes that `count` elements take (count a multiple of 16 where elements share bytes).
unsigned bytes_of(Element, Packing, unsigned count);

// `count` (a multiple of 8) elements as floats; integers too, which are exact.
void decode_elements(Element, Packing, const uint8_t* bytes, unsigned count, float* out);

// 16 elements of 4 or 6 bits, packed from the first byte on, as bytes with zeros above.
void unpack_sixteen(unsigned bits, const uint8_t packed[16], uint8_t out[16]);

// Columns of a right operand: `panel` (k, stride) takes `n` columns of `in`: (n, k) when `k_major`, else (k, n).
void place_columns(const float* in, unsigned n, unsigned k, bool k_major, float* panel, unsigned stride);

// The left operand: element (m, k) at data[m * row + k * step].
struct Left {
  const float* data;
  unsigned row, step;
};

// d[i][j] = sum over k of a(i, k) * b[k * stride + j], plus d[i][j] when `accumulate`; i < m, j < n (a multiple of 8).
// `d`: a pointer for every row.
void multiply(Left a, const float* b, unsigned stride, unsigned m, unsigned n, unsigned k, float* const* d,
              bool accumulate);

// Integer products come out of `multiply` as exact floats (below 2^24); this is the accumulation of `s32` kinds.
uint32_t add_s32(uint32_t accumulator, float sum, bool saturate);

}  // namespace ptx
