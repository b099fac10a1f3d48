// Matrices in shared memory as wgmma and tcgen05 see them: a 64-bit descriptor and a layout of 16-byte chunks.
#pragma once
#include <vector>

#include "check/check.h"

namespace ptx {

// The swizzle XORs address bits 4.. with bits 7.. ; b128_32 (bits 5-6 with 7-8) keeps pairs of chunks together.
enum class SmemSwizzle : uint8_t { none, b32, b64, b128, b128_32 };

// PTX ISA 9.7.15.5.1.2.2 "Matrix Descriptor Format" (wgmma), 9.7.16.4.1 "Shared memory descriptor" (tcgen05). In bytes.
struct SmemMatrix {
  uint32_t start = 0, leading = 0, stride = 0;
  SmemSwizzle swizzle = SmemSwizzle::none;
};
SmemMatrix wgmma_matrix(const Context&, uint64_t descriptor);
SmemMatrix tcgen05_matrix(const Context&, uint64_t descriptor);

// The extent that an instruction reads: `mn` rows (or columns) of `k` elements, `bytes` each. K-major: out (mn, k);
// MN-major: out (k, mn). K-major elements narrower than a byte come as bytes, `k` counting those.
struct SmemExtent {
  unsigned mn, k, bytes;
  bool mn_major;
};

// Copies the matrix out of `owner`'s shared memory in the order that SmemExtent says. Fails when it leaves the memory.
// `touched`: null, or the 16-byte chunks that were read as ranges (offset, bytes), joined where they touch.
using Ranges = std::vector<std::pair<uint32_t, uint32_t>>;
void read_smem_matrix(const Context&, Cta& owner, const SmemMatrix&, const SmemExtent&, uint8_t* out, Ranges* touched);

}  // namespace ptx
