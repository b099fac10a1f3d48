// cvt to and from two or four values in a register: f16x2, bf16x2, tf32, the 8, 6 and 4-bit formats, and from fixed
// point (PTX ISA 9.7.9.21); cvt.pack (9.7.9.22).
#include "units/convert.h"
#include "units/float_math.h"

namespace ptx {

namespace {

enum class Kind : uint8_t { f32, f16x2, bf16x2, tf32, small, ue8m0, s2f6 };

struct Packed {
  Kind to = Kind::f32, from = Kind::f32;
  Format format{};                // of the small side
  unsigned width = 8, count = 2;  // bits that an element of the small side takes, elements
  Round round = Round::nearest_even;
  bool relu = false, satfinite = false, random = false;
  bool scaled = false;            // two ue8m0 in a second operand
};

bool small_format(const std::string& name, Packed& k) {
  static const std::map<std::string, std::pair<Format, unsigned>> formats = {
      {"e4m3", {kE4M3, 8}}, {"e5m2", {kE5M2, 8}}, {"e3m2", {kE3M2, 8}}, {"e2m3", {kE2M3, 8}}, {"e2m1", {kE2M1, 4}}};
  const auto found = formats.find(name.substr(0, name.size() - 2));
  if (found == formats.end() || (name.back() != '2' && name.back() != '4')) return false;
  k.format = found->second.first;
  k.width = found->second.second;
  k.count = static_cast<unsigned>(name.back() - '0');
  return true;
}

double relu(const Packed& k, double v) { return k.relu ? clamped(v) : v; }

uint32_t small_code(const Packed& k, double v) { return encode(k.format, relu(k, v), k.round, true); }

uint32_t half_code(const Packed& k, double v) {
  v = relu(k, v);
  return encode(k.to == Kind::f16x2 ? kF16 : kBF16, v, k.round, k.satfinite);
}

float half_value(Kind kind, uint32_t code) {
  return kind == Kind::f16x2 ? f32_of_f16(code & 0xffff) : f32_of_bf16(code & 0xffff);
}

// One element of the result from the value of its source.
uint32_t element(const Packed& k, double v) {
  switch (k.to) {
    case Kind::f16x2:
    case Kind::bf16x2: return half_code(k, v);
    case Kind::ue8m0: return encode_ue8m0(v, k.round == Round::up);
    default: return small_code(k, v);
  }
}

// Two values in: from two f32 registers (the first goes to the upper half) or from one packed register.
Step convert_two(Context& c, const Op& op) {
  const Packed& k = *static_cast<const Packed*>(op.extra.get());
  const bool wide = k.to == Kind::f16x2 || k.to == Kind::bf16x2;
  const unsigned out = wide ? 16 : k.width;
  const uint32_t *a = c.warp.v32(op.s[0]).x, *b = c.warp.v32(op.s[1]).x;
  for (Mask left = c.mask; left != 0; left &= left - 1) {
    const unsigned l = static_cast<unsigned>(__builtin_ctz(left));
    double high, low;
    if (k.from == Kind::f32) {
      high = bit_cast<float>(a[l]);
      low = bit_cast<float>(b[l]);
    } else if (k.from == Kind::small) {
      high = decode(k.format, a[l] >> k.width);
      low = decode(k.format, a[l]);
    } else if (k.from == Kind::ue8m0) {
      high = decode_ue8m0(a[l] >> 8);
      low = decode_ue8m0(a[l]);
    } else {
      high = half_value(k.from, a[l] >> 16);
      low = half_value(k.from, a[l]);
    }
    c.warp.v32(op.d[0]).x[l] = element(k, high) << out | element(k, low);
  }
  return Step::next;
}

// PTX ISA 5.2.4: .s2f6 is an 8-bit two's complement integer in units of 2^-6.
double decode_s2f6(uint32_t code) { return static_cast<int8_t>(code) / 64.0; }

// .bf16x2.s2f6x2: each value is exact in bf16, and so is its product with a power of two, or it is beyond bf16's range.
Step convert_fixed(Context& c, const Op& op) {
  const Packed& k = *static_cast<const Packed*>(op.extra.get());
  const uint32_t *a = c.warp.v32(op.s[0]).x, *scales = k.scaled ? c.warp.v32(op.s[1]).x : nullptr;
  each_lane(c.mask, c.warp.v32(op.d[0]).x, [&](unsigned l) {
    const uint32_t scale = scales != nullptr ? scales[l] : 0x7f7f;
    return half_code(k, decode_s2f6(a[l] >> 8) * decode_ue8m0(scale >> 8)) << 16 |
           half_code(k, decode_s2f6(a[l]) * decode_ue8m0(scale));
  });
  return Step::next;
}

// .f16x2.f32 and .bf16x2.f32 with .rn, as kernels use them.
template <bool bf16, bool clamp>
PTX_CLONES Step pack_halves(Context& c, const Op& op) {
  const uint32_t *a = c.warp.v32(op.s[0]).x, *b = c.warp.v32(op.s[1]).x;
  each_lane(c.mask, c.warp.v32(op.d[0]).x, [=](unsigned l) {
    float high = bit_cast<float>(a[l]), low = bit_cast<float>(b[l]);
    if (clamp) {
      high = high > 0 || high != high ? high : 0.0f;
      low = low > 0 || low != low ? low : 0.0f;
    }
    return bf16 ? bf16_of_f32(high) << 16 | bf16_of_f32(low) : f16_of_f32(high) << 16 | f16_of_f32(low);
  });
  return Step::next;
}

Step convert_tf32(Context& c, const Op& op) {
  const Packed& k = *static_cast<const Packed*>(op.extra.get());
  const uint32_t* a = c.warp.v32(op.s[0]).x;
  each_lane(c.mask, c.warp.v32(op.d[0]).x, [&](unsigned l) {
    const float v = bit_cast<float>(a[l]);
    return tf32_of_f32(k.relu && !(v > 0) && v == v ? 0.0f : v, k.round, k.satfinite);
  });
  return Step::next;
}

void take_rounding(Decoder& d, Modifiers& m, Packed& k) {
  const std::string r = m.take_one({"rn", "rz", "rna", "rp", "rs"});
  k.round = r == "rn" ? Round::nearest_even : r == "rz" ? Round::zero : r == "rp" ? Round::up : Round::nearest_away;
  if (r == "rs") d.fail("stochastic rounding (.rs) is not modelled");
  const bool scale = k.to == Kind::ue8m0, half = k.to == Kind::f16x2 || k.to == Kind::bf16x2;
  if (r == "rna" && k.to != Kind::tf32) d.fail("'.rna' is for .tf32");
  if (scale != (r == "rp") && !(scale && r == "rz")) d.fail("'." + r + "' is not for this conversion");
  if (r == "rz" && !scale && k.to != Kind::tf32 && !(half && k.from == Kind::f32))
    d.fail("'.rz' is not for this conversion");
}

Kind kind_of(Decoder& d, const std::string& name, Packed& k) {
  if (name == "f32") return Kind::f32;
  if (name == "f16x2") return Kind::f16x2;
  if (name == "bf16x2") return Kind::bf16x2;
  if (name == "tf32") return Kind::tf32;
  if (name == "ue8m0x2") return Kind::ue8m0;
  if (name == "s2f6x2") return Kind::s2f6;
  if (small_format(name, k)) return Kind::small;
  d.fail("'." + name + "' is no type of cvt");
}

unsigned bytes_of_side(const Packed& k, Kind side) {
  if (side == Kind::ue8m0 || side == Kind::s2f6) return 2;
  if (side != Kind::small) return 4;
  return k.width * k.count / 8;
}

void check_pair(const Decoder& d, const Packed& k) {
  const bool half = k.from == Kind::f16x2 || k.from == Kind::bf16x2;
  bool ok = false;
  switch (k.to) {
    case Kind::f16x2: ok = k.from == Kind::f32 || k.from == Kind::small; break;
    case Kind::bf16x2: ok = k.from == Kind::f32 || k.from == Kind::ue8m0 || k.from == Kind::s2f6; break;
    case Kind::tf32: ok = k.from == Kind::f32; break;
    case Kind::small: ok = (k.from == Kind::f32 || half) && k.count == 2; break;
    case Kind::ue8m0: ok = k.from == Kind::f32 || k.from == Kind::bf16x2; break;
    default: break;
  }
  if (!ok) d.fail("no conversion between these types");
  if (k.to == Kind::small && !k.satfinite) d.fail("'.satfinite' is required");
  if (k.satfinite && (k.from == Kind::small || k.from == Kind::ue8m0))
    d.fail("'.satfinite' is not for this conversion");
  if (k.scaled && k.from != Kind::s2f6) d.fail("'.scaled::n2::ue8m0' is not for this conversion");
  if (k.relu && (k.to == Kind::ue8m0 || k.from == Kind::ue8m0)) d.fail("'.relu' is not for this conversion");
}

// cvt.pack: saturates two integers and puts them below the low bits of c.
Step pack_integers(Context& c, const Op& op) {
  const unsigned bits = op.size;
  const int64_t low = op.mode ? -(1ll << (bits - 1)) : 0, high = (1ll << (bits - (op.mode ? 1 : 0))) - 1;
  const uint64_t mask = (1ull << bits) - 1;
  const uint32_t *a = c.warp.v32(op.s[0]).x, *b = c.warp.v32(op.s[1]).x, *e = c.warp.v32(op.s[2]).x;
  each_lane(c.mask, c.warp.v32(op.d[0]).x, [=](unsigned l) {
    const uint64_t x = static_cast<uint64_t>(std::min(std::max<int64_t>(static_cast<int32_t>(a[l]), low), high)) & mask;
    const uint64_t y = static_cast<uint64_t>(std::min(std::max<int64_t>(static_cast<int32_t>(b[l]), low), high)) & mask;
    return static_cast<uint32_t>(static_cast<uint64_t>(e[l]) << (2 * bits) | x << bits | y);
  });
  return Step::next;
}

}  // namespace

void decode_packed_cvt(Decoder& d, Op& op) {
  Modifiers m(d.from);
  auto k = std::make_shared<Packed>();
  const size_t n = d.from.parts.size();
  if (n < 3) d.fail("two types are expected");
  k->to = kind_of(d, d.from.parts[n - 2], *k);
  k->from = kind_of(d, d.from.parts[n - 1], *k);
  m.take(d.from.parts[n - 2].c_str());
  m.take(d.from.parts[n - 1].c_str());
  take_rounding(d, m, *k);
  k->relu = m.take("relu");
  k->satfinite = m.take("satfinite");
  k->scaled = m.take("scaled::n2::ue8m0");
  m.done();
  check_pair(d, *k);
  if (k->from == Kind::s2f6) d.not_for_a_family(".s2f6x2");
  const size_t sources = (k->from == Kind::f32 && k->to != Kind::tf32) || k->scaled ? 2 : 1;
  d.count(sources + 1, sources + 1);
  // .e2m1x2 lives in a .b8 register, which is as wide here as a .b16 one.
  op.d[0] = d.destination(d.operand(0), std::max(2u, bytes_of_side(*k, k->to)));
  for (size_t i = 0; i < sources; i++) op.s[i] = d.source(d.operand(i + 1), std::max(2u, bytes_of_side(*k, k->from)));
  op.extra = k;
  op.run = k->to == Kind::tf32 ? convert_tf32 : k->from == Kind::s2f6 ? convert_fixed : convert_two;
  if (k->from != Kind::f32 || k->round != Round::nearest_even || k->satfinite) return;
  if (k->to == Kind::bf16x2) op.run = k->relu ? pack_halves<true, true> : pack_halves<true, false>;
  if (k->to == Kind::f16x2) op.run = k->relu ? pack_halves<false, true> : pack_halves<false, false>;
}

void decode_pack(Decoder& d, Op& op) {
  Modifiers m(d.from);
  m.take_one({"pack"});
  m.take_one({"sat"});
  const std::string type = m.take_one({"u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"});
  m.take_one({"s32"});
  op.mode = type[0] == 's';
  op.size = static_cast<uint8_t>(std::stoi(type.substr(1)));
  const size_t sources = op.size == 16 ? 2 : 3;
  if (sources == 3) m.take_one({"b32"});
  m.done();
  d.count(sources + 1, sources + 1);
  op.d[0] = d.destination(d.operand(0), 4);
  for (size_t i = 0; i < sources; i++) op.s[i] = d.source(d.operand(i + 1), 4);
  op.run = pack_integers;
}

}  // namespace ptx
