#include "async/tensormap.h"

#include <cstring>

namespace ptx {

namespace {

uint64_t get(const uint8_t* bytes, unsigned at, unsigned bits) {
  uint64_t value = 0;
  for (unsigned i = 0; i < bits; i++) value |= uint64_t{bytes[(at + i) / 8] >> ((at + i) % 8) & 1u} << i;
  return value;
}

void set(uint8_t* bytes, unsigned at, unsigned bits, uint64_t value) {
  for (unsigned i = 0; i < bits; i++) {
    uint8_t& byte = bytes[(at + i) / 8];
    const uint8_t bit = static_cast<uint8_t>(1u << ((at + i) % 8));
    byte = static_cast<uint8_t>(value >> i & 1 ? byte | bit : byte & ~bit);
  }
}

// The hardware has one number for f32 and tf32 (and their .ftz forms) and a bit that asks for the rounding.
constexpr unsigned kPacked = 11;   // b4x16, then b4x16_p64, b6x16_p32

Element element_of(unsigned number, bool round) {
  if (number >= kPacked) return static_cast<Element>(number - kPacked + static_cast<unsigned>(Element::b4x16));
  if (round && number == static_cast<unsigned>(Element::f32)) return Element::tf32;
  if (round && number == static_cast<unsigned>(Element::f32_ftz)) return Element::tf32_ftz;
  return static_cast<Element>(number);
}

unsigned number_of(Element e) {
  if (e >= Element::b4x16) return static_cast<unsigned>(e) - static_cast<unsigned>(Element::b4x16) + kPacked;
  if (e == Element::tf32) return static_cast<unsigned>(Element::f32);
  if (e == Element::tf32_ftz) return static_cast<unsigned>(Element::f32_ftz);
  return static_cast<unsigned>(e);
}

std::string dimension(const char* what, unsigned d, uint64_t value) {
  return std::string(what) + " of dimension " + std::to_string(d) + " is " + std::to_string(value);
}

}  // namespace

unsigned element_bits(Element e) {
  switch (e) {
    case Element::u8: return 8;
    case Element::u16: case Element::f16: case Element::bf16: return 16;
    case Element::u64: case Element::s64: case Element::f64: return 64;
    case Element::b4x16: case Element::b4x16_p64: return 4;
    case Element::b6x16_p32: return 6;
    default: return 32;
  }
}

const char* element_name(Element e) {
  static const char* const names[] = {"u8",  "u16",     "u32", "s32",  "u64",  "s64",      "f16",   "f32",
                                      "f32.ftz", "f64", "bf16", "tf32", "tf32.ftz", "b4x16", "b4x16_p64", "b6x16_p32"};
  return names[static_cast<unsigned>(e)];
}

TensorMap decode_tensor_map(const uint8_t* bytes) {
  TensorMap t;
  t.base = get(bytes, 0, 64);
  t.rank = static_cast<unsigned>(get(bytes, 68, 3)) + 1;
  const unsigned number = static_cast<unsigned>(get(bytes, 71, 4));
  // Numbers 14 and 15 are no type; why_invalid() cannot see them in a TensorMap, so the rank is made impossible.
  if (number > 13) t.rank = 0;
  else t.element = element_of(number, get(bytes, 80, 1));
  t.interleave = static_cast<unsigned>(get(bytes, 75, 2));
  t.swizzle = static_cast<Swizzle>(get(bytes, 77, 2));
  t.nan_fill = get(bytes, 79, 1);
  t.atomicity = static_cast<Atomicity>(get(bytes, 83, 2));
  t.promotion = static_cast<unsigned>(get(bytes, 85, 2));
  for (unsigned d = 0; d < 5 && d < t.rank; d++) {
    if (d) t.stride[d] = get(bytes, 96 + 32 * (d - 1), 32) << 4;
    t.size[d] = get(bytes, 256 + 32 * d, 32) + 1;
    t.step[d] = static_cast<uint32_t>(get(bytes, 416 + 3 * d, 3)) + 1;
    t.box[d] = static_cast<uint32_t>(get(bytes, 440 + 8 * d, 8)) + 1;
  }
  return t;
}

void encode_tensor_map(const TensorMap& t, uint8_t* bytes) {
  std::memset(bytes, 0, kTensorMapBytes);
  set(bytes, 0, 64, t.base);
  set(bytes, 68, 3, t.rank - 1);
  set(bytes, 71, 4, number_of(t.element));
  set(bytes, 75, 2, t.interleave);
  set(bytes, 77, 2, static_cast<unsigned>(t.swizzle));
  set(bytes, 79, 1, t.nan_fill);
  set(bytes, 80, 1, t.element == Element::tf32 || t.element == Element::tf32_ftz);
  set(bytes, 83, 2, static_cast<unsigned>(t.atomicity));
  set(bytes, 85, 2, t.promotion);
  for (unsigned d = 0; d < 5; d++) {
    if (d) set(bytes, 96 + 32 * (d - 1), 32, t.stride[d] >> 4);
    set(bytes, 256 + 32 * d, 32, t.size[d] - 1);
    set(bytes, 416 + 3 * d, 3, t.step[d] - 1);
    set(bytes, 440 + 8 * d, 8, t.box[d] - 1);
  }
}

std::string why_invalid(const TensorMap& t) {
  if (t.rank < 1 || t.rank > 5) return "the bytes are no tensor map: rank or element type is impossible";
  if (t.interleave) return "interleaved layouts are not supported";
  const bool padded = t.element == Element::b4x16_p64 || t.element == Element::b6x16_p32;
  const unsigned align = padded ? 32 : 16;
  if (t.base % align) return "the base address is not aligned to " + std::to_string(align) + " bytes";
  const unsigned bits = element_bits(t.element);
  for (unsigned d = 0; d < t.rank; d++) {
    if (t.size[d] < 1 || t.size[d] > 1ull << 32)
      return dimension("the size", d, t.size[d]) + ", accepted are 1 to 2^32";
    if (t.box[d] < 1 || t.box[d] > 256) return dimension("the box", d, t.box[d]) + ", accepted are 1 to 256";
    if (t.step[d] < 1 || t.step[d] > 8) return dimension("the element stride", d, t.step[d]) + ", accepted are 1 to 8";
    // 2^36: what 32 bits of 16 bytes hold. The driver takes up to 2^40 and keeps the rest where this does not look.
    if (d && (t.stride[d] % align || t.stride[d] >= 1ull << 36))
      return dimension("the stride", d, t.stride[d]) + " bytes, accepted are multiples of " + std::to_string(align) +
             " below 2^36";
  }
  const unsigned inner = t.box[0] * bits;   // bits
  if (padded && (t.box[0] != 128 || t.size[0] % 128))
    return std::string(element_name(t.element)) + " needs a box of 128 elements and a multiple of 128 elements";
  if (t.element == Element::b4x16 && t.size[0] % 2) return "b4x16 needs an even number of elements";
  if (inner % 128) return "the box's inner dimension is " + std::to_string(inner) + " bits, no multiple of 16 bytes";
  const unsigned bytes = padded ? 128 : inner / 8;
  if (t.swizzle != Swizzle::none && bytes > swizzle_bytes(t.swizzle))
    return "the box's inner dimension of " + std::to_string(bytes) + " bytes is wider than the swizzle of " +
           std::to_string(swizzle_bytes(t.swizzle));
  if (t.atomicity != Atomicity::b16 && t.swizzle != Swizzle::b128)
    return "only the 128-byte swizzle has an atomicity other than 16 bytes";
  if (padded && ((t.swizzle != Swizzle::none && t.swizzle != Swizzle::b128) || t.atomicity == Atomicity::b32_flip8))
    return std::string(element_name(t.element)) + " goes with no swizzle, or 128 bytes without 8-byte flip";
  const bool floating = (t.element >= Element::f16 && t.element <= Element::tf32_ftz);
  if (t.nan_fill && !floating) return std::string("NaN fill with elements of ") + element_name(t.element);
  return "";
}

uint32_t swizzled(const TensorMap& t, uint32_t at) {
  const uint32_t line = at >> 7;   // 128-byte line of shared memory
  switch (t.swizzle) {
    case Swizzle::none: return at;
    case Swizzle::b32: return at ^ (line & 1) << 4;
    case Swizzle::b64: return at ^ (line & 3) << 4;
    default: break;
  }
  switch (t.atomicity) {
    case Atomicity::b16: return at ^ (line & 7) << 4;
    case Atomicity::b32: return at ^ (line & 3) << 5;
    case Atomicity::b32_flip8: return at ^ (line & 3) << 5 ^ (line & 1) << 3;
    default: return at ^ (line & 1) << 6;
  }
}

}  // namespace ptx
