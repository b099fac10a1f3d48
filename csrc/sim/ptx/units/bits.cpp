// Carries, bit fields, permutations, three-input logic, dot products (PTX ISA 9.7.1, 9.7.2, 9.7.8, 9.7.9.7).
#include "units/bits.h"

#include <cstdlib>

#include "units/integer.h"

namespace ptx {

namespace {

enum : uint8_t { kCarryIn = 1, kCarryOut = 2, kSubtract = 4, kProduct = 8, kHigh = 16 };

// a + b + CC.CF, or a - b - CC.CF, or part(a * b) + c + CC.CF (PTX ISA 9.7.2).
template <class T>
Step carry(Context& c, const Op& op) {
  using U = Unsigned<T>;
  using W = unsigned __int128;
  auto* d = LanesOf<T>::of(c.warp, op.d[0]);
  const auto* a = LanesOf<T>::of(c.warp, op.s[0]);
  const auto* b = LanesOf<T>::of(c.warp, op.s[1]);
  const auto* e = LanesOf<T>::of(c.warp, op.s[2]);
  for (Mask left = c.mask; left != 0; left &= left - 1) {
    const unsigned l = static_cast<unsigned>(__builtin_ctz(left));
    const U in = op.mode & kCarryIn ? c.warp.carry >> l & 1 : 0;
    U x = static_cast<U>(a[l]), y = static_cast<U>(b[l]);
    if (op.mode & kProduct) {
      x = static_cast<U>(op.mode & kHigh ? MulHigh::of(static_cast<T>(x), static_cast<T>(y))
                                         : MulLow::of(static_cast<T>(x), static_cast<T>(y)));
      y = static_cast<U>(e[l]);
    }
    const W wide = op.mode & kSubtract ? static_cast<W>(x) - y - in : static_cast<W>(x) + y + in;
    d[l] = static_cast<U>(wide);
    if (op.mode & kCarryOut) c.warp.carry = (c.warp.carry & ~(1u << l)) | static_cast<Mask>(wide >> kBits<T> & 1) << l;
  }
  return Step::next;
}

template <class T>
PTX_CLONES Step field_out(Context& c, const Op& op) {
  auto* d = LanesOf<T>::of(c.warp, op.d[0]);
  const auto* a = LanesOf<T>::of(c.warp, op.s[0]);
  const uint32_t *at = c.warp.v32(op.s[1]).x, *size = c.warp.v32(op.s[2]).x;
  each_lane(c.mask, d, [=](unsigned l) { return pack<T>(extract_field(unpack<T>(a[l]), at[l], size[l])); });
  return Step::next;
}
template <class T>
PTX_CLONES Step field_in(Context& c, const Op& op) {
  auto* d = LanesOf<T>::of(c.warp, op.d[0]);
  const auto* a = LanesOf<T>::of(c.warp, op.s[0]);
  const auto* b = LanesOf<T>::of(c.warp, op.s[1]);
  const uint32_t *at = c.warp.v32(op.s[2]).x, *size = c.warp.v32(op.s[3]).x;
  each_lane(c.mask, d, [=](unsigned l) { return insert_field<T>(a[l], b[l], at[l], size[l]); });
  return Step::next;
}

struct MaskBits {
  template <bool clamp>
  static PTX_INLINE uint32_t of(uint32_t a, uint32_t b) {
    const uint32_t a1 = a & 31, b1 = b & 31, sum = a1 + b1;
    const uint32_t low = clamp && a >= 32 ? 0 : ~0u << a1;
    uint32_t high = sum >= 32 || (clamp && (a >= 32 || b >= 32)) ? 0 : ~0u << sum;
    if (high != 0 && b1 == 0) high = ~0u;
    return low & ~high;
  }
};
template <bool clamp, bool is_signed>
PTX_INLINE uint32_t extend(uint32_t a, uint32_t b) {
  const uint32_t n = b & 31;
  if (clamp && b >= 32) return a;
  if (n == 0) return 0;
  const uint32_t mask = ~0u << n;
  return is_signed && (a >> (n - 1) & 1) ? a | mask : a & ~mask;
}
template <bool clamp>
struct BitMask {
  template <class T>
  static PTX_INLINE T of(T a, T b) {
    return MaskBits::of<clamp>(a, b);
  }
};
template <bool clamp, bool is_signed>
struct Extend {
  template <class T>
  static PTX_INLINE T of(T a, T b) {
    return extend<clamp, is_signed>(a, b);
  }
};

struct NthSet {  // PTX ISA 9.7.1.17 "fns"
  template <class T>
  static uint32_t of(T mask, T base, T offset) {
    const int32_t n = static_cast<int32_t>(offset);
    if (n == 0) return base < 32 && (mask >> base & 1) ? base : ~0u;
    uint32_t count = static_cast<uint32_t>(n < 0 ? -static_cast<int64_t>(n) : n) - 1;
    for (int64_t at = base; at >= 0 && at < 32; at += n > 0 ? 1 : -1)
      if (mask >> at & 1 && count-- == 0) return static_cast<uint32_t>(at);
    return ~0u;
  }
};

PTX_INLINE uint32_t pick_byte(uint64_t bytes, uint32_t selector) {
  const uint32_t byte = static_cast<uint32_t>(bytes >> (selector & 7) * 8) & 0xff;
  return selector & 8 ? (byte & 0x80 ? 0xff : 0) : byte;
}
struct Permute {
  template <class T>
  static PTX_INLINE uint32_t of(T a, T b, T selectors) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    uint32_t out = 0;
    for (unsigned i = 0; i < 4; i++) out |= pick_byte(bytes, selectors >> 4 * i & 15) << 8 * i;
    return out;
  }
};
// The special modes as selectors of the general form, by c[1:0] (the table of PTX ISA 9.7.9.7).
constexpr uint16_t kPermutes[6][4] = {{0x3210, 0x4321, 0x5432, 0x6543},   // f4e
                                      {0x5670, 0x6701, 0x7012, 0x0123},   // b4e
                                      {0x0000, 0x1111, 0x2222, 0x3333},   // rc8
                                      {0x3210, 0x3211, 0x3222, 0x3333},   // ecl
                                      {0x0000, 0x1110, 0x2210, 0x3210},   // ecr
                                      {0x1010, 0x3232, 0x1010, 0x3232}};  // rc16
template <unsigned mode>
struct PermuteMode {
  template <class T>
  static PTX_INLINE uint32_t of(T a, T b, T selector) {
    return Permute::of<uint32_t>(a, b, kPermutes[mode][selector & 3]);
  }
};

PTX_CLONES Step lop3(Context& c, const Op& op) {
  uint32_t* d = c.warp.v32(op.d[0]).x;
  const uint32_t *a = c.warp.v32(op.s[0]).x, *b = c.warp.v32(op.s[1]).x, *e = c.warp.v32(op.s[2]).x;
  const uint32_t table = op.mode;
  uint32_t terms[8];  // all ones where the table has a one
  for (unsigned i = 0; i < 8; i++) terms[i] = table >> i & 1 ? ~0u : 0;
  each_lane(c.mask, d, [=](unsigned l) {
    uint32_t out = 0;
    for (unsigned i = 0; i < 8; i++)
      out |= terms[i] & (i & 4 ? a[l] : ~a[l]) & (i & 2 ? b[l] : ~b[l]) & (i & 1 ? e[l] : ~e[l]);
    return out;
  });
  if (op.count == 0) return Step::next;  // .and / .or with a predicate
  const Mask q = op.size ? ~c.warp.pred(op.s[3]) : c.warp.pred(op.s[3]);
  Mask nonzero = 0;
  for (unsigned l = 0; l < kLanes; l++) nonzero |= static_cast<Mask>(d[l] != 0) << l;
  Mask& p = c.warp.pred(op.d[1]);
  p = (p & ~c.mask) | ((op.count == 1 ? nonzero & q : nonzero | q) & c.mask);
  return Step::next;
}

template <bool left, bool clamp>
struct Funnel {
  template <class T>
  static PTX_INLINE uint32_t of(T a, T b, T c) {
    const uint32_t n = clamp ? (c < 32 ? c : 32) : c & 31;
    const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
    return static_cast<uint32_t>(left ? both << n >> 32 : both >> n);
  }
};

struct Sad {
  template <class T>
  static PTX_INLINE T of(T a, T b, T c) {
    return AddInt::of<T>(c, a < b ? SubInt::of(b, a) : SubInt::of(a, b));
  }
};

// Sums of products of the bytes of a with those of b (dp4a) or of the 16-bit halves of a with two bytes of b (dp2a).
template <class A, class B, unsigned shift>
struct Dot {
  template <class T>
  static PTX_INLINE uint32_t of(T a, T b, T c) {
    constexpr unsigned n = 4 / sizeof(A);
    uint32_t sum = c;
    for (unsigned i = 0; i < n; i++)
      sum += static_cast<uint32_t>(static_cast<int32_t>(static_cast<A>(a >> 8 * sizeof(A) * i)) *
                                   static_cast<int32_t>(static_cast<B>(b >> (8 * i + shift))));
    return sum;
  }
};

template <class T>
PTX_INLINE T low24(T v) {
  return std::is_signed_v<T> ? static_cast<T>(static_cast<int32_t>(static_cast<uint32_t>(v) << 8) >> 8)
                             : static_cast<T>(static_cast<uint32_t>(v) & 0xffffff);
}
template <bool high>
struct Mul24 {  // PTX ISA 9.7.1.5: bits 47..16 or 31..0 of a 48-bit product
  template <class T>
  static PTX_INLINE T of(T a, T b) {
    const int64_t p = static_cast<int64_t>(low24(a)) * static_cast<int64_t>(low24(b));
    return static_cast<T>(high ? p >> 16 : p);
  }
};
template <bool high>
struct Mad24 {
  template <class T>
  static PTX_INLINE T of(T a, T b, T c) {
    return AddInt::of<T>(Mul24<high>::of(a, b), c);
  }
};
struct Mad24Sat {
  template <class T>
  static PTX_INLINE T of(T a, T b, T c) {
    return saturate<T>(static_cast<int64_t>(Mul24<true>::of(a, b)) + c);
  }
};

Handler dot_of(bool bytes, bool a_signed, bool b_signed, bool high) {
  if (bytes) {
    if (a_signed)
      return b_signed ? ternary<uint32_t, uint32_t, Dot<int8_t, int8_t, 0>>
                      : ternary<uint32_t, uint32_t, Dot<int8_t, uint8_t, 0>>;
    return b_signed ? ternary<uint32_t, uint32_t, Dot<uint8_t, int8_t, 0>>
                    : ternary<uint32_t, uint32_t, Dot<uint8_t, uint8_t, 0>>;
  }
  if (high) {
    if (a_signed)
      return b_signed ? ternary<uint32_t, uint32_t, Dot<int16_t, int8_t, 16>>
                      : ternary<uint32_t, uint32_t, Dot<int16_t, uint8_t, 16>>;
    return b_signed ? ternary<uint32_t, uint32_t, Dot<uint16_t, int8_t, 16>>
                    : ternary<uint32_t, uint32_t, Dot<uint16_t, uint8_t, 16>>;
  }
  if (a_signed)
    return b_signed ? ternary<uint32_t, uint32_t, Dot<int16_t, int8_t, 0>>
                    : ternary<uint32_t, uint32_t, Dot<int16_t, uint8_t, 0>>;
  return b_signed ? ternary<uint32_t, uint32_t, Dot<uint16_t, int8_t, 0>>
                  : ternary<uint32_t, uint32_t, Dot<uint16_t, uint8_t, 0>>;
}

// Destination and `n` sources of 4 bytes each.
void words(Decoder& d, Op& op, size_t n) {
  d.count(n + 1, n + 1);
  op.d[0] = d.destination(d.operand(0), 4);
  for (size_t i = 0; i < n; i++) op.s[i] = d.source(d.operand(i + 1), 4);
}

void decode_counts(Decoder& d, Op& op, const std::string& root, Modifiers& m) {
  const bool shift = root == "bfind" && m.take("shiftamt");
  const Ty type = m.take_type();
  const bool wide = bytes_of(type) == 8;
  m.done();
  d.count(2, 2);
  op.d[0] = d.destination(d.operand(0), root == "brev" ? bytes_of(type) : 4);
  op.s[0] = d.source(d.operand(1), bytes_of(type));
  if (root == "bfind") {
    if (type == Ty::u32)
      op.run = shift ? unary<uint32_t, uint32_t, FindBit<true>> : unary<uint32_t, uint32_t, FindBit<false>>;
    if (type == Ty::s32)
      op.run = shift ? unary<uint32_t, int32_t, FindBit<true>> : unary<uint32_t, int32_t, FindBit<false>>;
    if (type == Ty::u64)
      op.run = shift ? unary<uint32_t, uint64_t, FindBit<true>> : unary<uint32_t, uint64_t, FindBit<false>>;
    if (type == Ty::s64)
      op.run = shift ? unary<uint32_t, int64_t, FindBit<true>> : unary<uint32_t, int64_t, FindBit<false>>;
    return;
  }
  if (type != Ty::b32 && type != Ty::b64) return;
  if (root == "popc") op.run = wide ? unary<uint32_t, uint64_t, PopCount> : unary<uint32_t, uint32_t, PopCount>;
  if (root == "clz") op.run = wide ? unary<uint32_t, uint64_t, LeadingZeros> : unary<uint32_t, uint32_t, LeadingZeros>;
  if (root == "brev") op.run = wide ? unary<uint64_t, uint64_t, BitReverse> : unary<uint32_t, uint32_t, BitReverse>;
}

void decode_fields(Decoder& d, Op& op, bool insert, Modifiers& m) {
  const Ty type = m.take_type();
  m.done();
  const size_t n = insert ? 2 : 1;
  d.count(n + 3, n + 3);
  op.d[0] = d.destination(d.operand(0), bytes_of(type));
  for (size_t i = 0; i < n + 2; i++) op.s[i] = d.source(d.operand(i + 1), i < n ? bytes_of(type) : 4);
  if (insert) op.run = type == Ty::b32 ? field_in<uint32_t> : type == Ty::b64 ? field_in<uint64_t> : nullptr;
  else
    op.run = type == Ty::u32   ? field_out<uint32_t>
             : type == Ty::s32 ? field_out<int32_t>
             : type == Ty::u64 ? field_out<uint64_t>
             : type == Ty::s64 ? field_out<int64_t>
                               : nullptr;
}

void decode_lop3(Decoder& d, Op& op, Modifiers& m) {
  const std::string join = m.take_optional({"and", "or"}, "");
  m.take_one({"b32"});
  m.done();
  const size_t n = join.empty() ? 5 : 6;
  d.count(n, n);
  const Operand& out = d.operand(0);
  if (!join.empty() && out.kind != Operand::pair) d.fail("'d|p' is expected with '." + join + "'");
  op.d[0] = d.destination(join.empty() ? out : out.parts[0], 4);
  for (size_t i = 0; i < 3; i++) op.s[i] = d.source(d.operand(i + 1), 4);
  if (d.operand(4).kind != Operand::imm || d.operand(4).bits > 255)
    d.fail("the table has to be an immediate of 0 to 255");
  op.mode = static_cast<uint8_t>(d.operand(4).bits);
  if (!join.empty()) {
    bool negated = false;
    op.count = join == "and" ? 1 : 2;
    op.d[1] = d.destination(out.parts[1], 0);
    op.s[3] = d.predicate(d.operand(5), negated);
    op.size = negated;
  }
  op.run = lop3;
}

void decode_permute(Decoder& d, Op& op, Modifiers& m) {
  m.take_one({"b32"});
  const std::string mode = m.take_optional({"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"}, "");
  m.done();
  words(d, op, 3);
  if (mode.empty()) op.run = ternary<uint32_t, uint32_t, Permute>;
  if (mode == "f4e") op.run = ternary<uint32_t, uint32_t, PermuteMode<0>>;
  if (mode == "b4e") op.run = ternary<uint32_t, uint32_t, PermuteMode<1>>;
  if (mode == "rc8") op.run = ternary<uint32_t, uint32_t, PermuteMode<2>>;
  if (mode == "ecl") op.run = ternary<uint32_t, uint32_t, PermuteMode<3>>;
  if (mode == "ecr") op.run = ternary<uint32_t, uint32_t, PermuteMode<4>>;
  if (mode == "rc16") op.run = ternary<uint32_t, uint32_t, PermuteMode<5>>;
}

void decode_dot(Decoder& d, Op& op, bool bytes, Modifiers& m) {
  const bool high = !bytes && m.take_one({"lo", "hi"}) == "hi";
  const Ty a = m.take_type(), b = m.take_type();
  m.done();
  if ((a != Ty::u32 && a != Ty::s32) || (b != Ty::u32 && b != Ty::s32)) d.fail("the types are .u32 or .s32");
  words(d, op, 3);
  op.run = dot_of(bytes, a == Ty::s32, b == Ty::s32, high);
}

void decode_24(Decoder& d, Op& op, bool add, Modifiers& m) {
  const bool high = m.take_one({"lo", "hi"}) == "hi", sat = m.take("sat");
  const Ty type = m.take_type();
  m.done();
  if (sat && (!add || !high || type != Ty::s32)) d.fail("'.sat' is for mad24.hi.s32");
  words(d, op, add ? 3 : 2);
  if (type == Ty::u32 && add)
    op.run = high ? ternary<uint32_t, uint32_t, Mad24<true>> : ternary<uint32_t, uint32_t, Mad24<false>>;
  if (type == Ty::s32 && add)
    op.run = sat    ? ternary<int32_t, int32_t, Mad24Sat>
             : high ? ternary<int32_t, int32_t, Mad24<true>>
                    : ternary<int32_t, int32_t, Mad24<false>>;
  if (type == Ty::u32 && !add)
    op.run = high ? binary<uint32_t, uint32_t, Mul24<true>> : binary<uint32_t, uint32_t, Mul24<false>>;
  if (type == Ty::s32 && !add)
    op.run = high ? binary<int32_t, int32_t, Mul24<true>> : binary<int32_t, int32_t, Mul24<false>>;
}

Handler sad_of(Ty type) {
  switch (type) {
    case Ty::u16: return ternary<uint16_t, uint16_t, Sad>;
    case Ty::s16: return ternary<int16_t, int16_t, Sad>;
    case Ty::u32: return ternary<uint32_t, uint32_t, Sad>;
    case Ty::s32: return ternary<int32_t, int32_t, Sad>;
    case Ty::u64: return ternary<uint64_t, uint64_t, Sad>;
    case Ty::s64: return ternary<int64_t, int64_t, Sad>;
    default: return nullptr;
  }
}

void decode_modes(Decoder& d, Op& op, const std::string& root, Modifiers& m) {
  if (root == "shf") {
    const bool left = m.take_one({"l", "r"}) == "l", clamp = m.take_one({"clamp", "wrap"}) == "clamp";
    m.take_one({"b32"});
    words(d, op, 3);
    if (left)
      op.run =
          clamp ? ternary<uint32_t, uint32_t, Funnel<true, true>> : ternary<uint32_t, uint32_t, Funnel<true, false>>;
    else
      op.run =
          clamp ? ternary<uint32_t, uint32_t, Funnel<false, true>> : ternary<uint32_t, uint32_t, Funnel<false, false>>;
  } else if (root == "fns") {
    m.take_one({"b32"});
    words(d, op, 3);
    op.run = ternary<uint32_t, uint32_t, NthSet>;
  } else if (root == "sad") {
    const Ty type = m.take_type();
    d.count(4, 4);
    op.d[0] = d.destination(d.operand(0), bytes_of(type));
    for (size_t i = 0; i < 3; i++) op.s[i] = d.source(d.operand(i + 1), bytes_of(type));
    op.run = sad_of(type);
  } else {  // bmsk, szext
    const bool clamp = m.take_one({"clamp", "wrap"}) == "clamp", mask = root == "bmsk";
    const std::string type = mask ? m.take_one({"b32"}) : m.take_one({"u32", "s32"});
    words(d, op, 2);
    if (mask) op.run = clamp ? binary<uint32_t, uint32_t, BitMask<true>> : binary<uint32_t, uint32_t, BitMask<false>>;
    else if (type == "s32")
      op.run = clamp ? binary<uint32_t, uint32_t, Extend<true, true>> : binary<uint32_t, uint32_t, Extend<false, true>>;
    else
      op.run =
          clamp ? binary<uint32_t, uint32_t, Extend<true, false>> : binary<uint32_t, uint32_t, Extend<false, false>>;
  }
  m.done();
}

}  // namespace

void decode_carry(Decoder& d, Op& op) {
  std::string root = d.from.parts[0];
  Modifiers m(d.from);
  if (root.back() == 'c') {
    root.pop_back();
    op.mode |= kCarryIn;
  }
  if (root == "mad") op.mode |= kProduct | (m.take_one({"lo", "hi"}) == "hi" ? kHigh : 0);
  if (root == "sub") op.mode |= kSubtract;
  if (m.take("cc")) op.mode |= kCarryOut;
  const Ty type = m.take_type();
  m.done();
  const size_t n = root == "mad" ? 3 : 2;
  d.count(n + 1, n + 1);
  op.d[0] = d.destination(d.operand(0), bytes_of(type));
  for (size_t i = 0; i < n; i++) op.s[i] = d.source(d.operand(i + 1), bytes_of(type));
  if (type == Ty::u32) op.run = carry<uint32_t>;
  if (type == Ty::s32) op.run = carry<int32_t>;
  if (type == Ty::u64) op.run = carry<uint64_t>;
  if (type == Ty::s64) op.run = carry<int64_t>;
}

void decode_bits(Decoder& d, Op& op) {
  const std::string& root = d.from.parts[0];
  Modifiers m(d.from);
  if (root == "popc" || root == "clz" || root == "brev" || root == "bfind") decode_counts(d, op, root, m);
  else if (root == "bfe" || root == "bfi") decode_fields(d, op, root == "bfi", m);
  else if (root == "lop3") decode_lop3(d, op, m);
  else if (root == "prmt") decode_permute(d, op, m);
  else if (root == "dp4a" || root == "dp2a") decode_dot(d, op, root == "dp4a", m);
  else if (root == "mul24" || root == "mad24") decode_24(d, op, root == "mad24", m);
  else decode_modes(d, op, root, m);
}

}  // namespace ptx
