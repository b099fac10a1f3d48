// setp set selp slct (PTX ISA 9.7.6, 9.7.7, 9.3.1).
#include "units/float_types.h"

namespace ptx {

namespace {

// Ordered comparisons are false when an operand is NaN, the ones that end in "u" are true.
#define PTX_COMPARE(name, expression)     \
  struct name {                           \
    template <class V>                    \
    static PTX_INLINE bool of(V a, V b) { \
      return expression;                  \
    }                                     \
  };
PTX_COMPARE(Eq, a == b)
PTX_COMPARE(Ne, (a < b) | (a > b))
PTX_COMPARE(Lt, a < b)
PTX_COMPARE(Le, a <= b)
PTX_COMPARE(Gt, a > b)
PTX_COMPARE(Ge, a >= b)
PTX_COMPARE(Equ, !((a < b) | (a > b)))
PTX_COMPARE(Neu, !(a == b))
PTX_COMPARE(Ltu, !(a >= b))
PTX_COMPARE(Leu, !(a > b))
PTX_COMPARE(Gtu, !(a <= b))
PTX_COMPARE(Geu, !(a < b))
PTX_COMPARE(Num, (a == a) & (b == b))
PTX_COMPARE(Nan, (a != a) | (b != b))
#undef PTX_COMPARE

enum : uint8_t { kNone, kAnd, kOr, kXor };
constexpr uint8_t kNegated = 4;  // with kAnd .. kXor: the third operand is !c

template <class T>
PTX_INLINE T compared(T v, bool) {
  return v;
}
PTX_INLINE float compared(float v, bool ftz) { return ftz && std::fabs(v) < 0x1p-126f ? v * 0.0f : v; }
PTX_INLINE float compared(F16 v, bool ftz) {
  const float f = value_of(v);
  return ftz && std::fabs(f) < 0x1p-14f ? f * 0.0f : f;
}
PTX_INLINE float compared(BF16 v, bool) { return value_of(v); }

Mask join(const Context& c, const Op& op, Mask result) {
  if ((op.mode & 3) == kNone) return result;
  const Mask other = op.mode & kNegated ? ~c.warp.file[op.s[2]].x[0] : c.warp.file[op.s[2]].x[0];
  return (op.mode & 3) == kAnd ? result & other : (op.mode & 3) == kOr ? result | other : result ^ other;
}

// The comparison's bit for all lanes.
template <class T, class F>
PTX_CLONES Mask compare(Warp& w, Slot sa, Slot sb, bool ftz, unsigned shift) {
  const auto* a = LanesOf<T>::of(w, sa);
  const auto* b = LanesOf<T>::of(w, sb);
  uint32_t bits[kLanes];
  PTX_INDEPENDENT
  for (unsigned l = 0; l < kLanes; l++)
    bits[l] =
        static_cast<uint32_t>(F::of(compared(unpack<T>(a[l] >> shift), ftz), compared(unpack<T>(b[l] >> shift), ftz)))
        << l;
  Mask out = 0;
  for (unsigned l = 0; l < kLanes; l++) out |= bits[l];
  return out;
}

template <class T, class F>
Step setp(Context& c, const Op& op) {
  const Mask result = compare<T, F>(c.warp, op.s[0], op.s[1], op.size != 0, 0);
  Mask& p = c.warp.pred(op.d[0]);
  Mask first = join(c, op, result);
  if (op.count != 0) {  // p|q: q gets the complement of the comparison
    const Mask second = join(c, op, ~result);
    Mask& q = c.warp.pred(op.d[1]);
    q = (q & ~c.mask) | (second & c.mask);
  }
  p = (p & ~c.mask) | (first & c.mask);
  return Step::next;
}
// f16x2, bf16x2: p is the comparison of the low halves, q of the high ones.
template <class T, class F>
Step setp_halves(Context& c, const Op& op) {
  const Mask low = join(c, op, compare<T, F>(c.warp, op.s[0], op.s[1], op.size != 0, 0));
  const Mask high = join(c, op, compare<T, F>(c.warp, op.s[0], op.s[1], op.size != 0, 16));
  Mask &p = c.warp.pred(op.d[0]), &q = c.warp.pred(op.d[1]);
  p = (p & ~c.mask) | (low & c.mask);
  q = (q & ~c.mask) | (high & c.mask);
  return Step::next;
}
// set: the bits for true are in op.offset, as wide as the destination.
template <class T, class F>
Step set(Context& c, const Op& op) {
  const Mask result = join(c, op, compare<T, F>(c.warp, op.s[0], op.s[1], op.size != 0, 0));
  const uint32_t yes = static_cast<uint32_t>(op.offset);
  each_lane(c.mask, c.warp.v32(op.d[0]).x, [=](unsigned l) { return result >> l & 1 ? yes : 0; });
  return Step::next;
}
template <class T, class F>
Step set_halves(Context& c, const Op& op) {
  const Mask low = join(c, op, compare<T, F>(c.warp, op.s[0], op.s[1], op.size != 0, 0));
  const Mask high = join(c, op, compare<T, F>(c.warp, op.s[0], op.s[1], op.size != 0, 16));
  const uint32_t yes = static_cast<uint32_t>(op.offset);
  each_lane(c.mask, c.warp.v32(op.d[0]).x,
            [=](unsigned l) { return (low >> l & 1 ? yes : 0) | (high >> l & 1 ? yes << 16 : 0); });
  return Step::next;
}

struct Forms {
  Handler setp, set;
};
template <class T, class F, bool halves>
Forms forms() {
  if constexpr (halves) return {setp_halves<T, F>, set_halves<T, F>};
  else return {setp<T, F>, set<T, F>};
}

template <class T, bool halves = false>
Forms of_float(const std::string& name) {
  if (name == "eq") return forms<T, Eq, halves>();
  if (name == "ne") return forms<T, Ne, halves>();
  if (name == "lt") return forms<T, Lt, halves>();
  if (name == "le") return forms<T, Le, halves>();
  if (name == "gt") return forms<T, Gt, halves>();
  if (name == "ge") return forms<T, Ge, halves>();
  if (name == "equ") return forms<T, Equ, halves>();
  if (name == "neu") return forms<T, Neu, halves>();
  if (name == "ltu") return forms<T, Ltu, halves>();
  if (name == "leu") return forms<T, Leu, halves>();
  if (name == "gtu") return forms<T, Gtu, halves>();
  if (name == "geu") return forms<T, Geu, halves>();
  if (name == "num") return forms<T, Num, halves>();
  if (name == "nan") return forms<T, Nan, halves>();
  return {nullptr, nullptr};
}
// lo ls hi hs are the unsigned spellings.
template <class T, bool bits>
Forms of_integer(const std::string& name) {
  if (name == "eq") return forms<T, Eq, false>();
  if (name == "ne") return forms<T, Ne, false>();
  if (bits) return {nullptr, nullptr};
  const bool other = std::is_unsigned_v<T>;
  if (name == "lt" || (other && name == "lo")) return forms<T, Lt, false>();
  if (name == "le" || (other && name == "ls")) return forms<T, Le, false>();
  if (name == "gt" || (other && name == "hi")) return forms<T, Gt, false>();
  if (name == "ge" || (other && name == "hs")) return forms<T, Ge, false>();
  return {nullptr, nullptr};
}

Forms forms_of(Ty type, const std::string& name) {
  switch (type) {
    case Ty::b16: return of_integer<uint16_t, true>(name);
    case Ty::b32: return of_integer<uint32_t, true>(name);
    case Ty::b64: return of_integer<uint64_t, true>(name);
    case Ty::u16: return of_integer<uint16_t, false>(name);
    case Ty::u32: return of_integer<uint32_t, false>(name);
    case Ty::u64: return of_integer<uint64_t, false>(name);
    case Ty::s16: return of_integer<int16_t, false>(name);
    case Ty::s32: return of_integer<int32_t, false>(name);
    case Ty::s64: return of_integer<int64_t, false>(name);
    case Ty::f16: return of_float<F16>(name);
    case Ty::bf16: return of_float<BF16>(name);
    case Ty::f32: return of_float<float>(name);
    case Ty::f64: return of_float<double>(name);
    case Ty::f16x2: return of_float<F16, true>(name);
    case Ty::bf16x2: return of_float<BF16, true>(name);
    default: return {nullptr, nullptr};
  }
}

// What `set` writes for true.
uint32_t true_bits(const Decoder& d, Ty type) {
  switch (type) {
    case Ty::u32:
    case Ty::s32: return ~0u;
    case Ty::f32: return 0x3f800000u;
    case Ty::u16:
    case Ty::s16: return 0xffff;
    case Ty::f16:
    case Ty::f16x2: return 0x3c00;
    case Ty::bf16:
    case Ty::bf16x2: return 0x3f80;
    default: d.fail("no type of a result of set");
  }
}

void decode_set(Decoder& d, Op& op, bool predicate) {
  Modifiers m(d.from);
  const std::string name = m.take_one({"eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs", "equ", "neu", "ltu",
                                       "leu", "gtu", "geu", "num", "nan"});
  const std::string boolean = m.take_optional({"and", "or", "xor"}, "");
  op.size = m.take("ftz");
  Ty result = Ty::none;
  if (!predicate) result = m.take_type();
  const Ty type = m.take_type();
  m.done();
  if (op.size && type != Ty::f32 && type != Ty::f16 && type != Ty::f16x2) d.fail("'.ftz' is for .f32, .f16 and .f16x2");
  d.count(boolean.empty() ? 3 : 4, boolean.empty() ? 3 : 4);
  const bool halves = type == Ty::f16x2 || type == Ty::bf16x2;
  const Operand& to = d.operand(0);
  if (predicate && to.kind == Operand::pair) {
    op.d[0] = d.destination(to.parts[0], 0);
    op.d[1] = d.destination(to.parts[1], 0);
    op.count = 1;
  } else if (predicate) {
    if (halves) d.fail("'p|q' is expected for packed types");
    op.d[0] = d.destination(to, 0);
  } else {
    // A packed comparison gives a pair of halves, or all ones in 32 bits for each half that is true.
    op.offset =
        halves && bytes_of(result) == 4 && (result == Ty::u32 || result == Ty::s32) ? 0xffff : true_bits(d, result);
    op.d[0] = d.destination(to, bytes_of(result));
  }
  op.s[0] = d.source(d.operand(1), bytes_of(type));
  op.s[1] = d.source(d.operand(2), bytes_of(type));
  if (!boolean.empty()) {
    bool negated = false;
    op.s[2] = d.predicate(d.operand(3), negated);
    op.mode = static_cast<uint8_t>((boolean == "and" ? kAnd : boolean == "or" ? kOr : kXor) | (negated ? kNegated : 0));
  }
  const Forms f = forms_of(type, name);
  op.run = predicate ? f.setp : f.set;
  if (op.run == nullptr) d.fail("comparison '." + name + "' is not one of this type");
}

template <class T>
PTX_CLONES Step selp(Context& c, const Op& op) {
  auto* d = LanesOf<T>::of(c.warp, op.d[0]);
  const auto* a = LanesOf<T>::of(c.warp, op.s[0]);
  const auto* b = LanesOf<T>::of(c.warp, op.s[1]);
  const Mask p = op.mode ? ~c.warp.pred(op.s[2]) : c.warp.pred(op.s[2]);
  each_lane(c.mask, d, [=](unsigned l) { return p >> l & 1 ? a[l] : b[l]; });
  return Step::next;
}
PTX_INLINE bool positive(int32_t v) { return v >= 0; }
PTX_INLINE bool positive(float v) { return v >= 0; }
struct Flushed {
  float v;
};  // a negative subnormal counts as -0, which is not less than 0
PTX_INLINE bool positive(Flushed f) { return f.v > -0x1p-126f; }

template <class T, class Selector>
Step slct(Context& c, const Op& op) {
  auto* d = LanesOf<T>::of(c.warp, op.d[0]);
  const auto* a = LanesOf<T>::of(c.warp, op.s[0]);
  const auto* b = LanesOf<T>::of(c.warp, op.s[1]);
  const uint32_t* s = c.warp.v32(op.s[2]).x;
  each_lane(c.mask, d, [=](unsigned l) { return positive(bit_cast<Selector>(s[l])) ? a[l] : b[l]; });
  return Step::next;
}

void decode_select(Decoder& d, Op& op, bool by_predicate) {
  Modifiers m(d.from);
  const bool ftz = !by_predicate && m.take("ftz");
  const Ty type = m.take_type();
  const Ty selector = by_predicate ? Ty::pred : m.take_type();
  m.done();
  d.count(4, 4);
  const unsigned bytes = bytes_of(type);
  if (bytes > 8 || bytes == 0) d.fail("no type of a selection");
  op.d[0] = d.destination(d.operand(0), bytes);
  op.s[0] = d.source(d.operand(1), bytes);
  op.s[1] = d.source(d.operand(2), bytes);
  if (by_predicate) {
    bool negated = false;
    op.s[2] = d.predicate(d.operand(3), negated);
    op.mode = negated;
    op.run = bytes == 8 ? selp<uint64_t> : selp<uint32_t>;
    return;
  }
  if ((selector != Ty::s32 && selector != Ty::f32) || (ftz && selector != Ty::f32))
    d.fail("the selector is .s32 or .f32");
  op.s[2] = d.source(d.operand(3), 4);
  if (selector == Ty::s32) op.run = bytes == 8 ? slct<uint64_t, int32_t> : slct<uint32_t, int32_t>;
  else
    op.run = ftz          ? (bytes == 8 ? slct<uint64_t, Flushed> : slct<uint32_t, Flushed>)
             : bytes == 8 ? slct<uint64_t, float>
                          : slct<uint32_t, float>;
}

}  // namespace

void decode_compare(Decoder& d, Op& op) {
  const std::string& root = d.from.parts[0];
  op.kind = Class::integer;
  if (root == "setp" || root == "set") decode_set(d, op, root == "setp");
  else decode_select(d, op, root == "selp");
}

}  // namespace ptx
