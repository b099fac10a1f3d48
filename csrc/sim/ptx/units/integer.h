// Integer semantics of PTX ISA 9.7.1, 9.7.2 and 9.7.8, one lane at a time.
#pragma once
#include <algorithm>
#include <limits>
#include <type_traits>

#include "machine/lanes.h"

namespace ptx {

template <class T>
using Unsigned = std::make_unsigned_t<T>;
template <class T>
constexpr unsigned kBits = sizeof(T) * 8;
template <unsigned bytes, bool is_signed>
struct IntegerOf;
template <>
struct IntegerOf<2, false> {
  using Type = uint16_t;
};
template <>
struct IntegerOf<2, true> {
  using Type = int16_t;
};
template <>
struct IntegerOf<4, false> {
  using Type = uint32_t;
};
template <>
struct IntegerOf<4, true> {
  using Type = int32_t;
};
template <>
struct IntegerOf<8, false> {
  using Type = uint64_t;
};
template <>
struct IntegerOf<8, true> {
  using Type = int64_t;
};
template <class T>
using Twice = typename IntegerOf<sizeof(T) == 8 ? 8 : sizeof(T) * 2, std::is_signed_v<T>>::Type;

// Arithmetic wraps: it is done on unsigned values that are at least as wide as int.
template <class T>
using Modular = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

#define PTX_BINARY(name, expression)         \
  struct name {                              \
    template <class T>                       \
    static PTX_INLINE auto of(T a, T b) {    \
      using M [[maybe_unused]] = Modular<T>; \
      return expression;                     \
    }                                        \
  };

PTX_BINARY(AddInt, static_cast<T>(static_cast<M>(a) + static_cast<M>(b)))
PTX_BINARY(SubInt, static_cast<T>(static_cast<M>(a) - static_cast<M>(b)))
PTX_BINARY(MulLow, static_cast<T>(static_cast<M>(a) * static_cast<M>(b)))
PTX_BINARY(MulWide, static_cast<Twice<T>>(static_cast<Twice<T>>(a) * static_cast<Twice<T>>(b)))
PTX_BINARY(MinInt, (a < b ? a : b))
PTX_BINARY(MaxInt, (a > b ? a : b))
PTX_BINARY(MinRelu, static_cast<T>((a < b ? a : b) > 0 ? (a < b ? a : b) : 0))
PTX_BINARY(MaxRelu, static_cast<T>((a > b ? a : b) > 0 ? (a > b ? a : b) : 0))
PTX_BINARY(And, static_cast<T>(a& b))
PTX_BINARY(Or, static_cast<T>(a | b))
PTX_BINARY(Xor, static_cast<T>(a ^ b))

template <class T>
PTX_INLINE T saturate(int64_t v) {
  return static_cast<T>(
      std::min<int64_t>(std::max<int64_t>(v, std::numeric_limits<T>::min()), std::numeric_limits<T>::max()));
}
struct AddSat {
  template <class T>
  static PTX_INLINE T of(T a, T b) {
    return saturate<T>(static_cast<int64_t>(a) + b);
  }
};
struct SubSat {
  template <class T>
  static PTX_INLINE T of(T a, T b) {
    return saturate<T>(static_cast<int64_t>(a) - b);
  }
};

template <class T>
PTX_INLINE T multiply_high(T a, T b) {
  if constexpr (sizeof(T) == 8) {
    using W = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return static_cast<T>(static_cast<W>(a) * static_cast<W>(b) >> 64);
  } else {
    return static_cast<T>(static_cast<Twice<T>>(static_cast<Twice<T>>(a) * static_cast<Twice<T>>(b)) >> kBits<T>);
  }
}
PTX_BINARY(MulHigh, multiply_high(a, b))

// Division by zero is undefined in PTX; dead paths of compiled kernels execute it. As the hardware does: all ones.
struct Div {
  template <class T>
  static PTX_INLINE T of(T a, T b) {
    if (b == 0) return static_cast<T>(~static_cast<T>(0));
    if constexpr (std::is_signed_v<T>)
      if (b == -1) return static_cast<T>(0 - static_cast<Modular<T>>(a));
    return static_cast<T>(a / b);
  }
};
struct Rem {
  template <class T>
  static PTX_INLINE T of(T a, T b) {
    if (b == 0) return a;
    if constexpr (std::is_signed_v<T>)
      if (b == -1) return 0;
    return static_cast<T>(a % b);
  }
};

// Shifts: amounts beyond the width are clamped (PTX ISA 9.7.8.8, 9.7.8.9). The amount is always 32 bits.
struct ShiftLeft {
  template <class T>
  static PTX_INLINE T of(T a, uint32_t n) {
    return n >= kBits<T> ? 0 : static_cast<T>(static_cast<Modular<T>>(a) << n);
  }
};
struct ShiftRight {
  template <class T>
  static PTX_INLINE T of(T a, uint32_t n) {
    if constexpr (std::is_signed_v<T>) return static_cast<T>(a >> std::min(n, kBits<T> - 1));
    else return n >= kBits<T> ? 0 : static_cast<T>(a >> n);
  }
};

struct Not {
  template <class T>
  static PTX_INLINE T of(T a) {
    return static_cast<T>(~a);
  }
};
struct LogicalNot {
  template <class T>
  static PTX_INLINE T of(T a) {
    return a == 0 ? 1 : 0;
  }
};
struct NegInt {
  template <class T>
  static PTX_INLINE T of(T a) {
    return static_cast<T>(0 - static_cast<Modular<T>>(a));
  }
};
struct AbsInt {
  template <class T>
  static PTX_INLINE T of(T a) {
    return a < 0 ? NegInt::of(a) : a;
  }
};
struct PopCount {
  template <class T>
  static PTX_INLINE uint32_t of(T a) {
    return static_cast<uint32_t>(__builtin_popcountll(a));
  }
};
struct LeadingZeros {
  template <class T>
  static PTX_INLINE uint32_t of(T a) {
    return a == 0 ? kBits<T> : static_cast<uint32_t>(__builtin_clzll(a)) - (64 - kBits<T>);
  }
};
struct BitReverse {
  template <class T>
  static PTX_INLINE T of(T a) {
    T out = 0;
    for (unsigned i = 0; i < kBits<T>; i++) out = static_cast<T>(out << 1 | (a >> i & 1));
    return out;
  }
};
template <bool shift>
struct FindBit {
  template <class T>
  static PTX_INLINE uint32_t of(T a) {
    Unsigned<T> v = static_cast<Unsigned<T>>(a < 0 ? ~a : a);
    if (v == 0) return ~0u;
    const uint32_t at = 63u - static_cast<uint32_t>(__builtin_clzll(v));
    return shift ? kBits<T> - 1 - at : at;
  }
};

template <class T>
PTX_INLINE T extract_field(T a, uint32_t b, uint32_t c) {
  const uint32_t msb = kBits<T> - 1, pos = b & 0xff, len = c & 0xff;
  using U = Unsigned<T>;
  const U bits = static_cast<U>(a);
  const bool fill = std::is_signed_v<T> && len != 0 && (bits >> std::min(pos + len - 1, msb) & 1);
  const U field = pos > msb ? 0 : static_cast<U>(bits >> pos);
  const uint32_t have = pos > msb ? 0 : std::min(len, msb + 1 - pos);
  const U mask = have > msb ? ~static_cast<U>(0) : static_cast<U>((static_cast<U>(1) << have) - 1);
  return static_cast<T>(fill ? field | ~mask : field & mask);
}
template <class T>
PTX_INLINE T insert_field(T a, T b, uint32_t c, uint32_t d) {
  const uint32_t msb = kBits<T> - 1, pos = c & 0xff, len = d & 0xff;
  if (pos > msb || len == 0) return b;
  const uint32_t have = std::min(len, msb + 1 - pos);
  const T ones = have > msb ? ~static_cast<T>(0) : static_cast<T>((static_cast<T>(1) << have) - 1);
  return static_cast<T>((b & ~(ones << pos)) | (a & ones) << pos);
}

#undef PTX_BINARY

}  // namespace ptx
