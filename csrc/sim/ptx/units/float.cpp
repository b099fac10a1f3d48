// add sub mul fma mad div min max neg abs on f32, f64, f16, bf16 and the packed types (PTX ISA 9.7.3, 9.7.4, 9.7.5).
#include "units/float.h"

#include "units/float_math.h"

namespace ptx {

namespace {

// How results are finished; in Op::mode.
enum : uint8_t { kFtz = 1, kSat = 2, kRelu = 4, kNan = 8, kAbs = 16, kXorSign = 32 };

enum class Sum : uint8_t { add, sub, mul, fma, div };

// Single precision.
template <Sum S, Nearest R>
struct Single {
  bool ftz, sat;
  explicit Single(const Op& op) : ftz((op.mode & kFtz) != 0), sat((op.mode & kSat) != 0) {}
  PTX_INLINE float finish(float v) const {
    v = canonical(flush(v, ftz));
    return sat ? saturated(v) : v;
  }
  PTX_INLINE float operator()(float a, float b) const {
    a = flush(a, ftz);
    b = flush(b, ftz);
    if constexpr (R == Nearest::rn)
      return finish(S == Sum::add ? a + b : S == Sum::sub ? a - b : S == Sum::mul ? a * b : a / b);
    else if constexpr (S == Sum::mul) return finish(round_float<R>({static_cast<double>(a) * b, 0}));
    else if constexpr (S == Sum::div) return finish(divide(a, b));
    else return finish(add(a, S == Sum::sub ? -b : b));
  }
  PTX_INLINE float operator()(float a, float b, float c) const {
    a = flush(a, ftz);
    b = flush(b, ftz);
    c = flush(c, ftz);
    if constexpr (R == Nearest::rn) return finish(std::fma(a, b, c));
    else return finish(add(static_cast<double>(a) * b, c));
  }
  static PTX_INLINE float add(double a, double b) {
    const float r = round_float<R>(two_sum(a, b));
    // x + (-x) is -0 when rounding down; of zeros only (-0) + (+0) differs from what the addition gives.
    const bool zero = R == Nearest::rm && a + b == 0 && (std::signbit(a) || std::signbit(b));
    return zero ? -0.0f : r;
  }
  static PTX_INLINE float divide(float a, float b) {
    const bool plain = std::isfinite(a) && std::isfinite(b) && b != 0 && a != 0;
    return plain ? round_float<R>(quotient(a, b)) : a / b;
  }
};

// Half precision: exact in double but for a last odd bit, then rounded once.
template <class E, Sum S>
struct Half {
  bool ftz, sat, relu;
  explicit Half(const Op& op) : ftz((op.mode & kFtz) != 0), sat((op.mode & kSat) != 0), relu((op.mode & kRelu) != 0) {}
  PTX_INLINE E finish(double v) const {
    if (relu) v = clamped(v);
    if (sat) v = v > 0 ? (v < 1 ? v : 1) : 0;
    return flush(narrow<E>(v), ftz);
  }
  PTX_INLINE E operator()(E x, E y) const {
    const double a = value_of(flush(x, ftz)), b = value_of(flush(y, ftz));
    return finish(S == Sum::mul ? a * b : to_odd(two_sum(a, S == Sum::sub ? -b : b)));
  }
  PTX_INLINE E operator()(E x, E y, E z) const {
    const double a = value_of(flush(x, ftz)), b = value_of(flush(y, ftz)), c = value_of(flush(z, ftz));
    return finish(to_odd(two_sum(a * b, c)));
  }
};

// Double precision; directed modes through the processor's own.
template <Sum S, Nearest R>
struct Double {
  explicit Double(const Op&) {}
  static double compute(double a, double b) {
    volatile double x = a, y = b;
    return S == Sum::add ? x + y : S == Sum::sub ? x - y : S == Sum::mul ? x * y : x / y;
  }
  double operator()(double a, double b) const {
    return in_mode(R, [=] { return compute(a, b); });
  }
  double operator()(double a, double b, double c) const {
    return in_mode(R, [=] {
      volatile double x = a, y = b, z = c;
      return std::fma(x, y, z);
    });
  }
};

// .f32.f16 and .f32.bf16: the narrow operands are widened first (PTX ISA 9.7.5).
template <class E, Sum S, Nearest R>
PTX_CLONES Step mixed(Context& c, const Op& op) {
  const Single<S, R> f(op);
  const uint32_t *a = c.warp.v32(op.s[0]).x, *b = c.warp.v32(op.s[1]).x, *e = c.warp.v32(op.s[2]).x;
  each_lane(c.mask, c.warp.v32(op.d[0]).x, [=](unsigned l) {
    const float x = value_of(unpack<E>(a[l]));
    if constexpr (S == Sum::fma) return bit_cast<uint32_t>(f(x, value_of(unpack<E>(b[l])), bit_cast<float>(e[l])));
    else return bit_cast<uint32_t>(f(x, bit_cast<float>(b[l])));
  });
  return Step::next;
}

template <template <Sum, Nearest> class F, class E, unsigned n, Sum S, unsigned arity>
Handler by_rounding(const std::string& r) {
  if (r == "rz") return elementwise<E, n, F<S, Nearest::rz>, arity>;
  if (r == "rm") return elementwise<E, n, F<S, Nearest::rm>, arity>;
  if (r == "rp") return elementwise<E, n, F<S, Nearest::rp>, arity>;
  return elementwise<E, n, F<S, Nearest::rn>, arity>;
}
template <class E, Sum S>
Handler mixed_by_rounding(const std::string& r) {
  return r == "rz"   ? mixed<E, S, Nearest::rz>
         : r == "rm" ? mixed<E, S, Nearest::rm>
         : r == "rp" ? mixed<E, S, Nearest::rp>
                     : mixed<E, S, Nearest::rn>;
}

template <Sum S, unsigned arity>
Handler sum_handler(Ty type, const std::string& rounding) {
  switch (type) {
    case Ty::f32: return by_rounding<Single, float, 1, S, arity>(rounding);
    case Ty::f32x2: return by_rounding<Single, float, 2, S, arity>(rounding);
    case Ty::f64: return by_rounding<Double, double, 1, S, arity>(rounding);
    case Ty::f16: return elementwise<F16, 1, Half<F16, S>, arity>;
    case Ty::f16x2: return elementwise<F16, 2, Half<F16, S>, arity>;
    case Ty::bf16: return elementwise<BF16, 1, Half<BF16, S>, arity>;
    case Ty::bf16x2: return elementwise<BF16, 2, Half<BF16, S>, arity>;
    default: return nullptr;
  }
}

bool is_f16(Ty t) { return t == Ty::f16 || t == Ty::f16x2; }
bool is_half(Ty t) { return is_f16(t) || t == Ty::bf16 || t == Ty::bf16x2; }

// The modifiers of add sub mul fma; those that the type does not have are refused.
std::string take_finish(Decoder& d, Op& op, Modifiers& m, Ty type, bool fma) {
  const std::string rounding = m.take_optional({"rn", "rz", "rm", "rp"}, "");
  if (fma && rounding.empty()) d.fail("a rounding modifier is required");
  if (is_half(type) && !rounding.empty() && rounding != "rn")
    d.fail("'." + rounding + "' is not one of half precision");
  if (m.take("ftz")) op.mode |= kFtz;
  if (m.take("sat")) op.mode |= kSat;
  if (m.take("relu")) op.mode |= kRelu;
  if (op.mode & kFtz && type != Ty::f32 && type != Ty::f32x2 && !is_f16(type)) d.fail("'.ftz' is not one of this type");
  if (op.mode & kSat && type != Ty::f32 && !is_f16(type)) d.fail("'.sat' is not one of this type");
  if (op.mode & kRelu && !(fma && is_half(type))) d.fail("'.relu' is for fma in half precision");
  if (op.mode & kSat && op.mode & kRelu) d.fail("'.sat' and '.relu' exclude each other");
  return rounding;
}

void operands(Decoder& d, Op& op, size_t n, unsigned bytes) {
  d.count(n + 1, n + 1);
  op.d[0] = d.destination(d.operand(0), bytes);
  for (size_t i = 0; i < n; i++) op.s[i] = d.source(d.operand(i + 1), bytes);
}

void decode_mixed(Decoder& d, Op& op, Modifiers& m, const std::string& root) {
  const bool fma = root == "fma";
  const Ty narrow = m.take_type();
  if ((narrow != Ty::f16 && narrow != Ty::bf16) || root == "mul")
    d.fail("mixed precision is add, sub and fma with .f32.f16 and .f32.bf16");
  const std::string r = take_finish(d, op, m, Ty::f32, fma);
  if (op.mode & kFtz) d.fail("'.ftz' is not one of mixed precision");
  m.done();
  d.count(fma ? 4 : 3, fma ? 4 : 3);
  op.d[0] = d.destination(d.operand(0), 4);
  op.s[0] = d.source(d.operand(1), 2);
  op.s[1] = d.source(d.operand(2), fma ? 2 : 4);
  if (fma) op.s[2] = d.source(d.operand(3), 4);
  const bool half = narrow == Ty::f16;
  if (root == "add") op.run = half ? mixed_by_rounding<F16, Sum::add>(r) : mixed_by_rounding<BF16, Sum::add>(r);
  if (root == "sub") op.run = half ? mixed_by_rounding<F16, Sum::sub>(r) : mixed_by_rounding<BF16, Sum::sub>(r);
  if (fma) op.run = half ? mixed_by_rounding<F16, Sum::fma>(r) : mixed_by_rounding<BF16, Sum::fma>(r);
}

void decode_sum(Decoder& d, Op& op, const std::string& root) {
  Modifiers m(d.from);
  const Ty type = m.take_type();
  const std::string name = root == "mad" ? "fma" : root;
  const bool fma = name == "fma";
  Modifiers rest = m;  // a second type means mixed precision
  for (const char* t : {"f16", "bf16"})
    if (type == Ty::f32 && rest.take(t)) return decode_mixed(d, op, m, root);
  if (root == "mad" && type != Ty::f32 && type != Ty::f64) d.fail("mad is for .f32 and .f64");
  const std::string r = take_finish(d, op, m, type, fma);
  m.done();
  operands(d, op, fma ? 3 : 2, bytes_of(type));
  if (name == "add") op.run = sum_handler<Sum::add, 2>(type, r);
  if (name == "sub") op.run = sum_handler<Sum::sub, 2>(type, r);
  if (name == "mul") op.run = sum_handler<Sum::mul, 2>(type, r);
  if (fma) op.run = sum_handler<Sum::fma, 3>(type, r);
}

// --- div. approx: PTX ISA 9.7.3.8 gives a zero where the divisor is beyond 2^126.

struct DivideApprox {
  bool ftz;
  explicit DivideApprox(const Op& op) : ftz((op.mode & kFtz) != 0) {}
  PTX_INLINE float operator()(float a, float b) const {
    a = flush(a, ftz);
    b = flush(b, ftz);
    const bool large = std::fabs(b) > 0x1p126f && std::isfinite(b);
    const float zero = std::copysign(0.0f, bit_cast<float>(bit_cast<uint32_t>(a) ^ bit_cast<uint32_t>(b)));
    const float far = std::isfinite(a) ? zero : bit_cast<float>(kNan32);
    return canonical(flush(large ? far : a / b, ftz));
  }
};

void decode_divide(Decoder& d, Op& op) {
  Modifiers m(d.from);
  const std::string kind = m.take_one({"approx", "full", "rn", "rz", "rm", "rp"});
  if (m.take("ftz")) op.mode |= kFtz;
  const Ty type = m.take_type();
  m.done();
  if ((op.mode & kFtz || kind == "approx" || kind == "full") && type != Ty::f32)
    d.fail("'.approx', '.full' and '.ftz' are for .f32");
  if (type != Ty::f32 && type != Ty::f64) d.fail("div is for .f32 and .f64");
  operands(d, op, 2, bytes_of(type));
  op.kind = Class::special_function;
  if (kind == "approx") op.run = elementwise<float, 1, DivideApprox, 2>;
  else op.run = sum_handler<Sum::div, 2>(type, kind == "full" ? "rn" : kind);
}

// --- min max. Compared as integers: the order of floats with -0 below +0 is that of their bits, magnitudes flipped
// when the sign is set.

template <class E>
struct Bits;
template <>
struct Bits<float> {
  using U = uint32_t;
  using I = int32_t;
  static constexpr U kInf = 0x7f800000u, kNanBits = kNan32;
};
template <>
struct Bits<F16> {
  using U = uint16_t;
  using I = int16_t;
  static constexpr U kInf = 0x7c00, kNanBits = 0x7fff;
};
template <>
struct Bits<BF16> {
  using U = uint16_t;
  using I = int16_t;
  static constexpr U kInf = 0x7f80, kNanBits = 0x7fff;
};
template <>
struct Bits<double> {
  using U = uint64_t;
  using I = int64_t;
  static constexpr U kInf = 0x7ff0000000000000ull, kNanBits = 0x7fffffffffffffffull;
};

template <class E, bool maximum>
struct Extreme {
  using B = Bits<E>;
  using U = typename B::U;
  using I = typename B::I;
  static constexpr U kMagnitude = static_cast<U>(~static_cast<U>(0)) >> 1;
  uint8_t mode;
  explicit Extreme(const Op& op) : mode(op.mode) {}
  static PTX_INLINE bool nan(U v) { return (v & kMagnitude) > B::kInf; }
  static PTX_INLINE I key(U v) { return static_cast<I>(v ^ ((v >> (sizeof(U) * 8 - 1)) ? kMagnitude : 0)); }
  PTX_INLINE U pick(U a, U b) const {
    const U best = (maximum ? key(a) > key(b) : key(a) < key(b)) ? a : b;
    const U number = nan(a) ? b : nan(b) ? a : best;
    const bool bad = mode & kNan ? nan(a) | nan(b) : nan(a) & nan(b);
    return bad ? B::kNanBits : number;
  }
  PTX_INLINE U input(E e) const {
    const U v = bit_cast<U>(flush(e, (mode & kFtz) != 0));
    return mode & kAbs ? v & kMagnitude : v;
  }
  PTX_INLINE E operator()(E a, E b) const {
    U r = pick(input(a), input(b));
    if (mode & kXorSign && !nan(r))
      r |= static_cast<U>((bit_cast<U>(a) ^ bit_cast<U>(b)) & static_cast<U>(~kMagnitude));
    return bit_cast<E>(r);
  }
  PTX_INLINE E operator()(E a, E b, E c) const { return bit_cast<E>(pick(pick(input(a), input(b)), input(c))); }
};

template <bool maximum>
Handler extreme(Ty type, bool three) {
  if (three) return type == Ty::f32 ? elementwise<float, 1, Extreme<float, maximum>, 3> : nullptr;
  switch (type) {
    case Ty::f32: return elementwise<float, 1, Extreme<float, maximum>, 2>;
    case Ty::f64: return elementwise<double, 1, Extreme<double, maximum>, 2>;
    case Ty::f16: return elementwise<F16, 1, Extreme<F16, maximum>, 2>;
    case Ty::f16x2: return elementwise<F16, 2, Extreme<F16, maximum>, 2>;
    case Ty::bf16: return elementwise<BF16, 1, Extreme<BF16, maximum>, 2>;
    case Ty::bf16x2: return elementwise<BF16, 2, Extreme<BF16, maximum>, 2>;
    default: return nullptr;
  }
}

void decode_extreme(Decoder& d, Op& op, bool maximum) {
  Modifiers m(d.from);
  if (m.take("ftz")) op.mode |= kFtz;
  if (m.take("NaN")) op.mode |= kNan;
  if (m.take("abs")) op.mode |= kAbs;
  if (m.take("xorsign")) op.mode |= kXorSign;
  const Ty type = m.take_type();
  m.done();
  const bool three = d.from.operands.size() == 4;
  if (op.mode & kFtz && type != Ty::f32 && !is_f16(type)) d.fail("'.ftz' is not one of this type");
  if (op.mode != 0 && type == Ty::f64) d.fail("min and max on .f64 have no modifiers");
  const bool absolute = op.mode & kAbs, sign = op.mode & kXorSign;
  if (three ? sign : absolute != sign) d.fail("'.xorsign.abs' go together for two inputs, '.abs' alone is for three");
  operands(d, op, three ? 3 : 2, bytes_of(type));
  op.run = maximum ? extreme<true>(type, three) : extreme<false>(type, three);
}

// --- neg, abs: on the bits, NaNs included.

template <class E, bool negate>
struct Sign {
  using U = typename Bits<E>::U;
  bool ftz;
  explicit Sign(const Op& op) : ftz((op.mode & kFtz) != 0) {}
  PTX_INLINE E operator()(E v) const {
    constexpr U kMagnitude = static_cast<U>(~static_cast<U>(0)) >> 1;
    const U bits = bit_cast<U>(flush(v, ftz));
    return bit_cast<E>(static_cast<U>(negate ? bits ^ static_cast<U>(~kMagnitude) : bits & kMagnitude));
  }
};

template <bool negate>
Handler sign(Ty type) {
  switch (type) {
    case Ty::f32: return elementwise<float, 1, Sign<float, negate>, 1>;
    case Ty::f64: return elementwise<double, 1, Sign<double, negate>, 1>;
    case Ty::f16: return elementwise<F16, 1, Sign<F16, negate>, 1>;
    case Ty::f16x2: return elementwise<F16, 2, Sign<F16, negate>, 1>;
    case Ty::bf16: return elementwise<BF16, 1, Sign<BF16, negate>, 1>;
    case Ty::bf16x2: return elementwise<BF16, 2, Sign<BF16, negate>, 1>;
    default: return nullptr;
  }
}

void decode_sign(Decoder& d, Op& op, bool negate) {
  Modifiers m(d.from);
  if (m.take("ftz")) op.mode |= kFtz;
  const Ty type = m.take_type();
  m.done();
  if (op.mode & kFtz && type != Ty::f32 && !is_f16(type)) d.fail("'.ftz' is not one of this type");
  operands(d, op, 1, bytes_of(type));
  op.run = negate ? sign<true>(type) : sign<false>(type);
}

}  // namespace

void decode_float(Decoder& d, Op& op) {
  const std::string& root = d.from.parts[0];
  op.kind = Class::floating;
  if (root == "add" || root == "sub" || root == "mul" || root == "fma" || root == "mad") decode_sum(d, op, root);
  else if (root == "div") decode_divide(d, op);
  else if (root == "min" || root == "max") decode_extreme(d, op, root == "max");
  else if (root == "neg" || root == "abs") decode_sign(d, op, root == "neg");
  else decode_special(d, op);
  if (op.run == nullptr) d.fail("this type is not one of '" + root + "'");
}

}  // namespace ptx
