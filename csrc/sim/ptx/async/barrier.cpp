// Named barriers, the cluster's barrier, and fences (PTX ISA 9.7.13.1 to 9.7.13.4).
#include "check/check.h"
#include "front/decode.h"

namespace ptx {

namespace {

enum Kind : uint8_t { kSync, kArrive, kPopc, kAnd, kOr };

uint32_t live_threads(const Cta& cta) {
  uint32_t n = 0;
  for (const auto& w : cta.warps) n += w->live != 0 ? kLanes : 0;
  return n;
}

// Arrivals are counted in whole warps; a barrier without a count waits for all warps that have not exited.
bool complete(const Cta& cta, const NamedBarrier& b) {
  return b.arrived != 0 && b.arrived >= (b.expected != 0 ? b.expected : live_threads(cta));
}

void release(Context& c, NamedBarrier& b) {
  b.last_true = b.count_true;
  b.last_total = b.total;
  b.arrived = b.expected = b.count_true = b.total = 0;
  b.generation++;
  if (c.check != nullptr) c.check->named_complete(b);
}

void arrive(Context& c, const Op& op, NamedBarrier& b, uint32_t id, uint32_t threads) {
  if (op.count != 0 && (threads == 0 || threads % kLanes != 0))
    c.fail("a barrier of " + std::to_string(threads) + " threads: whole warps are expected");
  if (b.arrived != 0 && b.expected != threads)
    c.fail("barrier " + std::to_string(id) + " is in use with " + std::to_string(b.expected) +
           " threads, this arrival says " + std::to_string(threads));
  b.expected = threads;
  b.arrived += kLanes;
  if (threads != 0 && b.arrived > threads)
    c.fail("barrier " + std::to_string(id) + " has " + std::to_string(b.arrived) + " arrivals, " +
           std::to_string(threads) + " are expected");
  if (op.mode >= kPopc) {
    const Mask p = op.size ? ~c.warp.pred(op.s[2]) : c.warp.pred(op.s[2]);
    b.count_true += static_cast<uint32_t>(__builtin_popcount(p & c.mask));
    b.total += static_cast<uint32_t>(__builtin_popcount(c.mask));
  }
  if (c.check != nullptr) c.check->named_arrive(c, b);
}

void give_result(Context& c, const Op& op, const NamedBarrier& b) {
  if (op.mode == kPopc) {
    for (Mask left = c.mask; left != 0; left &= left - 1) c.warp.v32(op.d[0]).x[__builtin_ctz(left)] = b.last_true;
  } else if (op.mode == kAnd || op.mode == kOr) {
    const bool yes = op.mode == kAnd ? b.last_true == b.last_total : b.last_true != 0;
    Mask& p = c.warp.pred(op.d[0]);
    p = yes ? p | c.mask : p & ~c.mask;
  }
}

Step named(Context& c, const Op& op) {
  Fragment& f = c.fragment;
  const uint32_t id = c.warp.v32(op.s[0]).x[c.first()];
  const uint32_t threads = op.count != 0 ? c.warp.v32(op.s[1]).x[c.first()] : 0;
  if (id > 15) c.fail("barrier " + std::to_string(id) + "; there are 0 to 15");
  NamedBarrier& b = c.cta.named[id];
  if (f.state == 0) {
    arrive(c, op, b, id, threads);
    f.state = b.generation + 1;
  }
  if (b.generation + 1 == f.state && complete(c.cta, b)) release(c, b);
  if (op.mode == kArrive) return Step::next;
  if (b.generation + 1 == f.state) {
    f.why = {"barrier %llu: %llu threads have arrived, %llu are expected",
             {id, b.arrived, b.expected != 0 ? b.expected : live_threads(c.cta), 0}};
    return Step::blocked;
  }
  give_result(c, op, b);
  if (c.check != nullptr) c.check->named_leave(c, b);
  return Step::next;
}

// Lanes of one fragment may have been named in several masks: each mask is a barrier of its own.
Step converge(Context& c, const Op& op) {
  if (c.check == nullptr) return Step::next;
  const uint32_t* members = c.warp.v32(op.members).x;
  for (Mask left = c.mask; left != 0;) {
    const Mask named = members[__builtin_ctz(left)];
    Mask group = 0;
    for (Mask m = left; m != 0; m &= m - 1)
      if (members[__builtin_ctz(m)] == named) group |= m & -m;
    c.check->converge(c, group);
    left &= ~group;
  }
  return Step::next;
}

// --- barrier.cluster: Warp::cluster_generation is the phase the warp arrived in + 1, 0 when it has not arrived.

bool cluster_complete(const Cluster& cluster) {
  for (const auto& cta : cluster.ctas)
    for (const auto& w : cta->warps)
      if (w->live != 0 && w->cluster_generation != cluster.barrier_generation + 1) return false;
  return true;
}

void cluster_advance(Context& c) {
  if (c.cluster.barrier_arrived == 0 || !cluster_complete(c.cluster)) return;
  c.cluster.barrier_generation++;
  c.cluster.barrier_arrived = 0;
  if (c.check != nullptr) c.check->cluster_complete(c.cluster);
}

Step cluster_arrive(Context& c, const Op& op) {
  if (c.warp.cluster_generation == c.cluster.barrier_generation + 1)
    c.fail("barrier.cluster.arrive twice without a wait in between");
  c.warp.cluster_generation = c.cluster.barrier_generation + 1;
  c.cluster.barrier_arrived++;
  if (c.check != nullptr) c.check->cluster_arrive(c, op.mode == 0);
  cluster_advance(c);
  return Step::next;
}

Step cluster_wait(Context& c, const Op&) {
  if (c.warp.cluster_generation == 0) c.fail("barrier.cluster.wait without an arrive before it");
  cluster_advance(c);  // a warp that exited may have been the last one missing
  if (c.cluster.barrier_generation < c.warp.cluster_generation) {
    c.fragment.why = {"barrier.cluster: %llu warps have arrived in phase %llu",
                      {c.cluster.barrier_arrived, c.cluster.barrier_generation, 0, 0}};
    return Step::blocked;
  }
  c.warp.cluster_generation = 0;
  if (c.check != nullptr) c.check->cluster_leave(c);
  return Step::next;
}

// --- fences: one OS thread sees its own clusters in order, other threads need a real one.

struct Fence {
  std::string kind;
};

Step fence(Context& c, const Op& op) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (c.check == nullptr) return Step::next;
  const std::string& kind = static_cast<const Fence*>(op.extra.get())->kind;
  if (op.mode != 0) c.check->proxy_fence(c, kind);
  else c.check->fence(c, kind);
  return Step::next;
}

void decode_fence(Decoder& d, Op& op) {
  Modifiers m(d.from);
  const bool membar = d.from.parts[0] == "membar";
  auto f = std::make_shared<Fence>();
  for (size_t i = 1; i < d.from.parts.size(); i++) f->kind += (i > 1 ? "." : "") + d.from.parts[i];
  size_t operands = 0;
  if (m.take("mbarrier_init")) {
    op.mode = 1;
    m.take_one({"release"});
    m.take_one({"cluster"});
  } else if (m.take("proxy")) {
    op.mode = 1;
    const std::string kind = m.take_one({"alias", "async", "async.global", "tensormap::generic", "async::generic"});
    if (kind == "async") m.take_optional({"global", "shared::cta", "shared::cluster"}, "");
    if (kind == "tensormap::generic" || kind == "async::generic") {
      operands = m.take_one({"acquire", "release"}) == "acquire" && kind[0] == 't' ? 2 : 0;
      if (kind[0] == 'a') m.take_one({"sync_restrict::shared::cta", "sync_restrict::shared::cluster"});
      m.take_one({"cta", "cluster", "gpu", "sys"});
    }
  } else if (membar) {
    const std::string level = m.take_one({"cta", "gl", "sys"});
    f->kind = level == "gl" ? "gpu" : level;
  } else {
    m.take_optional({"sc", "acq_rel", "acquire", "release"}, "");
    m.take_optional({"sync_restrict::shared::cta", "sync_restrict::shared::cluster"}, "");
    f->kind = m.take_one({"cta", "cluster", "gpu", "sys"});
  }
  m.done();
  d.count(operands, operands);
  op.extra = f;
  op.run = fence;
  op.kind = Class::sync;
}

void decode_cluster(Decoder& d, Op& op, Modifiers& m) {
  const bool arrive = m.take_one({"arrive", "wait"}) == "arrive";
  m.take("aligned");
  if (arrive) op.mode = m.take_optional({"release", "relaxed"}, "release") == "relaxed";
  else m.take("acquire");
  m.done();
  d.count(0, 0);
  op.run = arrive ? cluster_arrive : cluster_wait;
}

void decode_named(Decoder& d, Op& op, Modifiers& m) {
  m.take("cta");
  const std::string kind = m.take_one({"sync", "arrive", "red"});
  if (d.from.parts[0] == "barrier") m.take("aligned");
  size_t at = 0;
  op.mode = kind == "sync" ? kSync : kArrive;
  if (kind == "red") {
    const std::string join = m.take_one({"popc", "and", "or"});
    op.mode = join == "popc" ? kPopc : join == "and" ? kAnd : kOr;
    m.take_one({op.mode == kPopc ? "u32" : "pred"});
    op.d[0] = d.destination(d.operand(at++), op.mode == kPopc ? 4 : 0);
    bool negated = false;
    op.s[2] = d.predicate(d.from.operands.back(), negated);
    op.size = negated;
  }
  m.done();
  const size_t last = d.from.operands.size() - (kind == "red" ? 1 : 0);
  op.s[0] = d.source(d.operand(at++), 4);
  op.count = last > at;
  if (op.count != 0) op.s[1] = d.source(d.operand(at++), 4);
  if (at != last || (kind == "arrive" && op.count == 0)) d.fail("operands: a barrier and a thread count");
  op.run = named;
}

}  // namespace

void decode_barrier(Decoder& d, Op& op) {
  const std::string& root = d.from.parts[0];
  if (root == "fence" || root == "membar") return decode_fence(d, op);
  op.kind = Class::sync;
  op.collective = true;  // all lanes of the warp that have not exited arrive together
  Modifiers m(d.from);
  if (root == "bar" && m.take("warp")) {
    m.take_one({"sync"});
    m.done();
    d.count(1, 1);
    op.members = d.source(d.operand(0), 4);
    op.run = converge;
  } else if (root == "barrier" && m.take("cluster")) {
    decode_cluster(d, op, m);
  } else {
    decode_named(d, op, m);
  }
}

}  // namespace ptx
