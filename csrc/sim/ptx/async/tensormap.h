// The tensor map of TMA: 128 opaque bytes that the host writes, decoded and encoded. Nothing here knows the simulator.
//
// The layout is not documented; it is what compilers write and cuTensorMapEncodeTiled produces. Offsets in bits:
//   0    base address, 64 bits                          96   strides of dimensions 1..4, 32 bits each, in 16 bytes
//   68   rank - 1, 3 bits                               256  sizes of dimensions 0..4, 32 bits each, minus 1
//   71   element type, 4 bits                           416  element strides of dimensions 0..4, 3 bits each, minus 1
//   75   interleave, 2 bits    77 swizzle, 2 bits       440  box sizes of dimensions 0..4, 8 bits each, minus 1
//   79   fill mode, 1 bit      80 round f32 to tf32, 1 bit
//   83   swizzle atomicity, 2 bits    85 L2 promotion, 2 bits
// The other bits are not read. The fill mode's place, the packed types' numbers above 11 and the element strides are
// inferred from the fields around them, not seen.
#pragma once
#include <cstdint>
#include <string>

namespace ptx {

// Numbered as tensormap.replace numbers them (PTX ISA, table "Tensormap new_val validity").
enum class Element : uint8_t {
  u8, u16, u32, s32, u64, s64, f16, f32, f32_ftz, f64, bf16, tf32, tf32_ftz, b4x16, b4x16_p64, b6x16_p32
};
enum class Swizzle : uint8_t { none, b32, b64, b128 };
enum class Atomicity : uint8_t { b16, b32, b32_flip8, b64 };

struct TensorMap {
  uint64_t base = 0;
  unsigned rank = 1;
  Element element = Element::u8;
  unsigned interleave = 0;            // 0 none, 1 16 bytes, 2 32 bytes
  Swizzle swizzle = Swizzle::none;
  Atomicity atomicity = Atomicity::b16;
  unsigned promotion = 0;             // L2 promotion: a hint
  bool nan_fill = false;
  uint64_t size[5] = {1, 1, 1, 1, 1};        // elements
  uint64_t stride[5] = {0, 0, 0, 0, 0};      // bytes; [0] is not used
  uint32_t box[5] = {1, 1, 1, 1, 1};         // elements
  uint32_t step[5] = {1, 1, 1, 1, 1};        // element strides
};

constexpr unsigned kTensorMapBytes = 128;

TensorMap decode_tensor_map(const uint8_t* bytes);
void encode_tensor_map(const TensorMap&, uint8_t* bytes);   // all 128
// Empty, or what the rules of cuTensorMapEncodeTiled and of PTX ISA 9.7.9.27.1.1 forbid.
std::string why_invalid(const TensorMap&);

unsigned element_bits(Element);                 // in global memory
const char* element_name(Element);
inline unsigned swizzle_bytes(Swizzle s) { return s == Swizzle::none ? 0 : 16u << static_cast<unsigned>(s); }
// Where the byte that would lie at shared address `at` goes: an exclusive-or of address bits (PTX ISA 5.5.7).
uint32_t swizzled(const TensorMap&, uint32_t at);

}  // namespace ptx
