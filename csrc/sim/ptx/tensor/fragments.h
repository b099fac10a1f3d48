// How the threads of a warp hold matrices in registers (PTX ISA 9.7.14.5, 9.7.15.5.1.1): one rule for all shapes.
//
// With g = lane / 4, t = lane % 4 and P elements to a 32-bit register:
//   A, register r: row g + 8 * (r % 2), columns P * t + 4 * P * (r / 2) and the P - 1 after it;
//   B, register r: column g, rows P * t + 4 * P * r and the P - 1 after it;
//   C and D, 32-bit elements, register i: row g + 8 * (i / 2 % 2), column 2 * t + i % 2 + 8 * (i / 4);
//   C and D, f16, register i: row g + 8 * (i % 2), columns 2 * t + 8 * (i / 2) and the one after it.
#pragma once
#include "machine/machine.h"
#include "tensor/matmul.h"

namespace ptx {

// The rows of A that a warp holds, as bytes: `rows` (8 or 16) by `line` bytes; the first rows' registers come first.
void collect_a(const Warp&, const std::vector<Slot>& registers, unsigned rows, unsigned line, uint8_t* out);
// B as (8 columns, line bytes).
void collect_b(const Warp&, const std::vector<Slot>& registers, unsigned line, uint8_t* out);

enum class Sum : uint8_t { f32, f16, s32 };
// d = sums + c for the 16 (or 8) rows of a warp; sums (rows, n). Without `c` (null) the sums alone.
void add_fragment(Warp&, Sum, const std::vector<Slot>& d, const std::vector<Slot>* c, const float* sums, unsigned rows,
                  unsigned n, bool saturate);
// The 16 (or 8) rows that a warp holds, of f32 or f16, as floats (rows, n): what `add_fragment` writes.
void read_fragment(const Warp&, Sum, const std::vector<Slot>& d, float* out, unsigned rows, unsigned n);

}  // namespace ptx
