// st.async and red.async (PTX ISA 9.7.9.12, 9.7.13.7), and st.bulk (9.7.9.13).
#include "async/async.h"

namespace ptx {

namespace {

struct Remote {
  Address to, barrier;
  std::vector<Slot> values;
  unsigned size = 0;            // bytes of one value
  bool global = false;          // .release: to global memory, without an mbarrier
  Reducer reduce = nullptr;     // red.async
};

struct Value {
  uint8_t bytes[32];
  unsigned size = 0;
};

Value value_of(Context& c, const Remote& r, unsigned lane) {
  Value v;
  for (Slot s : r.values) {
    if (r.size == 8) std::memcpy(v.bytes + v.size, &c.warp.v64(s).x[lane], 8);
    else std::memcpy(v.bytes + v.size, &c.warp.v32(s).x[lane], r.size);
    v.size += r.size;
  }
  return v;
}

void put(const Remote& r, uint8_t* to, const Value& v) {
  if (r.reduce) r.reduce(to, v.bytes, v.size);
  else std::memcpy(to, v.bytes, v.size);
}

void tell(Checker* check, const AsyncRef& ref, const Remote& r, Space space, Cta* owner, uint64_t at, unsigned size) {
  if (!check) return;
  if (r.reduce) check->reduce(ref, space, owner, at, size, Proxy::generic);
  else check->access(ref, space, owner, at, size, true, Proxy::generic);
}

void to_shared(Context& c, const Remote& r, const Value& v, uint64_t address, uint64_t barrier_address,
               unsigned lane) {
  const SharedPlace to = shared_place(c, address, r.to.generic, v.size, v.size, false, "the destination");
  const SharedPlace barrier = mbarrier_place(c, barrier_address, r.barrier.generic);
  if (to.cta != barrier.cta) c.fail("the destination and its mbarrier have to be in one CTA");
  if (r.reduce && to.cta == &c.cta) c.fail("red.async goes to another CTA of the cluster, this is the executing one");
  const AsyncRef ref = c.check ? c.check->issue(c, lane) : nullptr;
  auto held = std::make_shared<const Issued>(c);
  const Remote* form = &r;   // belongs to the program
  c.cluster.submit(0, [held, ref, form, v, to, barrier] {
    tell(held->c.check, ref, *form, Space::shared, to.cta, to.offset, v.size);
    put(*form, to.bytes(), v);
    mbarrier_complete(held->c, barrier, v.size, ref);
  });
}

void to_global(Context& c, const Remote& r, const Value& v, uint64_t address, unsigned lane) {
  uint8_t* to = global_place(c, address, v.size, v.size, true, "the destination");
  const AsyncRef ref = c.check ? c.check->issue(c, lane) : nullptr;
  Checker* check = c.check;
  const Remote* form = &r;
  c.cluster.submit(0, [check, ref, form, v, to, address] {
    tell(check, ref, *form, Space::global, nullptr, address, v.size);
    put(*form, to, v);
  });
}

Step run_remote(Context& c, const Op& op) {
  const auto& r = record<Remote>(op);
  if (!r.global && c.cluster.ctas.size() < 2) c.fail("needs a cluster of more than one CTA");
  uint64_t to[kLanes], barrier[kLanes] = {};
  r.to.lanes(c, to);
  if (!r.global) r.barrier.lanes(c, barrier);
  for (unsigned l = 0; l < kLanes; l++) {
    if (!(c.mask >> l & 1)) continue;
    const Value v = value_of(c, r, l);
    if (r.global) to_global(c, r, v, to[l], l);
    else to_shared(c, r, v, to[l], barrier[l], l);
  }
  return Step::next;
}

Step run_zero(Context& c, const Op& op) {
  const auto& r = record<Remote>(op);
  uint64_t to[kLanes];
  r.to.lanes(c, to);
  for (unsigned l = 0; l < kLanes; l++) {
    if (!(c.mask >> l & 1)) continue;
    const uint64_t size = r.size == 8 ? c.warp.v64(r.values[0]).x[l] : c.warp.v32(r.values[0]).x[l];
    if (size % 8 != 0 || size > 16777216)
      c.fail("st.bulk of " + std::to_string(size) + " bytes: a multiple of 8 up to 16777216 is accepted");
    const SharedPlace p = shared_place(c, to[l], r.to.generic, size, 8, true, "the destination of st.bulk");
    if (c.check) c.check->range(c, Space::shared, p.cta, p.offset, size, true, l);
    std::memset(p.bytes(), 0, size);
    c.count.shared_written += size;
  }
  return Step::next;
}

// What both have in common: where it goes, and what signals that it is there. Returns true for the global form.
bool decode_place(Decoder& d, Modifiers& m, Remote& r, bool strong) {
  r.global = strong;
  const bool named = m.take(strong ? "global" : "shared::cluster");
  if (!strong) m.take("mbarrier::complete_tx::bytes");
  d.count(strong ? 2 : 3, strong ? 2 : 3);
  r.to = address_of(d, d.operand(0), strong ? In::global : named ? In::shared : In::generic);
  if (!strong) r.barrier = address_of(d, d.operand(2), named ? In::shared : In::generic);
  return strong;
}

void decode_zero(Decoder& d, Op& op, Modifiers& m, Remote& r) {
  m.take("weak");
  const bool shared = m.take("shared::cta");
  m.done();
  d.count(3, 3);
  r.to = address_of(d, d.operand(0), shared ? In::shared : In::generic);
  const Operand& size = d.operand(1);
  r.size = size.kind == Operand::reg ? d.width(size) : 4;
  r.values = {d.source(size, r.size)};
  if (d.operand(2).kind != Operand::imm || d.operand(2).bits != 0) d.fail("st.bulk stores zero only");
  op.run = run_zero;
}

}  // namespace

void decode_store_async(Decoder& d, Op& op) {
  Modifiers m(d.from);
  auto extra = std::make_shared<Remote>();
  Remote& r = *extra;
  op.kind = Class::copy;
  op.run = run_remote;
  if (m.take("bulk")) {
    decode_zero(d, op, m, r);
    op.extra = std::move(extra);
    return;
  }
  m.take("async");
  const bool mmio = m.take("mmio"), strong = m.take("release");
  if (strong && m.take_one({"gpu", "sys"}) != "sys" && mmio) d.fail(".mmio goes with .sys");
  if (!strong && mmio) d.fail(".mmio goes with .release.sys");
  if (!strong && !m.take("weak")) m.take("cluster");
  decode_place(d, m, r, strong);
  const std::string vector = strong ? "" : m.take_optional({"v2", "v4"}, "");
  const Ty type = m.take_type();
  r.size = bytes_of(type);
  const bool small = type == Ty::b8 || type == Ty::u8 || type == Ty::s8;
  if (small) r.size = 1;
  if (type == Ty::pred || type == Ty::f16 || type == Ty::bf16 || type == Ty::b128 || (!strong && r.size < 4))
    d.fail("st.async has no such type");
  m.done();
  r.values = d.sources(d.operand(1), r.size == 8 ? 8 : 4);
  const size_t n = vector.empty() ? 1 : static_cast<size_t>(vector[1] - '0');
  if (r.values.size() != n) d.fail(std::to_string(n) + " values are expected");
  op.extra = std::move(extra);
}

void decode_reduce_async(Decoder& d, Op& op) {
  Modifiers m(d.from);
  auto extra = std::make_shared<Remote>();
  Remote& r = *extra;
  op.kind = Class::copy;
  op.run = run_remote;
  m.take("async");
  const bool mmio = m.take("mmio"), strong = m.take("release");
  if (!strong && !m.take("relaxed")) d.fail("red.async is .relaxed or .release");
  const std::string scope = strong ? m.take_one({"gpu", "sys", "cluster"}) : m.take_one({"cluster"});
  if (mmio && scope != "sys") d.fail(".mmio goes with .release.sys");
  decode_place(d, m, r, strong);
  const std::string name = m.take_one(kReduceNames);
  const Reduce what = reduce_named(name);
  const Ty type = m.take_type();
  m.done();
  r.size = bytes_of(type);
  r.reduce = reducer(what, type);
  const bool wide = r.size == 8 && !(what == Reduce::add && (type == Ty::u64 || (strong && type == Ty::s64)));
  if (!r.reduce || r.size < 4 || wide || type == Ty::f32 || (strong && what != Reduce::add))
    d.fail("red.async has no ." + name + " of this type here");
  r.values = {d.source(d.operand(1), r.size)};
  op.extra = std::move(extra);
}

}  // namespace ptx
