// cp.async, the copies of 4, 8 or 16 bytes a thread, and how they are waited for. PTX ISA 9.7.9.25.3 "Non-bulk copy",
// 9.7.13.15.15 "cp.async.mbarrier.arrive".
#include "async/async.h"

namespace ptx {

namespace {

struct Copy {
  Address to, from;
  unsigned size = 0;
  bool partial = false;        // a src-size operand
  Slot read = 0;
  bool predicated = false;     // an ignore-src operand
  Slot ignore = 0;
  bool ignore_negated = false;
};

// One lane's copy: `read` bytes from global memory, zeros up to the size.
struct Piece {
  uint32_t offset;
  uint32_t read;
  uint64_t address;
  const uint8_t* from;
};

struct Pieces {
  unsigned n = 0, size = 0;
  Piece of[kLanes];
};

void move(const Pieces& all, Cta& cta) {
  for (unsigned i = 0; i < all.n; i++) {
    const Piece& p = all.of[i];
    uint8_t* to = cta.shared + p.offset;
    if (p.read) std::memcpy(to, p.from, p.read);
    if (p.read < all.size) std::memset(to + p.read, 0, all.size - p.read);
  }
}

// Lanes that lie side by side are one access.
void tell(Checker& check, const AsyncRef& ref, const Pieces& all, Cta& cta) {
  for (unsigned i = 0; i < all.n;) {
    unsigned j = i + 1;
    while (j < all.n && all.of[j].offset == all.of[j - 1].offset + all.size) j++;
    check.access(ref, Space::shared, &cta, all.of[i].offset, uint64_t{all.size} * (j - i), true, Proxy::generic);
    i = j;
  }
  for (unsigned i = 0; i < all.n; i++)
    if (all.of[i].read)
      check.access(ref, Space::global, nullptr, all.of[i].address, all.of[i].read, false, Proxy::generic);
}

Pieces pieces(Context& c, const Copy& r) {
  uint64_t to[kLanes], from[kLanes];
  r.to.lanes(c, to);
  r.from.lanes(c, from);
  const Mask ignored = r.predicated ? c.warp.pred(r.ignore) ^ (r.ignore_negated ? kAll : 0) : 0;
  Pieces all;
  all.size = r.size;
  for (unsigned l = 0; l < kLanes; l++) {
    if (!(c.mask >> l & 1)) continue;
    const SharedPlace p = shared_place(c, to[l], r.to.generic, r.size, r.size, true, "the destination of cp.async");
    uint32_t read = r.partial ? c.warp.v32(r.read).x[l] : r.size;
    if (read > r.size)
      c.fail("cp.async: src-size " + std::to_string(read) + " is larger than cp-size " + std::to_string(r.size));
    if (ignored >> l & 1) read = 0;
    // Nothing is read: the address may be anything.
    const uint8_t* source =
        read ? global_place(c, from[l], read, r.size, false, "the source of cp.async") : nullptr;
    all.of[all.n++] = {p.offset, read, from[l], source};
    c.count.cp_async += read;
  }
  return all;
}

Step run_copy(Context& c, const Op& op) {
  const auto& r = record<Copy>(op);
  const Pieces all = pieces(c, r);
  if (!tracking(c)) {
    move(all, c.cta);
    return Step::next;
  }
  const AsyncRef ref = c.check ? c.check->issue(c, Checker::kWarp) : nullptr;
  auto tracked = groups(c.warp.async_groups).add(c.mask, ref);
  Checker* check = c.check;
  Cta* cta = &c.cta;
  auto held = std::make_shared<const Issued>(c);
  c.cluster.submit(0, [all, ref, tracked, check, cta, held] {
    if (check) tell(*check, ref, all, *cta);
    move(all, *cta);
    tracked->done();
  });
  return Step::next;
}

Step run_commit(Context& c, const Op&) {
  if (tracking(c)) groups(c.warp.async_groups).commit(c.mask);
  return Step::next;
}

Step wait(Context& c, unsigned n) {
  return groups(c.warp.async_groups)
      .wait(c, n, false, "cp.async.wait_group %llu: %llu copies are not complete");
}

Step run_wait(Context& c, const Op& op) { return tracking(c) ? wait(c, op.count) : Step::next; }

Step run_wait_all(Context& c, const Op&) {
  if (!tracking(c)) return Step::next;
  Groups& all = groups(c.warp.async_groups);
  Mask open = 0;
  for (const auto& e : all.open) open |= e.lanes;
  if (open & c.mask) all.commit(c.mask);
  return wait(c, 0);
}

// The arrival of one lane, once all of its earlier copies are complete.
struct Arrival {
  unsigned left = 0;
  std::vector<AsyncRef> refs;
};

void arrive_after(Context& c, unsigned lane, const SharedPlace& p) {
  auto arrival = std::make_shared<Arrival>();
  std::vector<std::shared_ptr<Tracked>> open;
  const auto visit = [&](const Groups::Entry& e) {
    if (!(e.lanes >> lane & 1)) return;
    e.operation->signalled = true;
    if (e.operation->ref) arrival->refs.push_back(e.operation->ref);
    if (e.operation->incomplete) open.push_back(e.operation);
  };
  const Groups& all = groups(c.warp.async_groups);
  for (const auto& e : all.open) visit(e);
  for (const auto& group : all.committed)
    for (const auto& e : group.entries) visit(e);
  // With no copy before it, the arrival still knows what the thread knows.
  if (c.check && arrival->refs.empty()) arrival->refs.push_back(c.check->issue(c, lane));
  auto held = std::make_shared<const Issued>(c);
  const auto signal = [arrival, held, p] { mbarrier_arrive_async(held->c, p, arrival->refs); };
  arrival->left = static_cast<unsigned>(open.size());
  Cluster* cluster = &c.cluster;
  for (const auto& operation : open)
    operation->then.push_back([arrival, cluster, signal] {
      if (--arrival->left == 0) cluster->submit(0, signal);
    });
  if (open.empty()) c.cluster.submit(0, signal);
}

Step run_arrive(Context& c, const Op& op) {
  const auto& r = record<Copy>(op);
  uint64_t at[kLanes];
  r.to.lanes(c, at);
  for (unsigned l = 0; l < kLanes; l++) {
    if (!(c.mask >> l & 1)) continue;
    shared_place(c, at[l], r.to.generic, 8, 8, true, "the mbarrier");
    const SharedPlace p = mbarrier_place(c, at[l], r.to.generic);
    if (op.mode) mbarrier_expect_arrival(c, p);
    if (tracking(c)) arrive_after(c, l, p);
    else mbarrier_arrive_async(c, p, {});
  }
  return Step::next;
}

void decode_copy_operands(Decoder& d, Op& op, Modifiers& m) {
  auto extra = std::make_shared<Copy>();
  const std::string cache = m.take_one({"ca", "cg"});
  m.take_one({"shared", "shared::cta"});
  if (!m.take("global")) d.fail("cp.async copies from .global");
  const bool policy = m.take("L2::cache_hint");
  m.take_optional({"L2::64B", "L2::128B", "L2::256B"}, "");
  d.count(policy ? 4 : 3, policy ? 5 : 4);
  extra->to = address_of(d, d.operand(0), In::shared);
  extra->from = address_of(d, d.operand(1), In::global);
  const Operand& size = d.operand(2);
  if (size.kind != Operand::imm || (size.bits != 4 && size.bits != 8 && size.bits != 16))
    d.fail("cp-size has to be 4, 8 or 16");
  if (cache == "cg" && size.bits != 16) d.fail("cp.async.cg copies 16 bytes");
  extra->size = static_cast<unsigned>(size.bits);
  const size_t last = d.from.operands.size() - (policy ? 1 : 0);
  if (last == 4) {
    const Operand& o = d.operand(3);
    if (o.kind == Operand::reg && o.decl->type == Ty::pred) {
      extra->predicated = true;
      extra->ignore = d.predicate(o, extra->ignore_negated);
    } else {
      extra->partial = true;
      extra->read = d.source(o, 4);
    }
  }
  if (policy) d.source(d.operand(last), 8);
  op.extra = std::move(extra);
  op.run = run_copy;
}

}  // namespace

void decode_cp_async(Decoder& d, Op& op) {
  Modifiers m(d.from);
  op.kind = Class::copy;
  m.take("async");
  if (m.take("commit_group")) {
    d.count(0, 0);
    op.run = run_commit;
  } else if (m.take("wait_all")) {
    d.count(0, 0);
    op.run = run_wait_all;
  } else if (m.take("wait_group")) {
    d.count(1, 1);
    const Operand& n = d.operand(0);
    if (n.kind != Operand::imm || n.bits > 255) d.fail("the number of groups has to be a small constant");
    op.count = static_cast<uint8_t>(n.bits);
    op.run = run_wait;
  } else if (m.take("mbarrier")) {
    if (!m.take("arrive") || !m.take("b64")) d.fail("cp.async.mbarrier.arrive.b64 is the only form");
    auto extra = std::make_shared<Copy>();
    op.mode = !m.take("noinc");
    const bool shared = m.take("shared") || m.take("shared::cta");
    d.count(1, 1);
    extra->to = address_of(d, d.operand(0), shared ? In::shared : In::generic);
    op.extra = std::move(extra);
    op.run = run_arrive;
  } else {
    decode_copy_operands(d, op, m);
  }
  m.done();
}

}  // namespace ptx
