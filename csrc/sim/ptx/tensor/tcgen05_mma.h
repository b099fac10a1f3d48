// tcgen05.mma between its decoding (tcgen05_mma.cpp) and the product it computes (tcgen05_product.cpp).
#pragma once
#include "tensor/matmul.h"
#include "tensor/smem_matrix.h"
#include "tensor/tcgen05.h"

namespace ptx {

// The kinds of 9.7.16.10 whose operands are not scaled, then those with block scaling.
enum class MmaKind : uint8_t { f16, tf32, f8f6f4, i8, mxf8f6f4, mxf4, mxf4nvf4 };

// What the instruction's text says.
struct Mma {
  MmaKind kind = MmaKind::f16;
  std::string name;                 // "f16"
  bool pair = false, stationary = false, tensor_a = false;
  unsigned block = 0;               // elements that share a scale factor; 0: no block scaling
  Address d, a, scale_a, scale_b;
  Slot a_descriptor = 0, b_descriptor = 0, instruction = 0;
  std::vector<Slot> disable;        // words of disable-output-lane
  Slot enable = 0, zero_columns = 0;
  bool enable_negated = false;
  unsigned scale_d = 0;             // D is taken times 2^-scale_d
};

// One issue of it: the instruction descriptor taken apart (9.7.16.4.2) and the operands' values.
struct MmaJob {
  const Mma* mma = nullptr;
  unsigned m = 0, n = 0, k = 0;     // of the whole operation, both CTAs
  Element a_type = Element::f16, b_type = Element::f16;
  enum class D : uint8_t { f16, f32, s32 } d_type = D::f32;
  bool negate_a = false, negate_b = false, a_mn_major = false, b_mn_major = false, saturate = false;
  bool accumulate = false, ue8m0 = false;
  unsigned scale_a_id = 0, scale_b_id = 0;   // byte of a tensor memory word that holds the first scale factor
  TensorPlace d{}, a{}, scale_a{}, scale_b{};
  uint64_t a_descriptor = 0, b_descriptor = 0;
  uint32_t disable[8] = {};
};

// The operation itself, on the CTAs of the group; checks all addresses.
void run_product(const Context&, const std::vector<Cta*>&, const MmaJob&, const AsyncRef&);

}  // namespace ptx
