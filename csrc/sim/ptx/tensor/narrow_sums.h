// Sums of products of 8-bit floats as Hopper's tensor cores make them, which keep fewer bits than float has.
//
// The PTX ISA leaves the precision open. What a Hopper GPU does is known bit by bit (arXiv 2511.10909: T-FDPA with F = 13
// and RZ-E8M13): the place of a product is the sum of its operands' exponents, that of the sum so far its own exponent;
// all are cut towards zero 13 bits below the highest place and added, and the result is cut to 13 bits of fraction.
#pragma once
#include "tensor/matmul.h"

namespace ptx {

constexpr unsigned kNarrowStep = 32;  // products of an element of D in one instruction

// d[i][j] += sum over k of a[i * 32 + k] * b[k * n + j]; i < m, j < n (a multiple of 8). `d`: a pointer for every row.
// The operands are numbers of e4m3 or e5m2, as the types say. A result of float is `cut`, one for f16 is not.
void add_narrow(const float* a, Element a_type, const float* b, Element b_type, unsigned m, unsigned n,
                float* const* d, bool cut);

}  // namespace ptx
