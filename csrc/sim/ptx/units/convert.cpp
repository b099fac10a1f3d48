// cvt between scalar types, and cvta (PTX ISA 9.7.9.20, 9.7.9.21, 6.5).
#include "units/convert.h"

#include "units/float_math.h"
#include "units/integer.h"

namespace ptx {

namespace {

using Wide = __int128;

enum class Whole : uint8_t { none, nearest, zero, down, up };  // .rni .rzi .rmi .rpi

struct Conversion {
  Ty to, from;
  Round round = Round::nearest_even;
  Whole whole = Whole::none;
  bool ftz = false, sat = false, relu = false, satfinite = false;
};

bool is_float(Ty t) { return t == Ty::f16 || t == Ty::bf16 || t == Ty::f32 || t == Ty::f64; }
bool is_signed(Ty t) { return t == Ty::s8 || t == Ty::s16 || t == Ty::s32 || t == Ty::s64; }
unsigned bits_of(Ty t) { return t == Ty::u8 || t == Ty::s8 ? 8 : bytes_of(t) * 8; }

Wide integer_value(Ty t, uint64_t raw) {
  const unsigned n = bits_of(t);
  if (n == 64) return is_signed(t) ? static_cast<Wide>(static_cast<int64_t>(raw)) : static_cast<Wide>(raw);
  const uint64_t low = raw & ((1ull << n) - 1);
  return is_signed(t) && low >> (n - 1) ? static_cast<Wide>(low) - (static_cast<Wide>(1) << n) : static_cast<Wide>(low);
}
Wide least(Ty t) { return is_signed(t) ? -(static_cast<Wide>(1) << (bits_of(t) - 1)) : 0; }
Wide most(Ty t) { return (static_cast<Wide>(1) << (bits_of(t) - (is_signed(t) ? 1 : 0))) - 1; }

double float_value(Ty t, uint64_t raw, bool ftz) {
  if (t == Ty::f64) return bit_cast<double>(raw);
  if (t == Ty::f16) return f32_of_f16(static_cast<uint32_t>(raw) & 0xffff);
  if (t == Ty::bf16) return f32_of_bf16(static_cast<uint32_t>(raw) & 0xffff);
  return flush(bit_cast<float>(static_cast<uint32_t>(raw)), ftz);
}

double to_whole(double v, Whole w) {
  switch (w) {
    case Whole::nearest: return std::nearbyint(v);
    case Whole::zero: return std::trunc(v);
    case Whole::down: return std::floor(v);
    case Whole::up: return std::ceil(v);
    default: return v;
  }
}

uint64_t float_to_integer(const Conversion& c, double v) {
  if (v != v) return c.from != Ty::f64 && c.to != Ty::s64 && c.to != Ty::u64 ? 0 : 1ull << (bits_of(c.to) - 1);
  v = to_whole(v, c.whole);
  if (v <= static_cast<double>(least(c.to))) return static_cast<uint64_t>(least(c.to));
  if (v >= static_cast<double>(most(c.to))) return static_cast<uint64_t>(most(c.to));
  return static_cast<uint64_t>(static_cast<Wide>(v));
}

float single(Exact x, Round r) {
  switch (r) {
    case Round::zero: return round_float<Nearest::rz>(x);
    case Round::down: return round_float<Nearest::rm>(x);
    case Round::up: return round_float<Nearest::rp>(x);
    default: return round_float<Nearest::rn>(x);
  }
}

// An integer to double with a directed mode; `rest` is what the nearest double leaves out.
double whole_double(Exact x, Round r) {
  const bool down = r == Round::down || (r == Round::zero && x.value > 0),
             up = r == Round::up || (r == Round::zero && x.value < 0);
  if (x.rest < 0 && down) return std::nextafter(x.value, -INFINITY);
  if (x.rest > 0 && up) return std::nextafter(x.value, INFINITY);
  return x.value;
}

uint64_t to_float(const Conversion& c, Exact x) {
  if (c.relu) x.value = clamped(x.value);
  if (c.sat) x = x.value > 0 ? (x.value < 1 ? x : Exact{1, 0}) : Exact{0, 0};
  if (c.to == Ty::f64) return bit_cast<uint64_t>(whole_double(x, c.round));
  if (c.to == Ty::f32) {
    if (x.value != x.value) return kNan32;
    const bool plain = std::isinf(x.value) || x.value == 0;
    return bit_cast<uint32_t>(flush(plain ? static_cast<float>(x.value) : single(x, c.round), c.ftz));
  }
  return encode(c.to == Ty::f16 ? kF16 : kBF16, to_odd(x), c.round, c.satfinite);
}

uint64_t converted(const Conversion& c, uint64_t raw) {
  if (!is_float(c.from)) {
    Wide v = integer_value(c.from, raw);
    if (!is_float(c.to)) return static_cast<uint64_t>(c.sat ? std::min(std::max(v, least(c.to)), most(c.to)) : v);
    const double d = static_cast<double>(v);
    return to_float(c, {d, static_cast<double>(v - static_cast<Wide>(d))});
  }
  const double v = float_value(c.from, raw, c.ftz);
  if (!is_float(c.to)) return float_to_integer(c, v);
  return to_float(c, {to_whole(v, c.whole), 0});
}

// What a register holds: sub-word integers extended to its width, by their sign.
uint64_t extended(Ty t, uint64_t v, unsigned bytes) {
  if (!is_float(t)) v = static_cast<uint64_t>(integer_value(t, v));
  return bytes == 8 ? v : v & ((1ull << (8 * bytes)) - 1);
}

Step convert(Context& c, const Op& op) {
  const Conversion& k = *static_cast<const Conversion*>(op.extra.get());
  const bool wide_in = op.count == 8, wide_out = op.size == 8;
  for (Mask left = c.mask; left != 0; left &= left - 1) {
    const unsigned l = static_cast<unsigned>(__builtin_ctz(left));
    const uint64_t raw = wide_in ? c.warp.v64(op.s[0]).x[l] : c.warp.v32(op.s[0]).x[l];
    const uint64_t v = extended(k.to, converted(k, raw), op.size);
    if (wide_out) c.warp.v64(op.d[0]).x[l] = v;
    else c.warp.v32(op.d[0]).x[l] = static_cast<uint32_t>(v);
  }
  return Step::next;
}

// --- the conversions that kernels are full of, as loops that vectorise.

// Without saturation an integer is extended or cut: T is the narrower of both types.
template <class T, unsigned in, unsigned out, bool half>
PTX_CLONES Step extend_integer(Context& c, const Op& op) {
  using Word = typename Lanes<out>::Word;
  const auto* a = Lanes<in>::of(c.warp, op.s[0]);
  each_lane(c.mask, Lanes<out>::of(c.warp, op.d[0]), [=](unsigned l) {
    const Word v = static_cast<Word>(static_cast<std::make_signed_t<Word>>(static_cast<T>(a[l])));
    return half ? static_cast<Word>(v & 0xffff) : v;
  });
  return Step::next;
}
template <class T>
Handler extend_of(unsigned in, unsigned out) {
  if (out == 8) return in == 8 ? extend_integer<T, 8, 8, false> : extend_integer<T, 4, 8, false>;
  if (out == 4) return in == 8 ? extend_integer<T, 8, 4, false> : extend_integer<T, 4, 4, false>;
  return in == 8 ? extend_integer<T, 8, 4, true> : extend_integer<T, 4, 4, true>;
}
Handler quick_integer(const Conversion& k, unsigned in, unsigned out) {
  // Extended by the source's sign and then by the target's: two steps.
  if (is_signed(k.from) && !is_signed(k.to) && bits_of(k.to) > bits_of(k.from) && 8 * out > bits_of(k.to))
    return nullptr;
  // The destination's own type decides how a narrower result fills its register; else the source's how it is extended.
  const Ty t = bits_of(k.to) <= bits_of(k.from) ? k.to : k.from;
  const bool widened_sign = is_signed(t);
  switch (bits_of(t)) {
    case 8: return widened_sign ? extend_of<int8_t>(in, out) : extend_of<uint8_t>(in, out);
    case 16: return widened_sign ? extend_of<int16_t>(in, out) : extend_of<uint16_t>(in, out);
    case 32: return widened_sign ? extend_of<int32_t>(in, out) : extend_of<uint32_t>(in, out);
    default: return extend_of<uint64_t>(in, out);
  }
}

struct FloatOfBF16 {
  template <class S>
  static PTX_INLINE float of(S v) {
    return canonical(value_of(v));
  }
};
struct FloatOfInt {
  template <class S>
  static PTX_INLINE float of(S v) {
    return static_cast<float>(v);
  }
};
struct HalfOfFloat {
  template <class S>
  static PTX_INLINE F16 of(S v) {
    return {static_cast<uint16_t>(f16_of_f32(v))};
  }
};
struct BF16OfFloat {
  template <class S>
  static PTX_INLINE BF16 of(S v) {
    return {static_cast<uint16_t>(bf16_of_f32(v))};
  }
};
template <class I, int mode>
struct IntOfFloat {  // 0 zero, 1 nearest, 2 down, 3 up
  template <class S>
  static PTX_INLINE I of(S v) {
    const double d = v;
    const double w = mode == 0 ? d : mode == 1 ? std::nearbyint(d) : mode == 2 ? std::floor(d) : std::ceil(d);
    const double low = std::numeric_limits<I>::min(), high = std::numeric_limits<I>::max();
    const double bounded = w > low ? (w < high ? w : high) : low;
    return v == v ? static_cast<I>(static_cast<int64_t>(bounded)) : 0;
  }
};
template <class I>
Handler int_of_float(Whole w) {
  switch (w) {
    case Whole::zero: return unary<I, float, IntOfFloat<I, 0>>;
    case Whole::nearest: return unary<I, float, IntOfFloat<I, 1>>;
    case Whole::down: return unary<I, float, IntOfFloat<I, 2>>;
    default: return unary<I, float, IntOfFloat<I, 3>>;
  }
}
template <int mode>
struct WholeFloat {
  template <class S>
  static PTX_INLINE float of(S v) {
    return canonical(mode == 0   ? std::trunc(v)
                     : mode == 1 ? std::nearbyint(v)
                     : mode == 2 ? std::floor(v)
                                 : std::ceil(v));
  }
};

Handler quick(const Conversion& k, unsigned in, unsigned out) {
  if (k.sat || k.relu || k.satfinite || k.ftz) return nullptr;
  if (!is_float(k.from) && !is_float(k.to)) return quick_integer(k, in, out);
  if (out != (k.to == Ty::f16 || k.to == Ty::bf16 ? 2u : 4u) || in != 4 || k.round != Round::nearest_even)
    return nullptr;
  if (k.to == Ty::f32 && k.whole == Whole::none) {
    if (k.from == Ty::bf16) return unary<float, BF16, FloatOfBF16>;
    if (k.from == Ty::f16) return unary<float, F16, FloatOfBF16>;
    if (k.from == Ty::s32) return unary<float, int32_t, FloatOfInt>;
    if (k.from == Ty::u32) return unary<float, uint32_t, FloatOfInt>;
  }
  if (k.from != Ty::f32) return nullptr;
  if (k.to == Ty::f16) return unary<F16, float, HalfOfFloat>;
  if (k.to == Ty::bf16) return unary<BF16, float, BF16OfFloat>;
  if (k.to == Ty::s32) return int_of_float<int32_t>(k.whole);
  if (k.to == Ty::u32) return int_of_float<uint32_t>(k.whole);
  if (k.to == Ty::f32)
    return k.whole == Whole::zero      ? unary<float, float, WholeFloat<0>>
           : k.whole == Whole::nearest ? unary<float, float, WholeFloat<1>>
           : k.whole == Whole::down    ? unary<float, float, WholeFloat<2>>
           : k.whole == Whole::up      ? unary<float, float, WholeFloat<3>>
                                       : nullptr;
  return nullptr;
}

// Which rounding a conversion must, may or may not have.
void check_rounding(const Decoder& d, const Conversion& k, const std::string& round) {
  const bool from = is_float(k.from), to = is_float(k.to), whole = k.whole != Whole::none,
             fraction = !round.empty() && !whole;
  if (from && !to && !whole) d.fail("a float becomes an integer with .rni, .rzi, .rmi or .rpi");
  if (!from && to && !fraction) d.fail("an integer becomes a float with .rn, .rz, .rm or .rp");
  if (!from && !to && !round.empty()) d.fail("no rounding between integers");
  if (!from || !to) return;
  if (whole && k.from != k.to) d.fail("integer rounding is for equal types");
  const bool narrows = bits_of(k.to) < bits_of(k.from) || (k.to != k.from && bits_of(k.to) == bits_of(k.from));
  if (narrows && !fraction) d.fail("a narrowing conversion needs .rn, .rz, .rm or .rp");
  if (!narrows && fraction) d.fail("no rounding where nothing is lost");
}

}  // namespace

void decode_scalar_cvt(Decoder& d, Op& op) {
  Modifiers m(d.from);
  Conversion k;
  const std::string round = m.take_optional({"rni", "rzi", "rmi", "rpi", "rn", "rz", "rm", "rp"}, "");
  k.whole = round == "rni"   ? Whole::nearest
            : round == "rzi" ? Whole::zero
            : round == "rmi" ? Whole::down
            : round == "rpi" ? Whole::up
                             : Whole::none;
  k.round = round == "rz" ? Round::zero : round == "rm" ? Round::down : round == "rp" ? Round::up : Round::nearest_even;
  k.ftz = m.take("ftz");
  k.sat = m.take("sat");
  k.relu = m.take("relu");
  k.satfinite = m.take("satfinite");
  k.to = m.take_type();
  k.from = m.take_type();
  m.done();
  d.count(2, 2);
  for (Ty t : {k.to, k.from})
    if (bits_of(t) == 0 || bits_of(t) > 64 ||
        (!is_float(t) && t != Ty::u8 && t != Ty::u16 && t != Ty::u32 && t != Ty::u64 && !is_signed(t)))
      d.fail("no type of cvt");
  check_rounding(d, k, round);
  if (k.ftz && k.from != Ty::f32 && k.to != Ty::f32) d.fail("'.ftz' is for .f32");
  if ((k.relu || k.satfinite) &&
      !(k.from == Ty::f32 && (k.to == Ty::f16 || k.to == Ty::bf16) && (round == "rn" || round == "rz")))
    d.fail("'.relu' and '.satfinite' are for .f16.f32 and .bf16.f32 with .rn or .rz");
  const Operand &to = d.operand(0), &from = d.operand(1);
  // Registers may be wider than the types (PTX ISA 9.4.1), those of floats may not.
  const unsigned need_to = std::max(2u, bits_of(k.to) / 8), need_from = std::max(2u, bits_of(k.from) / 8);
  const unsigned have_to = to.kind == Operand::reg ? bytes_of(to.decl->type) : need_to;
  const unsigned have_from = from.kind == Operand::reg ? bytes_of(from.decl->type) : need_from;
  if (have_to < need_to || (is_float(k.to) && have_to != need_to))
    d.fail("the destination has " + std::to_string(8 * have_to) + " bits");
  if (have_from < need_from || (is_float(k.from) && have_from != need_from))
    d.fail("the source has " + std::to_string(8 * have_from) + " bits");
  op.d[0] = d.destination(to, have_to);
  op.s[0] = d.source(from, have_from);
  op.size = static_cast<uint8_t>(have_to);
  op.count = have_from == 8 ? 8 : 4;
  op.run = quick(k, op.count, have_to);
  if (op.run == nullptr) op.run = convert;
  op.extra = std::make_shared<Conversion>(k);
}

namespace {

template <uint64_t window, uint64_t keep>
Step to_generic(Context& c, const Op& op) {
  const uint64_t* a = c.warp.v64(op.s[0]).x;
  each_lane(c.mask, c.warp.v64(op.d[0]).x, [=](unsigned l) { return (a[l] & keep) | window; });
  return Step::next;
}

void decode_cvta(Decoder& d, Op& op) {
  Modifiers m(d.from);
  const bool to = m.take("to");
  const std::string space =
      m.take_one({"global", "shared", "shared::cta", "shared::cluster", "local", "const", "param", "param::entry"});
  m.take_one({"u64"});  // .address_size 64
  m.done();
  d.count(2, 2);
  op.d[0] = d.destination(d.operand(0), 8);
  op.s[0] = d.source(d.operand(1), 8);
  op.kind = Class::move;
  if (space[0] == 's') op.run = to ? to_generic<0, 0xffffffffull> : to_generic<kGenericShared, 0xffffffffull>;
  else if (space == "local")
    op.run = to ? to_generic<0, kGenericLocal - 1> : to_generic<kGenericLocal, kGenericLocal - 1>;
  else op.run = to_generic<0, ~0ull>;
}

}  // namespace

void decode_convert(Decoder& d, Op& op) {
  op.kind = Class::convert;
  if (d.from.parts[0] == "cvta") return decode_cvta(d, op);
  bool packed = false;
  for (size_t i = 1; i < d.from.parts.size(); i++) {
    const std::string& p = d.from.parts[i];
    packed |= p == "tf32" || (p.size() > 2 && p[p.size() - 2] == 'x');
  }
  if (d.from.parts.size() > 1 && d.from.parts[1] == "pack") decode_pack(d, op);
  else if (packed) decode_packed_cvt(d, op);
  else decode_scalar_cvt(d, op);
}

}  // namespace ptx
