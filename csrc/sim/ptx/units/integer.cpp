// Integer arithmetic, logic and shifts that work on whole registers (PTX ISA 9.7.1, 9.7.2, 9.7.8).
#include "units/integer.h"

#include "units/bits.h"

namespace ptx {

namespace {

// Picks run<T> by type.
#define PTX_INTEGERS(type, template_use) \
  switch (type) {                        \
    case Ty::u16: {                      \
      using T = uint16_t;                \
      return template_use;               \
    }                                    \
    case Ty::s16: {                      \
      using T = int16_t;                 \
      return template_use;               \
    }                                    \
    case Ty::u32: {                      \
      using T = uint32_t;                \
      return template_use;               \
    }                                    \
    case Ty::s32: {                      \
      using T = int32_t;                 \
      return template_use;               \
    }                                    \
    case Ty::u64: {                      \
      using T = uint64_t;                \
      return template_use;               \
    }                                    \
    case Ty::s64: {                      \
      using T = int64_t;                 \
      return template_use;               \
    }                                    \
    default: return nullptr;             \
  }

template <class F>
Handler simple(Ty type) {
  PTX_INTEGERS(type, (binary<T, T, F>))
}
template <class F>
Handler single(Ty type) {
  PTX_INTEGERS(type, (unary<T, T, F>))
}

// F on both halves of a 32-bit register.
template <class H, class F>
struct Halves {
  template <class T>
  static PTX_INLINE uint32_t of(T a, T b) {
    const H low = F::template of<H>(static_cast<H>(a), static_cast<H>(b));
    const H high = F::template of<H>(static_cast<H>(a >> 16), static_cast<H>(b >> 16));
    return static_cast<uint16_t>(low) | static_cast<uint32_t>(static_cast<uint16_t>(high)) << 16;
  }
};
template <class F>
Handler halves(Ty type) {
  if (type == Ty::u16x2) return binary<uint32_t, uint32_t, Halves<uint16_t, F>>;
  if (type == Ty::s16x2) return binary<uint32_t, uint32_t, Halves<int16_t, F>>;
  return simple<F>(type);
}

template <class T, class F>
PTX_CLONES Step shift(Context& c, const Op& op) {
  auto* d = LanesOf<T>::of(c.warp, op.d[0]);
  const auto* a = LanesOf<T>::of(c.warp, op.s[0]);
  const uint32_t* n = c.warp.v32(op.s[1]).x;
  each_lane(c.mask, d, [=](unsigned l) { return pack<T>(F::template of<T>(unpack<T>(a[l]), n[l])); });
  return Step::next;
}
template <class F>
Handler shift_of(Ty type) {
  PTX_INTEGERS(type, (shift<T, F>))
}

template <class T, bool high>
PTX_CLONES Step mad(Context& c, const Op& op) {
  auto* d = LanesOf<T>::of(c.warp, op.d[0]);
  const auto* a = LanesOf<T>::of(c.warp, op.s[0]);
  const auto* b = LanesOf<T>::of(c.warp, op.s[1]);
  const auto* e = LanesOf<T>::of(c.warp, op.s[2]);
  each_lane(c.mask, d, [=](unsigned l) {
    const T x = unpack<T>(a[l]), y = unpack<T>(b[l]);
    const T product = high ? MulHigh::of(x, y) : MulLow::of(x, y);
    return pack<T>(AddInt::of(product, unpack<T>(e[l])));
  });
  return Step::next;
}
template <bool high>
Handler mad_of(Ty type){PTX_INTEGERS(type, (mad<T, high>))}

Step mad_high_sat(Context& c, const Op& op) {
  uint32_t* d = c.warp.v32(op.d[0]).x;
  const uint32_t *a = c.warp.v32(op.s[0]).x, *b = c.warp.v32(op.s[1]).x, *e = c.warp.v32(op.s[2]).x;
  each_lane(c.mask, d, [=](unsigned l) {
    const int32_t high = MulHigh::of(static_cast<int32_t>(a[l]), static_cast<int32_t>(b[l]));
    return static_cast<uint32_t>(saturate<int32_t>(static_cast<int64_t>(high) + static_cast<int32_t>(e[l])));
  });
  return Step::next;
}

template <class T>
PTX_CLONES Step mad_wide(Context& c, const Op& op) {
  using W = Twice<T>;
  auto* d = LanesOf<W>::of(c.warp, op.d[0]);
  const auto* a = LanesOf<T>::of(c.warp, op.s[0]);
  const auto* b = LanesOf<T>::of(c.warp, op.s[1]);
  const auto* e = LanesOf<W>::of(c.warp, op.s[2]);
  each_lane(c.mask, d, [=](unsigned l) {
    return pack<W>(AddInt::of<W>(MulWide::of(unpack<T>(a[l]), unpack<T>(b[l])), unpack<W>(e[l])));
  });
  return Step::next;
}
Handler mad_wide_of(Ty type) { PTX_INTEGERS(type, (mad_wide<T>)) }
template <class T>
Handler mul_wide() {
  if constexpr (sizeof(T) == 8) return nullptr;
  else return binary<Twice<T>, T, MulWide>;
}
Handler mul_wide_of(Ty type) { PTX_INTEGERS(type, mul_wide<T>()) }

bool is_signed(Ty t) { return t == Ty::s16 || t == Ty::s32 || t == Ty::s64; }
bool packed(Ty t) { return t == Ty::u16x2 || t == Ty::s16x2; }

Handler arithmetic(const Decoder& d, const std::string& root, Ty type, bool sat, bool relu) {
  if (sat && type != Ty::s32) d.fail("'.sat' is for .s32");
  if (relu && type != Ty::s32 && type != Ty::s16x2) d.fail("'.relu' is for .s32 and .s16x2");
  if (root == "add") return sat ? binary<int32_t, int32_t, AddSat> : halves<AddInt>(type);
  if (root == "sub") return sat ? binary<int32_t, int32_t, SubSat> : packed(type) ? nullptr : simple<SubInt>(type);
  if (root == "min") {
    if (relu)
      return type == Ty::s32 ? binary<int32_t, int32_t, MinRelu> : binary<uint32_t, uint32_t, Halves<int16_t, MinRelu>>;
    return halves<MinInt>(type);
  }
  if (root == "max") {
    if (relu)
      return type == Ty::s32 ? binary<int32_t, int32_t, MaxRelu> : binary<uint32_t, uint32_t, Halves<int16_t, MaxRelu>>;
    return halves<MaxInt>(type);
  }
  if (root == "div") return simple<Div>(type);
  if (root == "rem") return simple<Rem>(type);
  if (root == "neg") return is_signed(type) ? single<NegInt>(type) : nullptr;
  return is_signed(type) ? single<AbsInt>(type) : nullptr;  // abs
}

void two_or_three(Decoder& d, Op& op, size_t sources, unsigned bytes) {
  d.count(sources + 1, sources + 1);
  op.d[0] = d.destination(d.operand(0), bytes);
  for (size_t i = 0; i < sources; i++) op.s[i] = d.source(d.operand(i + 1), bytes);
}

void decode_plain(Decoder& d, Op& op) {
  const std::string& root = d.from.parts[0];
  Modifiers m(d.from);
  const bool sat = (root == "add" || root == "sub") && m.take("sat");
  const bool relu = (root == "min" || root == "max") && m.take("relu");
  const Ty type = m.take_type();
  m.done();
  two_or_three(d, op, root == "neg" || root == "abs" ? 1 : 2, bytes_of(type));
  op.run = arithmetic(d, root, type, sat, relu);
}

// mul and mad: the low half, the high half or all of the product.
void decode_product(Decoder& d, Op& op) {
  const bool add = d.from.parts[0] == "mad";
  Modifiers m(d.from);
  const std::string part = m.take_one({"lo", "hi", "wide"});
  const bool sat = m.take("sat");
  const Ty type = m.take_type();
  m.done();
  if (sat && (!add || part != "hi" || type != Ty::s32)) d.fail("'.sat' is for mad.hi.s32");
  const unsigned bytes = bytes_of(type), result = part == "wide" ? 2 * bytes : bytes;
  if (result > 8) d.fail("'.wide' is for 16 and 32 bits");
  d.count(add ? 4 : 3, add ? 4 : 3);
  op.d[0] = d.destination(d.operand(0), result);
  op.s[0] = d.source(d.operand(1), bytes);
  op.s[1] = d.source(d.operand(2), bytes);
  if (add) op.s[2] = d.source(d.operand(3), result);
  if (add)
    op.run = sat            ? mad_high_sat
             : part == "lo" ? mad_of<false>(type)
             : part == "hi" ? mad_of<true>(type)
                            : mad_wide_of(type);
  else op.run = part == "lo" ? simple<MulLow>(type) : part == "hi" ? simple<MulHigh>(type) : mul_wide_of(type);
}

// A bit type as the unsigned type of its width.
Ty plain(Ty type) {
  switch (type) {
    case Ty::b16: return Ty::u16;
    case Ty::b32: return Ty::u32;
    case Ty::b64: return Ty::u64;
    default: return Ty::none;
  }
}

template <class F>
Step logic_predicate(Context& c, const Op& op) {
  const Mask a = op.mode & 1 ? ~c.warp.pred(op.s[0]) : c.warp.pred(op.s[0]);
  const Mask b = op.mode & 2 ? ~c.warp.pred(op.s[1]) : c.warp.pred(op.s[1]);
  Mask& d = c.warp.pred(op.d[0]);
  d = (d & ~c.mask) | (F::of(a, b) & c.mask);
  return Step::next;
}
struct NotFirst {
  static Mask of(Mask a, Mask) { return ~a; }
};

void decode_logic(Decoder& d, Op& op) {
  const std::string& root = d.from.parts[0];
  Modifiers m(d.from);
  const Ty type = m.take_type();
  m.done();
  const size_t sources = root == "not" || root == "cnot" ? 1 : 2;
  if (type == Ty::pred && root != "cnot") {
    d.count(sources + 1, sources + 1);
    op.d[0] = d.destination(d.operand(0), 0);
    for (size_t i = 0; i < sources; i++) {
      bool negated = false;
      op.s[i] = d.predicate(d.operand(i + 1), negated);
      op.mode |= static_cast<uint8_t>(negated) << i;
    }
    op.run = root == "and"   ? logic_predicate<And>
             : root == "or"  ? logic_predicate<Or>
             : root == "xor" ? logic_predicate<Xor>
                             : logic_predicate<NotFirst>;
    return;
  }
  const Ty bits = plain(type);
  two_or_three(d, op, sources, bytes_of(type));
  if (root == "and") op.run = simple<And>(bits);
  if (root == "or") op.run = simple<Or>(bits);
  if (root == "xor") op.run = simple<Xor>(bits);
  if (root == "not") op.run = single<Not>(bits);
  if (root == "cnot") op.run = single<LogicalNot>(bits);
}

void decode_shift(Decoder& d, Op& op) {
  const bool left = d.from.parts[0] == "shl";
  Modifiers m(d.from);
  const Ty type = m.take_type(), bits = plain(type);
  m.done();
  d.count(3, 3);
  op.d[0] = d.destination(d.operand(0), bytes_of(type));
  op.s[0] = d.source(d.operand(1), bytes_of(type));
  op.s[1] = d.source(d.operand(2), 4);
  op.run = left ? shift_of<ShiftLeft>(bits) : shift_of<ShiftRight>(bits != Ty::none ? bits : type);
}

}  // namespace

void decode_integer(Decoder& d, Op& op) {
  const std::string& root = d.from.parts[0];
  op.kind = Class::integer;
  bool carry = root == "addc" || root == "subc" || root == "madc";
  for (const std::string& part : d.from.parts) carry |= part == "cc";
  if (carry) decode_carry(d, op);
  else if (root == "mul" || root == "mad") decode_product(d, op);
  else if (root == "and" || root == "or" || root == "xor" || root == "not" || root == "cnot") decode_logic(d, op);
  else if (root == "shl" || root == "shr") decode_shift(d, op);
  else if (root == "add" || root == "sub" || root == "div" || root == "rem" || root == "min" || root == "max" ||
           root == "neg" || root == "abs")
    decode_plain(d, op);
  else decode_bits(d, op);
  if (op.run == nullptr) d.fail("this type is not one of '" + root + "'");
}

}  // namespace ptx
