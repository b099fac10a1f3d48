// tensormap.replace (PTX ISA 9.7.9.28) and tensormap.cp_fenceproxy (9.7.13.16).
#include "async/async.h"
#include "async/tensormap.h"

namespace ptx {

namespace {

enum class Field : uint8_t {
  address, rank, box, size, stride, step, element, interleave, swizzle, atomicity, fill
};

struct Replace {
  Address at;
  bool shared = false, generic = false;
  Field field = Field::address;
  unsigned ordinal = 0;
  Slot value = 0;
  bool wide = false;       // .b64
};

struct Copy {
  Address to, from;
  std::string scope;
};

constexpr struct {
  const char* name;
  Field field;
  bool ordinal, immediate;
} kFields[] = {
    {"global_address", Field::address, false, false},   {"rank", Field::rank, false, false},
    {"box_dim", Field::box, true, false},               {"global_dim", Field::size, true, false},
    {"global_stride", Field::stride, true, false},      {"element_stride", Field::step, true, false},
    {"elemtype", Field::element, false, true},          {"interleave_layout", Field::interleave, false, true},
    {"swizzle_mode", Field::swizzle, false, true},      {"swizzle_atomicity", Field::atomicity, false, true},
    {"fill_mode", Field::fill, false, true},
};

void limit(const Context& c, const char* what, uint64_t value, uint64_t least, uint64_t most) {
  if (value < least || value > most)
    c.fail(std::string("tensormap.replace: ") + what + " " + std::to_string(value) + ", accepted are " +
           std::to_string(least) + " to " + std::to_string(most));
}

void put(const Context& c, TensorMap& t, Field field, unsigned ordinal, uint64_t value) {
  switch (field) {
    case Field::address: t.base = value; break;
    case Field::rank: limit(c, "rank - 1", value, 0, 4); t.rank = static_cast<unsigned>(value) + 1; break;
    case Field::box: limit(c, "box size", value, 1, 256); t.box[ordinal] = static_cast<uint32_t>(value); break;
    case Field::size: t.size[ordinal] = value ? value : 1ull << 32; break;   // 32 bits: 2^32 wraps to 0
    case Field::stride:
      if (value % 16) c.fail("tensormap.replace: stride " + std::to_string(value) + " is no multiple of 16 bytes");
      limit(c, "stride", value, 0, (1ull << 36) - 16);
      t.stride[ordinal + 1] = value;   // the stride of dimension 0 is one element
      break;
    case Field::step: limit(c, "element stride", value, 1, 8); t.step[ordinal] = static_cast<uint32_t>(value); break;
    case Field::element: t.element = static_cast<Element>(value); break;
    case Field::interleave: t.interleave = static_cast<unsigned>(value); break;
    case Field::swizzle: t.swizzle = static_cast<Swizzle>(value); break;
    case Field::atomicity: t.atomicity = static_cast<Atomicity>(value); break;
    case Field::fill: t.nan_fill = value != 0; break;
  }
}

// All fields, whatever the rank says now: the rank may be replaced last.
TensorMap whole(uint8_t* bytes) {
  uint8_t copy[kTensorMapBytes];
  std::memcpy(copy, bytes, sizeof copy);
  const TensorMap narrow = decode_tensor_map(copy);
  copy[8] = static_cast<uint8_t>((copy[8] & ~0x70) | 4 << 4);
  TensorMap t = decode_tensor_map(copy);
  t.rank = narrow.rank ? narrow.rank : 1;
  return t;
}

Step run_replace(Context& c, const Op& op) {
  const auto& r = record<Replace>(op);
  uint64_t at[kLanes];
  r.at.lanes(c, at);
  for (unsigned l = 0; l < kLanes; l++) {
    if (!(c.mask >> l & 1)) continue;
    const bool shared = r.shared || (r.generic && place_generic(c, at[l]).space == Place::shared);
    uint8_t* bytes;
    if (shared) {
      const SharedPlace p = shared_place(c, at[l], r.generic, kTensorMapBytes, 64, true, "the tensor map");
      if (c.check) c.check->range(c, Space::shared, p.cta, p.offset, kTensorMapBytes, true, l);
      bytes = p.bytes();
    } else {
      bytes = global_place(c, at[l], kTensorMapBytes, 64, true, "the tensor map");
      if (c.check) c.check->range(c, Space::global, nullptr, at[l], kTensorMapBytes, true, l);
    }
    TensorMap t = whole(bytes);
    put(c, t, r.field, r.ordinal, r.wide ? c.warp.v64(r.value).x[l] : c.warp.v32(r.value).x[l]);
    encode_tensor_map(t, bytes);
  }
  return Step::next;
}

Step run_copy(Context& c, const Op& op) {
  const auto& r = record<Copy>(op);
  uint64_t to[kLanes], from[kLanes];
  r.to.lanes(c, to);
  r.from.lanes(c, from);
  uint64_t done = ~0ull;
  for (unsigned l = 0; l < kLanes; l++) {
    if (!(c.mask >> l & 1) || to[l] == done) continue;
    const SharedPlace p = shared_place(c, from[l], r.from.generic, kTensorMapBytes, 16, true, "the source tensor map");
    uint8_t* global = global_place(c, to[l], kTensorMapBytes, 64, true, "the destination tensor map");
    if (c.check) {
      c.check->range(c, Space::shared, p.cta, p.offset, kTensorMapBytes, false);
      c.check->range(c, Space::global, nullptr, to[l], kTensorMapBytes, true);
    }
    std::memcpy(global, p.bytes(), kTensorMapBytes);
    done = to[l];
  }
  if (c.check) c.check->proxy_fence(c, "proxy.tensormap::generic.release." + r.scope);
  return Step::next;
}

void decode_replace(Decoder& d, Op& op, Modifiers& m) {
  auto extra = std::make_shared<Replace>();
  Replace& r = *extra;
  if (!m.take("tile")) d.fail("tensormap.replace.tile is the only mode");
  bool ordinal = false, immediate = false, found = false;
  for (const auto& f : kFields) {
    if (!m.take(f.name)) continue;
    r.field = f.field;
    ordinal = f.ordinal;
    immediate = f.immediate;
    found = true;
    break;
  }
  if (!found) d.fail("no field of a tensor map is named");
  r.shared = m.take("shared::cta") || m.take("shared");
  const bool global = !r.shared && m.take("global");
  r.generic = !r.shared && !global;
  if (!m.take("b1024")) d.fail("the type .b1024 is missing");
  r.wide = m.take_one({"b32", "b64"}) == "b64";
  if (r.wide != (r.field == Field::address || r.field == Field::stride))
    d.fail("global_address and global_stride are .b64, the other fields .b32");
  m.done();
  d.count(ordinal ? 3 : 2, ordinal ? 3 : 2);
  r.at = address_of(d, d.operand(0), r.shared ? In::shared : global ? In::global : In::generic);
  if (ordinal) {
    const Operand& o = d.operand(1);
    const uint64_t most = r.field == Field::stride ? 3 : 4;
    if (o.kind != Operand::imm || o.bits > most)
      d.fail("the ordinal has to be a constant up to " + std::to_string(most));
    r.ordinal = static_cast<unsigned>(o.bits);
  }
  const Operand& value = d.operand(ordinal ? 2 : 1);
  if (immediate) {
    if (value.kind != Operand::imm) d.fail("the new value of this field has to be a constant");
    const bool binary = r.field == Field::fill;
    const uint64_t most = r.field == Field::element ? 15 : r.field == Field::interleave ? 2 : binary ? 1 : 3;
    if (value.bits > most) d.fail("the new value " + std::to_string(value.bits) + " is not supported");
  }
  r.value = d.source(value, r.wide ? 8 : 4);
  op.run = run_replace;
  op.extra = std::move(extra);
}

void decode_fenced_copy(Decoder& d, Op& op, Modifiers& m) {
  auto extra = std::make_shared<Copy>();
  for (const char* needed : {"global", "shared::cta", "tensormap::generic", "release", "sync", "aligned"})
    if (!m.take(needed)) d.fail(std::string(".") + needed + " is missing");
  extra->scope = m.take_one({"cta", "cluster", "gpu", "sys"});
  m.done();
  d.count(3, 3);
  const Operand& size = d.operand(2);
  if (size.kind != Operand::imm || size.bits != kTensorMapBytes) d.fail("the size has to be 128");
  extra->to = address_of(d, d.operand(0), In::global);
  extra->from = address_of(d, d.operand(1), In::shared);
  op.collective = true;
  op.run = run_copy;
  op.extra = std::move(extra);
}

}  // namespace

void decode_tensormap(Decoder& d, Op& op) {
  Modifiers m(d.from);
  op.kind = Class::copy;
  if (m.take("replace")) decode_replace(d, op, m);
  else if (m.take("cp_fenceproxy")) decode_fenced_copy(d, op, m);
  else d.fail("neither tensormap.replace nor tensormap.cp_fenceproxy");
}

}  // namespace ptx
