#include "tensor/matmul.h"

#include <algorithm>
#include <array>

#include "machine/lanes.h"

// Without it the sums of a tile stay in memory: at -O2 short loops over arrays of vectors are not unrolled.
#if defined(__clang__)
#define PTX_UNROLL _Pragma("unroll")
#else
#define PTX_UNROLL _Pragma("GCC unroll 8")
#endif

namespace ptx {
namespace {

// Eight lanes at once by the compiler's vector extension: the same arithmetic whatever the machine's registers are.
using F8 = float __attribute__((vector_size(32), aligned(4), may_alias));
using U8 = uint32_t __attribute__((vector_size(32), aligned(4), may_alias));
using H8 = uint16_t __attribute__((vector_size(16), aligned(1), may_alias));

using ByteTable = std::array<float, 256>;

template <typename Decode>
ByteTable byte_table(Decode decode_byte) {
  ByteTable table;
  for (unsigned code = 0; code < 256; code++) table[code] = decode_byte(code);
  return table;
}

// What a byte of each type is worth when an element has a byte to itself.
const ByteTable& table_of(Element type) {
  static const ByteTable e4m3 = byte_table([](unsigned c) { return decode(kE4M3, c); });
  static const ByteTable e5m2 = byte_table([](unsigned c) { return decode(kE5M2, c); });
  static const ByteTable e3m2 = byte_table([](unsigned c) { return decode(kE3M2, c); });
  static const ByteTable e2m3 = byte_table([](unsigned c) { return decode(kE2M3, c); });
  static const ByteTable e2m1 = byte_table([](unsigned c) { return decode(kE2M1, c >> 2); });
  static const ByteTable s8 = byte_table([](unsigned c) { return static_cast<float>(static_cast<int8_t>(c)); });
  static const ByteTable u8 = byte_table([](unsigned c) { return static_cast<float>(c); });
  switch (type) {
    case Element::e4m3: return e4m3;
    case Element::e5m2: return e5m2;
    case Element::e3m2: return e3m2;
    case Element::e2m3: return e2m3;
    case Element::e2m1: return e2m1;
    case Element::s8: return s8;
    default: return u8;
  }
}

float nibble(Element type, unsigned code) {
  if (type == Element::e2m1) return decode(kE2M1, code);
  return static_cast<float>(type == Element::s4 && code >= 8 ? static_cast<int>(code) - 16 : static_cast<int>(code));
}

bool is_nibble(Element type) { return type == Element::e2m1 || type == Element::s4 || type == Element::u4; }

PTX_CLONES void decode_bf16(const uint8_t* bytes, unsigned count, float* out) {
  for (unsigned i = 0; i < count; i += 8) {
    const U8 wide = __builtin_convertvector(*reinterpret_cast<const H8*>(bytes + 2 * i), U8);
    *reinterpret_cast<U8*>(out + i) = wide << 16;
  }
}

PTX_CLONES void decode_f16(const uint8_t* bytes, unsigned count, float* out) {
  for (unsigned i = 0; i < count; i += 8) {
    const U8 code = __builtin_convertvector(*reinterpret_cast<const H8*>(bytes + 2 * i), U8);
    const U8 magnitude = code & 0x7fffu, moved = magnitude << 13;
    F8 scaled = reinterpret_cast<F8>(moved) * as_float(0x77800000u);   // 2^112, as in f32_of_f16
    const U8 special = reinterpret_cast<U8>(magnitude >= 0x7c00u);     // all ones where infinity or NaN
    const U8 value = (reinterpret_cast<U8>(scaled) & ~special) | ((moved | 0x7f800000u) & special);
    *reinterpret_cast<U8*>(out + i) = value | (code & 0x8000u) << 16;
  }
}

PTX_CLONES void decode_tf32(const uint8_t* bytes, unsigned count, float* out) {
  for (unsigned i = 0; i < count; i += 8)
    *reinterpret_cast<U8*>(out + i) = *reinterpret_cast<const U8*>(bytes + 4 * i) & 0xffffe000u;
}

// `R` rows by 8 * `C` columns of D, held in registers over k.
template <unsigned R, unsigned C>
inline __attribute__((always_inline)) void tile(Left a, const float* b, unsigned stride, unsigned k,
                                                float* const* d, bool accumulate) {
  F8 sum[R][C] = {};
  for (unsigned step = 0; step < k; step++) {
    F8 column[C];
    PTX_UNROLL
    for (unsigned c = 0; c < C; c++) column[c] = *reinterpret_cast<const F8*>(b + step * stride + 8 * c);
    PTX_UNROLL
    for (unsigned r = 0; r < R; r++) {
      const float value = a.data[r * a.row + step * a.step];
      PTX_UNROLL
      for (unsigned c = 0; c < C; c++) sum[r][c] += column[c] * value;
    }
  }
  PTX_UNROLL
  for (unsigned r = 0; r < R; r++)
    PTX_UNROLL
    for (unsigned c = 0; c < C; c++) {
      F8* out = reinterpret_cast<F8*>(d[r] + 8 * c);
      *out = accumulate ? *out + sum[r][c] : sum[r][c];
    }
}

}  // namespace

unsigned bytes_of(Element type, Packing packing, unsigned count) {
  if (type == Element::tf32) return 4 * count;
  if (type == Element::f16 || type == Element::bf16) return 2 * count;
  return is_nibble(type) && packing == Packing::dense ? count / 2 : count;
}

void decode_elements(Element type, Packing packing, const uint8_t* bytes, unsigned count, float* out) {
  if (type == Element::bf16) return decode_bf16(bytes, count, out);
  if (type == Element::f16) return decode_f16(bytes, count, out);
  if (type == Element::tf32) return decode_tf32(bytes, count, out);
  const bool six = type == Element::e3m2 || type == Element::e2m3;
  if (packing == Packing::padded && (six || type == Element::e2m1)) {
    const ByteTable& table = table_of(type);
    for (unsigned first = 0; first < count; first += 16) {
      uint8_t codes[16];
      unpack_sixteen(six ? 6 : 4, bytes + first, codes);
      for (unsigned i = 0; i < 16; i++) out[first + i] = table[six ? codes[i] : codes[i] << 2];
    }
    return;
  }
  if (is_nibble(type) && packing == Packing::dense) {
    float value[16];
    for (unsigned code = 0; code < 16; code++) value[code] = nibble(type, code);
    for (unsigned i = 0; i < count; i++) out[i] = value[bytes[i / 2] >> (i % 2 * 4) & 15];
    return;
  }
  const ByteTable& table = table_of(type);
  for (unsigned i = 0; i < count; i++) out[i] = table[bytes[i]];
}

void unpack_sixteen(unsigned bits, const uint8_t packed[16], uint8_t out[16]) {
  for (unsigned i = 0; i < 16; i++) {
    const unsigned at = i * bits, low = packed[at / 8], high = at % 8 + bits > 8 ? packed[at / 8 + 1] : 0;
    out[i] = static_cast<uint8_t>((low | high << 8) >> at % 8 & ((1u << bits) - 1));
  }
}

void place_columns(const float* in, unsigned n, unsigned k, bool k_major, float* panel, unsigned stride) {
  if (!k_major) {
    for (unsigned step = 0; step < k; step++) std::copy_n(in + step * n, n, panel + step * stride);
    return;
  }
  for (unsigned column = 0; column < n; column++)
    for (unsigned step = 0; step < k; step++) panel[step * stride + column] = in[column * k + step];
}

PTX_CLONES void multiply(Left a, const float* b, unsigned stride, unsigned m, unsigned n, unsigned k, float* const* d,
                         bool accumulate) {
  for (unsigned j = 0; j < n; j += 16) {
    const bool wide = j + 16 <= n;
    for (unsigned i = 0; i < m; i += 4) {
      const Left rows{a.data + i * a.row, a.row, a.step};
      float* out[4];
      const unsigned left = std::min(4u, m - i);
      for (unsigned r = 0; r < left; r++) out[r] = d[i + r] + j;
      if (left == 4 && wide) {
        tile<4, 2>(rows, b + j, stride, k, out, accumulate);
      } else {
        for (unsigned r = 0; r < left; r++) {
          const Left row{rows.data + r * a.row, a.row, a.step};
          if (wide) tile<1, 2>(row, b + j, stride, k, out + r, accumulate);
          else tile<1, 1>(row, b + j, stride, k, out + r, accumulate);
        }
      }
    }
  }
}

uint32_t add_s32(uint32_t accumulator, float sum, bool saturate) {
  const int64_t total = static_cast<int64_t>(static_cast<int32_t>(accumulator)) + static_cast<int64_t>(sum);
  if (!saturate) return static_cast<uint32_t>(total);
  return static_cast<uint32_t>(static_cast<int32_t>(std::clamp<int64_t>(total, INT32_MIN, INT32_MAX)));
}

}  // namespace ptx
