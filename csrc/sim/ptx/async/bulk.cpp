// cp.async.bulk, cp.reduce.async.bulk and the bulk groups. PTX ISA 9.7.9.25.4 "Bulk copy", 9.7.9.27.2.
#include "async/async.h"

namespace ptx {

namespace {

// global -> shared, shared::cta -> shared::cluster, shared -> global
enum class Way : uint8_t { load, between, store };

struct Bulk {
  Way way = Way::load;
  Address to, from, barrier;
  Slot size = 0, mask = 0;      // mask: ctaMask of a multicast, or byteMask of .cp_mask
  bool own = false;             // the destination is .shared::cta
  bool multicast = false, masked = false;
  Reducer reduce = nullptr;
};

// One lane's copy, addresses checked.
struct Copy {
  uint64_t global = 0;
  uint8_t* memory = nullptr;    // behind `global`
  SharedPlace shared{}, other{}, barrier{};   // other: the destination of shared -> shared
  uint64_t size = 0;
  uint32_t mask = 0;
  unsigned lane = 0;
};

void load(Context& c, const Bulk& r, const Copy& copy) {
  const AsyncRef ref = c.check ? c.check->issue(c, copy.lane) : nullptr;
  auto held = std::make_shared<const Issued>(c);
  // The destinations of a multicast get their bytes one by one.
  for (unsigned rank = 0; rank < 16; rank++) {
    if (r.multicast && !(copy.mask >> rank & 1)) continue;
    const SharedPlace to = r.multicast ? shared_in(c, copy.shared, rank) : copy.shared;
    const SharedPlace barrier = r.multicast ? shared_in(c, copy.barrier, rank) : copy.barrier;
    c.cluster.submit(0, [held, ref, copy, to, barrier] {
      if (Checker* check = held->c.check) {
        check->access(ref, Space::global, nullptr, copy.global, copy.size, false);
        check->access(ref, Space::shared, to.cta, to.offset, copy.size, true);
      }
      std::memcpy(to.bytes(), copy.memory, copy.size);
      mbarrier_complete(held->c, barrier, copy.size, ref);
    });
    if (!r.multicast) break;
  }
}

void between(Context& c, const Bulk& r, const Copy& copy) {
  const AsyncRef ref = c.check ? c.check->issue(c, copy.lane) : nullptr;
  auto held = std::make_shared<const Issued>(c);
  const Reducer reduce = r.reduce;
  c.cluster.submit(0, [held, ref, copy, reduce] {
    const SharedPlace& to = copy.other;
    if (Checker* check = held->c.check) {
      check->access(ref, Space::shared, copy.shared.cta, copy.shared.offset, copy.size, false);
      if (reduce) check->reduce(ref, Space::shared, to.cta, to.offset, copy.size);
      else check->access(ref, Space::shared, to.cta, to.offset, copy.size, true);
    }
    if (reduce) reduce(to.bytes(), copy.shared.bytes(), copy.size);
    else std::memcpy(to.bytes(), copy.shared.bytes(), copy.size);
    mbarrier_complete(held->c, copy.barrier, copy.size, ref);
  });
}

// .cp_mask: bit i says whether byte i of every 16 is copied.
void copy_masked(uint8_t* to, const uint8_t* from, uint64_t size, uint32_t mask) {
  for (uint64_t i = 0; i < size; i++)
    if (mask >> (i & 15) & 1) to[i] = from[i];
}

void store(Context& c, const Bulk& r, const Copy& copy, Mask lanes) {
  const AsyncRef ref = c.check ? c.check->issue(c, copy.lane) : nullptr;
  Checker* check = c.check;
  const Reducer reduce = r.reduce;
  const uint32_t mask = r.masked ? copy.mask & 0xffff : 0xffff;
  submit_store(
      c, lanes, ref,
      [check, ref, copy](Buffer& bytes) {
        if (check) check->access(ref, Space::shared, copy.shared.cta, copy.shared.offset, copy.size, false);
        bytes.assign(copy.shared.bytes(), copy.shared.bytes() + copy.size);
      },
      [check, ref, copy, reduce, mask](const Buffer& bytes) {
        if (check && reduce) check->reduce(ref, Space::global, nullptr, copy.global, copy.size);
        else if (check) check->access(ref, Space::global, nullptr, copy.global, copy.size, true);
        if (reduce) reduce(copy.memory, bytes.data(), copy.size);
        else copy_masked(copy.memory, bytes.data(), copy.size, mask);
      });
}

Copy copy_of(Context& c, const Bulk& r, uint64_t to, uint64_t from, uint64_t barrier, uint64_t size, uint32_t mask) {
  Copy copy;
  copy.size = size;
  copy.mask = mask;
  if (size % 16 != 0) c.fail("the size of a bulk copy is " + std::to_string(size) + " bytes, not a multiple of 16");
  if (r.way == Way::load) {
    copy.global = from;
    copy.memory = global_place(c, from, size, 16, false, "the source of the bulk copy");
    copy.shared = shared_place(c, to, r.to.generic, size, 16, r.own, "the destination of the bulk copy");
    copy.barrier = mbarrier_place(c, barrier, r.barrier.generic);
    c.count.tma_read += size;
  } else {
    copy.shared = shared_place(c, from, r.from.generic, size, 16, true, "the source of the bulk copy");
    if (r.way == Way::between) {
      copy.other = shared_place(c, to, r.to.generic, size, 16, false, "the destination of the bulk copy");
      copy.barrier = mbarrier_place(c, barrier, r.barrier.generic);
    } else {
      copy.global = to;
      copy.memory = global_place(c, to, size, 16, true, "the destination of the bulk copy");
      c.count.tma_written += size;
    }
  }
  c.count.tma_transactions++;
  return copy;
}

Step run_bulk(Context& c, const Op& op) {
  const auto& r = record<Bulk>(op);
  uint64_t to[kLanes], from[kLanes], barrier[kLanes] = {};
  r.to.lanes(c, to);
  r.from.lanes(c, from);
  if (r.way != Way::store) r.barrier.lanes(c, barrier);
  const V32& size = c.warp.v32(r.size);
  Mask done = 0;
  for (unsigned l = 0; l < kLanes; l++) {
    if (!(c.mask >> l & 1) || done >> l & 1) continue;
    const uint32_t mask = r.multicast || r.masked ? c.warp.v32(r.mask).x[l] & 0xffff : 0;
    Mask lanes = 1u << l;
    // Lanes that store the same bytes to the same place do one copy; a reduction counts every lane.
    if (r.way == Way::store && !r.reduce)
      for (unsigned k = l + 1; k < kLanes; k++)
        if (c.mask >> k & 1 && to[k] == to[l] && from[k] == from[l] && size.x[k] == size.x[l]) lanes |= 1u << k;
    done |= lanes;
    Copy copy = copy_of(c, r, to[l], from[l], barrier[l], size.x[l], mask);
    copy.lane = l;
    if (r.way == Way::load) load(c, r, copy);
    else if (r.way == Way::between) between(c, r, copy);
    else store(c, r, copy, lanes);
  }
  return Step::next;
}

Step run_prefetch(Context& c, const Op& op) {
  const auto& r = record<Bulk>(op);
  uint64_t from[kLanes];
  r.from.lanes(c, from);
  const V32& size = c.warp.v32(r.size);
  for (unsigned l = 0; l < kLanes; l++) {
    if (!(c.mask >> l & 1)) continue;
    if (size.x[l] % 16 != 0)
      c.fail("the size of a bulk prefetch is " + std::to_string(size.x[l]) + " bytes, not a multiple of 16");
    global_place(c, from[l], size.x[l], 16, false, "the source of the bulk prefetch");
  }
  return Step::next;
}

Step run_commit(Context& c, const Op&) {
  if (tracking(c)) groups(c.warp.bulk_groups).commit(c.mask);
  return Step::next;
}

Step run_wait(Context& c, const Op& op) {
  if (!tracking(c)) return Step::next;
  return groups(c.warp.bulk_groups)
      .wait(c, op.count, op.mode, op.mode ? "cp.async.bulk.wait_group.read %llu: %llu operations still read"
                                          : "cp.async.bulk.wait_group %llu: %llu operations are not complete");
}

void decode_reduction(Decoder& d, Modifiers& m, Bulk& r) {
  const std::string name = m.take_one(kReduceNames);
  const Reduce what = reduce_named(name);
  const bool noftz = m.take("noftz");
  const Ty type = m.take_type();
  const bool half = type == Ty::f16 || type == Ty::bf16;
  if (noftz != (half && what == Reduce::add)) d.fail(".noftz belongs to .add.f16 and .add.bf16, and they need it");
  // PTX ISA 9.7.9.25.4.2: shared memory takes fewer types than global memory does.
  const bool remote = r.way == Way::between;
  const bool wide = type == Ty::b64 || type == Ty::s64 || type == Ty::f32 || type == Ty::f64 || half ||
                    (type == Ty::u64 && what != Reduce::add);
  r.reduce = reducer(what, type);
  if (!r.reduce || (remote && wide)) d.fail("." + name + " has no such type for this destination");
  if (what == Reduce::add && type == Ty::s64) d.fail(".add has no such type for this destination");
}

}  // namespace

void decode_bulk(Decoder& d, Op& op) {
  Modifiers m(d.from);
  auto extra = std::make_shared<Bulk>();
  Bulk& r = *extra;
  op.kind = Class::copy;
  op.run = run_bulk;
  const bool reduction = m.take("reduce");
  m.take("async");
  m.take("bulk");
  const bool prefetch = m.take("prefetch");
  if (prefetch) {
    if (!m.take("L2") || !m.take("global")) d.fail("cp.async.bulk.prefetch.L2.global is the only form");
    const bool policy = m.take("L2::cache_hint");
    m.done();
    d.count(policy ? 3 : 2, policy ? 3 : 2);
    r.from = address_of(d, d.operand(0), In::global);
    r.size = d.source(d.operand(1), 4);
    if (policy) d.source(d.operand(2), 8);
    op.run = run_prefetch;
    op.extra = std::move(extra);
    return;
  }
  // The first space named is the destination, the second the source: the order in the opcode tells them apart.
  std::vector<std::string> spaces;
  for (const std::string& part : d.from.parts)
    if (part == "global" || part == "shared::cta" || part == "shared::cluster") spaces.push_back(part);
  if (spaces.size() != 2) d.fail("a bulk copy names its destination and its source space");
  for (const std::string& s : spaces) m.take(s.c_str());
  if (spaces[1] == "global" && spaces[0] != "global" && !reduction) r.way = Way::load;
  else if (spaces[1] == "shared::cta" && spaces[0] == "shared::cluster") r.way = Way::between;
  else if (spaces[1] == "shared::cta" && spaces[0] == "global") r.way = Way::store;
  else d.fail("no bulk copy goes from ." + spaces[1] + " to ." + spaces[0]);
  r.own = spaces[0] == "shared::cta";
  const bool by_barrier = r.way != Way::store;
  if (!m.take(by_barrier ? "mbarrier::complete_tx::bytes" : "bulk_group"))
    d.fail(std::string("this copy completes by .") + (by_barrier ? "mbarrier::complete_tx::bytes" : "bulk_group"));
  if (reduction) decode_reduction(d, m, r);
  r.multicast = r.way == Way::load && !r.own && m.take("multicast::cluster");
  r.masked = r.way == Way::store && !reduction && m.take("cp_mask");
  const bool policy = r.way != Way::between && m.take("L2::cache_hint");
  m.done();

  const size_t n = 3 + by_barrier + r.multicast + r.masked + policy;
  d.count(n, n);
  const auto space = [](const std::string& s) { return s == "global" ? In::global : In::shared; };
  r.to = address_of(d, d.operand(0), space(spaces[0]));
  r.from = address_of(d, d.operand(1), space(spaces[1]));
  r.size = d.source(d.operand(2), 4);
  size_t next = 3;
  if (by_barrier) r.barrier = address_of(d, d.operand(next++), In::shared);
  if (r.multicast) r.mask = source32(d, d.operand(next++));
  if (policy) d.source(d.operand(next++), 8);
  if (r.masked) r.mask = source32(d, d.operand(next++));
  op.extra = std::move(extra);
}

void decode_bulk_group(Decoder& d, Op& op) {
  Modifiers m(d.from);
  op.kind = Class::copy;
  m.take("async");
  m.take("bulk");
  if (m.take("commit_group")) {
    d.count(0, 0);
    op.run = run_commit;
  } else {
    if (!m.take("wait_group")) d.fail("neither commit_group nor wait_group");
    op.mode = m.take("read");
    d.count(1, 1);
    const Operand& n = d.operand(0);
    if (n.kind != Operand::imm || n.bits > 255) d.fail("the number of groups has to be a small constant");
    op.count = static_cast<uint8_t>(n.bits);
    op.run = run_wait;
  }
  m.done();
}

}  // namespace ptx
