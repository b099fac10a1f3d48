// rcp sqrt rsqrt ex2 lg2 sin cos tanh copysign testp (PTX ISA 9.7.3, 9.7.4).
//
// The approximations are closer to the exact value than PTX asks for; what hardware returns differs in the last bits.
#include "units/float.h"
#include "units/float_math.h"

namespace ptx {

namespace {

// 2^x in double, good to 1e-14: 2^round(x) times a polynomial of the rest, without branches so that lanes vectorise.
PTX_INLINE double exp2_of(double x) {
  constexpr double kMagic = 0x1.8p52;  // adding it rounds to an integer that the low bits then hold
  const double bounded = x < -1000 ? -1000 : x > 1000 ? 1000 : x;
  const double shifted = bounded + kMagic;
  const double z = (bounded - (shifted - kMagic)) * 0.6931471805599453;
  double p = 1.0 / 39916800;  // 1 / 11!
  for (double c :
       {1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0})
    p = p * z + c;
  const uint64_t exponent = (bit_cast<uint64_t>(shifted) + 1023) << 52;
  return x == x ? p * bit_cast<double>(exponent) : x;
}

struct Exp2 {
  static PTX_INLINE float of(float v) { return static_cast<float>(exp2_of(v)); }
};
struct Log2 {
  static float of(float v) { return static_cast<float>(std::log2(static_cast<double>(v))); }
};
struct Sine {
  static float of(float v) { return static_cast<float>(std::sin(static_cast<double>(v))); }
};
struct Cosine {
  static float of(float v) { return static_cast<float>(std::cos(static_cast<double>(v))); }
};
struct Tanh {
  static float of(float v) { return static_cast<float>(std::tanh(static_cast<double>(v))); }
};
struct Reciprocal {
  static PTX_INLINE float of(float v) { return 1.0f / v; }
};
struct Root {
  static PTX_INLINE float of(float v) { return std::sqrt(v); }
};
struct ReciprocalRoot {
  static PTX_INLINE float of(float v) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(v))); }
};

template <class F>
struct Single {
  bool ftz;
  explicit Single(const Op& op) : ftz(op.mode != 0) {}
  PTX_INLINE float operator()(float v) const { return canonical(flush(F::of(flush(v, ftz)), ftz)); }
};
template <class E, class F>
struct Half {
  bool ftz;
  explicit Half(const Op& op) : ftz(op.mode != 0) {}
  PTX_INLINE E operator()(E v) const { return flush(narrow<E>(F::of(value_of(flush(v, ftz)))), ftz); }
};

template <Nearest R, bool root_of>
struct Rounded {
  bool ftz;
  explicit Rounded(const Op& op) : ftz(op.mode != 0) {}
  PTX_INLINE float operator()(float v) const {
    v = flush(v, ftz);
    const float plain = root_of ? std::sqrt(v) : 1.0f / v;
    const bool inexact = v != 0 && std::isfinite(v) && (!root_of || v > 0);
    return canonical(flush(inexact ? round_float<R>(root_of ? root(v) : quotient(1, v)) : plain, ftz));
  }
};

template <bool root_of>
struct RoundedDouble {
  Nearest mode;
  explicit RoundedDouble(const Op& op) : mode(static_cast<Nearest>(op.size)) {}
  double operator()(double v) const {
    return in_mode(mode, [v] {
      volatile double x = v;
      return root_of ? std::sqrt(x) : 1.0 / x;
    });
  }
};

// rcp.approx.ftz.f64, rsqrt.approx.ftz.f64: 20 mantissa bits in the upper word, the lower word is 0.
template <bool root_of>
struct Gross {
  explicit Gross(const Op&) {}
  double operator()(double v) const {
    double top = bit_cast<double>(bit_cast<uint64_t>(v) & 0xffffffff00000000ull);
    if (std::fabs(top) < 0x1p-1022) top = std::copysign(0.0, v);
    if (v != v) return bit_cast<double>(0x7fffffff00000000ull);
    double r = root_of ? 1.0 / std::sqrt(top) : 1.0 / top;
    if (root_of && top == 0) r = std::copysign(INFINITY, v);
    if (r != r) return bit_cast<double>(0x7fffffff00000000ull);
    if (std::fabs(r) < 0x1p-1022) r = std::copysign(0.0, r);
    return bit_cast<double>(bit_cast<uint64_t>(r) & 0xffffffff00000000ull);
  }
};

struct ReciprocalRootDouble {
  explicit ReciprocalRootDouble(const Op&) {}
  double operator()(double v) const { return v == 0 ? std::copysign(INFINITY, v) : 1.0 / std::sqrt(v); }
};

template <class E>
struct CopySign {
  explicit CopySign(const Op&) {}
  PTX_INLINE E operator()(E sign, E magnitude) const { return std::copysign(magnitude, sign); }
};

template <class F>
Handler single() {
  return elementwise<float, 1, Single<F>, 1>;
}
template <class F>
Handler half(Ty type) {
  switch (type) {
    case Ty::f16: return elementwise<F16, 1, Half<F16, F>, 1>;
    case Ty::f16x2: return elementwise<F16, 2, Half<F16, F>, 1>;
    case Ty::bf16: return elementwise<BF16, 1, Half<BF16, F>, 1>;
    case Ty::bf16x2: return elementwise<BF16, 2, Half<BF16, F>, 1>;
    default: return nullptr;
  }
}
template <bool root_of>
Handler rounded(const std::string& r) {
  if (r == "rz") return elementwise<float, 1, Rounded<Nearest::rz, root_of>, 1>;
  if (r == "rm") return elementwise<float, 1, Rounded<Nearest::rm, root_of>, 1>;
  if (r == "rp") return elementwise<float, 1, Rounded<Nearest::rp, root_of>, 1>;
  return single<std::conditional_t<root_of, Root, Reciprocal>>();
}

bool bf16(Ty t) { return t == Ty::bf16 || t == Ty::bf16x2; }

// rcp, sqrt, rsqrt.
Handler inverse(Op& op, const std::string& root, const std::string& kind, Ty type) {
  const bool approx = kind == "approx";
  if (type == Ty::f32) {
    if (root == "rsqrt") return approx ? single<ReciprocalRoot>() : nullptr;
    if (root == "rcp") return approx ? single<Reciprocal>() : rounded<false>(kind);
    return approx ? single<Root>() : rounded<true>(kind);
  }
  if (type != Ty::f64) return nullptr;
  if (root == "rsqrt")
    return !approx        ? nullptr
           : op.mode != 0 ? elementwise<double, 1, Gross<true>, 1>
                          : elementwise<double, 1, ReciprocalRootDouble, 1>;
  if (approx) return root == "rcp" && op.mode != 0 ? elementwise<double, 1, Gross<false>, 1> : nullptr;
  if (op.mode != 0) return nullptr;  // .ftz
  op.size = static_cast<uint8_t>(kind == "rz"   ? Nearest::rz
                                 : kind == "rm" ? Nearest::rm
                                 : kind == "rp" ? Nearest::rp
                                                : Nearest::rn);
  return root == "rcp" ? elementwise<double, 1, RoundedDouble<false>, 1>
                       : elementwise<double, 1, RoundedDouble<true>, 1>;
}

// ex2, lg2, sin, cos, tanh.
Handler transcendental(const Op& op, const std::string& root, Ty type) {
  const bool ftz = op.mode != 0;
  if (root == "ex2")
    return type == Ty::f32 ? single<Exp2>() : ftz == bf16(type) ? half<Exp2>(type) : nullptr;  // .ftz goes with bf16
  if (root == "tanh") return ftz ? nullptr : type == Ty::f32 ? single<Tanh>() : half<Tanh>(type);
  if (type != Ty::f32) return nullptr;
  return root == "lg2" ? single<Log2>() : root == "sin" ? single<Sine>() : single<Cosine>();
}

enum : uint8_t { kFinite, kInfinite, kNumber, kNotANumber, kNormal, kSubnormal };

template <class E>
Step testp(Context& c, const Op& op) {
  const auto* a = LanesOf<E>::of(c.warp, op.s[0]);
  each_bit(c.mask, c.warp.pred(op.d[0]), [&](unsigned l) {
    const int kind = std::fpclassify(bit_cast<E>(a[l]));
    switch (op.mode) {
      case kFinite: return kind != FP_INFINITE && kind != FP_NAN;
      case kInfinite: return kind == FP_INFINITE;
      case kNumber: return kind != FP_NAN;
      case kNotANumber: return kind == FP_NAN;
      case kNormal: return kind == FP_NORMAL || kind == FP_ZERO;
      default: return kind == FP_SUBNORMAL;
    }
  });
  return Step::next;
}

void decode_testp(Decoder& d, Op& op) {
  Modifiers m(d.from);
  const std::string test = m.take_one({"finite", "infinite", "number", "notanumber", "normal", "subnormal"});
  const Ty type = m.take_type();
  m.done();
  d.count(2, 2);
  op.mode = test == "finite"       ? kFinite
            : test == "infinite"   ? kInfinite
            : test == "number"     ? kNumber
            : test == "notanumber" ? kNotANumber
            : test == "normal"     ? kNormal
                                   : kSubnormal;
  op.d[0] = d.destination(d.operand(0), 0);
  op.s[0] = d.source(d.operand(1), bytes_of(type));
  op.run = type == Ty::f32 ? testp<float> : type == Ty::f64 ? testp<double> : nullptr;
}

}  // namespace

void decode_special(Decoder& d, Op& op) {
  const std::string& root = d.from.parts[0];
  if (root == "testp") return decode_testp(d, op);
  Modifiers m(d.from);
  if (root == "copysign") {
    const Ty type = m.take_type();
    m.done();
    d.count(3, 3);
    op.d[0] = d.destination(d.operand(0), bytes_of(type));
    for (size_t i = 0; i < 2; i++) op.s[i] = d.source(d.operand(i + 1), bytes_of(type));
    op.run = type == Ty::f32   ? elementwise<float, 1, CopySign<float>, 2>
             : type == Ty::f64 ? elementwise<double, 1, CopySign<double>, 2>
                               : nullptr;
    return;
  }
  op.kind = Class::special_function;
  const bool inverts = root == "rcp" || root == "sqrt" || root == "rsqrt";
  const std::string kind = inverts ? m.take_one({"approx", "rn", "rz", "rm", "rp"}) : m.take_one({"approx"});
  op.mode = m.take("ftz");
  const Ty type = m.take_type();
  m.done();
  d.count(2, 2);
  op.d[0] = d.destination(d.operand(0), bytes_of(type));
  op.s[0] = d.source(d.operand(1), bytes_of(type));
  op.run = inverts ? inverse(op, root, kind, type) : transcendental(op, root, type);
}

}  // namespace ptx
