// mov (with packing, special registers and addresses), mapa, isspacep, getctarank (PTX ISA 9.7.9.3, .4, .19, .23, .24).
#include <algorithm>

#include "machine/lanes.h"

namespace ptx {

namespace {

template <class T>
PTX_CLONES Step copy(Context& c, const Op& op) {
  auto* d = LanesOf<T>::of(c.warp, op.d[0]);
  const auto* a = LanesOf<T>::of(c.warp, op.s[0]);
  each_lane(c.mask, d, [=](unsigned l) { return a[l]; });
  return Step::next;
}
Step copy_wide(Context& c, const Op& op) {
  for (unsigned half = 0; half < 4; half += 2) {
    uint64_t* d = c.warp.v64(op.d[0] + half).x;
    const uint64_t* a = c.warp.v64(op.s[0] + half).x;
    each_lane(c.mask, d, [=](unsigned l) { return a[l]; });
  }
  return Step::next;
}
Step copy_predicate(Context& c, const Op& op) {
  const Mask a = op.mode ? ~c.warp.pred(op.s[0]) : c.warp.pred(op.s[0]);
  Mask& d = c.warp.pred(op.d[0]);
  d = (d & ~c.mask) | (a & c.mask);
  return Step::next;
}

// {a, b, ...} into one register: part i is Part bits at i * bits of Part.
template <class Whole, class Part>
PTX_CLONES Step pack_vector(Context& c, const Op& op) {
  constexpr unsigned n = sizeof(Whole) / sizeof(Part);
  const typename LanesOf<Part>::Word* a[n];
  for (unsigned i = 0; i < n; i++) a[i] = LanesOf<Part>::of(c.warp, op.list[i]);
  each_lane(c.mask, LanesOf<Whole>::of(c.warp, op.d[0]), [&a](unsigned l) {
    Whole out = 0;
    for (unsigned i = 0; i < n; i++) out |= static_cast<Whole>(static_cast<Part>(a[i][l])) << i * sizeof(Part) * 8;
    return out;
  });
  return Step::next;
}
template <class Whole, class Part>
PTX_CLONES Step unpack_vector(Context& c, const Op& op) {
  constexpr unsigned n = sizeof(Whole) / sizeof(Part);
  Whole a[kLanes];  // the source may be one of the destinations
  const auto* s = LanesOf<Whole>::of(c.warp, op.s[0]);
  for (unsigned l = 0; l < kLanes; l++) a[l] = s[l];
  for (unsigned i = 0; i < n; i++)
    each_lane(c.mask, LanesOf<Part>::of(c.warp, op.list[i]),
              [&a, i](unsigned l) { return static_cast<Part>(a[l] >> i * sizeof(Part) * 8); });
  return Step::next;
}
Step pack_wide(Context& c, const Op& op) {
  uint64_t low[kLanes], high[kLanes];
  std::memcpy(low, c.warp.v64(op.list[0]).x, sizeof low);
  std::memcpy(high, c.warp.v64(op.list[1]).x, sizeof high);
  each_lane(c.mask, c.warp.v64(op.d[0]).x, [&](unsigned l) { return low[l]; });
  each_lane(c.mask, c.warp.v64(op.d[0] + 2).x, [&](unsigned l) { return high[l]; });
  return Step::next;
}
Step unpack_wide(Context& c, const Op& op) {
  for (unsigned i = 0; i < 2; i++) {
    const uint64_t* a = c.warp.v64(op.s[0] + 2 * i).x;
    each_lane(c.mask, c.warp.v64(op.list[i]).x, [=](unsigned l) { return a[l]; });
  }
  return Step::next;
}

// Time is counted in instructions, and passes with every look at the clock.
template <class T, unsigned shift>
Step clock(Context& c, const Op& op) {
  const T now = static_cast<T>(++c.warp.issued >> shift);
  each_lane(c.mask, LanesOf<T>::of(c.warp, op.d[0]), [=](unsigned) { return now; });
  return Step::next;
}
Handler clock_named(const std::string& name, unsigned bytes) {
  if (name == "%clock64" || name == "%globaltimer") return bytes == 8 ? clock<uint64_t, 0> : nullptr;
  if (name == "%clock_hi" || name == "%globaltimer_hi") return bytes == 4 ? clock<uint32_t, 32> : nullptr;
  if (name == "%clock" || name == "%globaltimer_lo") return bytes == 4 ? clock<uint32_t, 0> : nullptr;
  return nullptr;
}

Handler pack_of(unsigned whole, unsigned part) {
  if (whole == 4) return part == 2 ? pack_vector<uint32_t, uint16_t> : pack_vector<uint32_t, uint8_t>;
  if (whole == 8)
    return part == 4 ? pack_vector<uint64_t, uint32_t> : part == 2 ? pack_vector<uint64_t, uint16_t> : nullptr;
  return part == 8 ? pack_wide : part == 1 ? pack_vector<uint16_t, uint8_t> : nullptr;
}
Handler unpack_of(unsigned whole, unsigned part) {
  if (whole == 4) return part == 2 ? unpack_vector<uint32_t, uint16_t> : unpack_vector<uint32_t, uint8_t>;
  if (whole == 8)
    return part == 4 ? unpack_vector<uint64_t, uint32_t> : part == 2 ? unpack_vector<uint64_t, uint16_t> : nullptr;
  return part == 8 ? unpack_wide : part == 1 ? unpack_vector<uint16_t, uint8_t> : nullptr;
}

void decode_vector(Decoder& d, Op& op, unsigned whole) {
  const bool pack = d.operand(1).kind == Operand::vec;
  const Operand& vector = d.operand(pack ? 1 : 0);
  const unsigned n = static_cast<unsigned>(vector.parts.size()), part = whole / n;
  if ((n != 2 && n != 4) || (whole == 16 && n != 2)) d.fail("vectors of mov have 2 or 4 elements");
  for (const Operand& o : vector.parts)
    op.list.push_back(pack ? d.source(o, std::max(part, 2u)) : d.destination(o, std::max(part, 2u)));
  if (pack) op.d[0] = d.destination(d.operand(0), whole);
  else op.s[0] = d.source(d.operand(1), whole);
  op.run = pack ? pack_of(whole, part) : unpack_of(whole, part);
  if (op.run == nullptr) d.fail("no packing of " + std::to_string(whole * 8) + " bits into " + std::to_string(n));
}

void decode_mov(Decoder& d, Op& op) {
  Modifiers m(d.from);
  const Ty type = m.take_type();
  m.done();
  d.count(2, 2);
  const unsigned bytes = bytes_of(type);
  const Operand &to = d.operand(0), &from = d.operand(1);
  if (type == Ty::pred) {
    bool negated = false;
    op.d[0] = d.destination(to, 0);
    op.s[0] = d.predicate(from, negated);
    op.mode = negated;
    op.run = copy_predicate;
    return;
  }
  if (to.kind == Operand::vec || from.kind == Operand::vec) return decode_vector(d, op, bytes);
  op.d[0] = d.destination(to, bytes);
  if (from.kind == Operand::special) op.run = clock_named(from.name, bytes);
  if (op.run != nullptr) return;
  op.s[0] = d.source(from, bytes);
  op.run = bytes == 16 ? copy_wide : bytes == 8 ? copy<uint64_t> : copy<uint32_t>;
}

// The address that another CTA of the cluster has for the same place.
template <class T>
Step mapa(Context& c, const Op& op) {
  T* d = LanesOf<T>::of(c.warp, op.d[0]);
  const T* a = LanesOf<T>::of(c.warp, op.s[0]);
  const uint32_t* rank = c.warp.v32(op.s[1]).x;
  for (Mask left = c.mask; left != 0; left &= left - 1) {
    const unsigned l = static_cast<unsigned>(__builtin_ctz(left));
    // A rank that is not in the cluster makes an address that fails when it is used: lanes compute more than they need.
    const uint32_t to = std::min<uint32_t>(rank[l], 0xff);
    const T at = a[l] + static_cast<T>(op.offset);
    if (op.mode && at >> 28 >> 28 != kGenericShared >> 56)
      c.fail("a generic address that does not lead to shared memory");
    d[l] = (at & ~(static_cast<T>(0xff) << kRankShift)) | static_cast<T>(to) << kRankShift;
  }
  return Step::next;
}

template <class T>
Step cta_rank(Context& c, const Op& op) {
  const T* a = LanesOf<T>::of(c.warp, op.s[0]);
  each_lane(c.mask, c.warp.v32(op.d[0]).x, [=](unsigned l) { return static_cast<uint32_t>(a[l]) >> kRankShift; });
  return Step::next;
}

void decode_mapa(Decoder& d, Op& op, bool rank) {
  Modifiers m(d.from);
  op.mode = !m.take("shared::cluster");  // else the operand is a generic address
  const Ty type = m.take_type();
  m.done();
  if (type != Ty::u32 && type != Ty::u64) d.fail("the type is .u32 or .u64");
  const unsigned bytes = bytes_of(type);
  if (op.mode && bytes == 4) d.fail("a generic address has 64 bits");
  d.count(rank ? 2 : 3, rank ? 2 : 3);
  op.d[0] = d.destination(d.operand(0), rank ? 4 : bytes);
  op.s[0] = d.source(d.operand(1), bytes);
  if (rank) op.run = bytes == 8 ? cta_rank<uint64_t> : cta_rank<uint32_t>;
  else {
    op.s[1] = d.source(d.operand(2), 4);
    op.run = bytes == 8 ? mapa<uint64_t> : mapa<uint32_t>;
  }
}

enum : uint8_t { kGlobal, kShared, kSharedHere, kLocal, kParam };

Step is_space(Context& c, const Op& op) {
  const uint64_t* a = c.warp.v64(op.s[0]).x;
  const uint64_t params = c.launch.param_base, end = params + c.launch.program->function->param_bytes;
  each_bit(c.mask, c.warp.pred(op.d[0]), [&](unsigned l) {
    const bool shared = a[l] >> 56 == kGenericShared >> 56, local = a[l] >> 57 == kGenericLocal >> 57;
    const bool param = a[l] >= params && a[l] < end;
    switch (op.mode) {
      case kShared: return shared;
      case kSharedHere: return shared && (static_cast<uint32_t>(a[l]) >> kRankShift) == c.cta.rank;
      case kLocal: return local;
      case kParam: return param;
      default: return !shared && !local && !param;
    }
  });
  return Step::next;
}

void decode_isspacep(Decoder& d, Op& op) {
  Modifiers m(d.from);
  const std::string space =
      m.take_one({"global", "shared", "shared::cta", "shared::cluster", "local", "param", "param::entry"});
  m.done();
  d.count(2, 2);
  op.mode = space == "global"            ? kGlobal
            : space == "shared::cluster" ? kShared
            : space[0] == 's'            ? kSharedHere
            : space == "local"           ? kLocal
                                         : kParam;
  op.d[0] = d.destination(d.operand(0), 0);
  op.s[0] = d.source(d.operand(1), 8);
  op.run = is_space;
}

}  // namespace

void decode_move(Decoder& d, Op& op) {
  const std::string& root = d.from.parts[0];
  op.kind = Class::move;
  if (root == "mov") decode_mov(d, op);
  else if (root == "isspacep") decode_isspacep(d, op);
  else decode_mapa(d, op, root == "getctarank");
}

}  // namespace ptx
