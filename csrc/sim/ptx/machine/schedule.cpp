// Which lanes run next. Fragments of a warp: lowest pc first, equal pcs merge, a blocked one does not stop the others.
// Warps of a cluster: in turn, or in random order under a seed. Clusters: one OS thread each, and a cluster that only
// reads (it may be spinning on what another cluster will write) makes room for others on its thread.
#include <algorithm>
#include <exception>
#include <thread>

#include "async/async.h"
#include "check/check.h"
#include "front/decode.h"
#include "machine/schedule.h"
#include "tensor/tcgen05.h"

namespace ptx {

namespace {

constexpr uint64_t kTurn = 512;       // instructions of a warp before the next one's turn
constexpr uint32_t kShare = 128;      // of these, what lanes may spend while others of their warp are elsewhere
constexpr uint64_t kSlice = 1 << 16;  // instructions of a cluster before it is asked whether it does anything
constexpr uint32_t kNowhere = ~0u;

enum class End : uint8_t { finished, slice };

class Runner {
 public:
  Runner(Launch& launch, Counters& count)
      : launch_(launch), count_(count), ops_(launch.program->ops), removed_(ops_.size()) {
    for (int i : launch.options.removed) removed_.at(static_cast<size_t>(i)) = 1;
  }
  End slice(Cluster&, uint64_t& executed);

 private:
  bool turn(Warp&, uint64_t budget);
  bool run(Warp&, Fragment&, uint32_t stop, uint64_t& budget);
  bool converged(Context&, Fragment&);
  void merge(Warp&);
  void exited(Warp&);
  bool time_out(Cluster&);
  [[noreturn]] void deadlock(Cluster&);

  Launch& launch_;
  Counters& count_;
  const std::vector<Op>& ops_;
  std::vector<uint8_t> removed_;  // by op: Options::removed
  uint64_t executed_ = 0;
};

// Lanes that arrive where others of their warp already wait join them, unless these are halfway through.
void Runner::merge(Warp& w) {
  auto& f = w.fragments;
  std::sort(f.begin(), f.end(),
            [](const Fragment& a, const Fragment& b) { return a.pc != b.pc ? a.pc < b.pc : a.state < b.state; });
  size_t kept = 0;
  for (size_t i = 1; i < f.size(); i++) {
    if (f[kept].pc == f[i].pc && f[kept].state == 0 && f[i].state == 0) {
      f[kept].lanes |= f[i].lanes;
      f[kept].spent = std::max(f[kept].spent, f[i].spent);
      f[kept].blocked = false;
    } else {
      f[++kept] = f[i];
    }
  }
  if (!f.empty()) f.resize(kept + 1);
}

// A collective operation needs all its lanes in one fragment (PTX ISA 9.5 and the .aligned and .sync qualifiers). Lanes
// whose guard is false go on without the others.
bool Runner::converged(Context& c, Fragment& f) {
  const Op& op = *c.op;
  Warp& w = c.warp;
  Mask needed = kAll;
  if (op.members != 0) {  // lanes may name different members: all of them are needed
    needed = 0;
    for (Mask left = c.mask; left != 0; left &= left - 1) needed |= w.v32(op.members).x[__builtin_ctz(left)];
  }
  needed &= w.live;
  if ((needed & ~c.mask) == 0) return true;
  if (c.mask != f.lanes) {
    Fragment on{f.pc + 1, f.lanes & ~c.mask, false, {}, 0};
    f.lanes = c.mask;
    w.fragments.push_back(on);
  }
  f.why = {"waits for lanes %#llx to converge, has %#llx", {needed, f.lanes, 0, 0}};
  return false;
}

void Runner::exited(Warp& w) {
  Cta& cta = *w.cta;
  for (const auto& other : cta.warps)
    if (other->live != 0) return;
  if (launch_.checker != nullptr) launch_.checker->end(cta);
  const std::string leak = tensor_leak(cta);
  if (!leak.empty())
    throw Error("kernel " + launch_.program->function->name + ", CTA (" + std::to_string(cta.index[0]) + ", " +
                std::to_string(cta.index[1]) + ", " + std::to_string(cta.index[2]) + "): " + leak);
}

// Runs a fragment until it blocks, ends, meets another one, or the budget is spent. True when it got anywhere.
bool Runner::run(Warp& w, Fragment& f, uint32_t stop, uint64_t& budget) {
  Context c{launch_, *w.cta->cluster, *w.cta, w, f, count_, launch_.checker.get()};
  const uint64_t before = budget;
  const size_t alone = w.fragments.size();
  for (; budget > 0; budget--) {
    if (f.pc >= ops_.size())
      throw Error("kernel " + launch_.program->function->name + ": lanes run past the last instruction");
    const Op& op = ops_[f.pc];
    Mask mask = f.lanes;
    if (op.guard != 0) mask &= op.guard_negated ? ~w.pred(op.guard) : w.pred(op.guard);
    Step step = Step::next;
    if (mask != 0 && removed_[f.pc] == 0) {
      c.op = &op;
      c.mask = mask;
      if (op.collective && !converged(c, f)) step = Step::blocked;
      else {
        if (c.check != nullptr && c.check->watched[op.index]) c.check->touch(c);
        step = op.run(c, op);
      }
    }
    if (step == Step::blocked) {
      f.blocked = true;
      break;
    }
    count_.executed[static_cast<size_t>(op.index)]++;
    c.cluster.effects += op.effect;
    if (step == Step::next) {
      f.state = 0;
      if (++f.pc != stop) continue;
    } else if (step == Step::jumped) {
      f.state = 0;
      if (alone == 1 && w.fragments.size() == 1) continue;
    } else {  // some lanes exited; `next` lanes may remain
      f.state = 0;
      f.pc++;
      if (f.lanes != 0 && alone == 1) continue;
    }
    budget--;
    break;
  }
  return budget != before;
}

// One warp's turn.
bool Runner::turn(Warp& w, uint64_t budget) {
  const uint64_t before = budget;
  for (Fragment& f : w.fragments) {
    f.blocked = false;
    f.spent = 0;
  }
  while (budget > 0 && !w.fragments.empty()) {
    merge(w);
    const bool alone = w.fragments.size() == 1;
    Fragment* next = nullptr;
    uint32_t stop = kNowhere;
    for (Fragment& f : w.fragments) {
      if (next != nullptr) {
        stop = f.pc;
        break;
      }
      // Lanes that spin below must not starve the ones above that they wait for.
      if (!f.blocked && (alone || f.spent < kShare)) next = &f;
    }
    if (next == nullptr) break;
    const uint64_t given = alone ? budget : std::min<uint64_t>(budget, kShare - next->spent);
    uint64_t share = given;
    run(w, *next, stop, share);
    budget -= given - share;
    if (!alone) next->spent += static_cast<uint32_t>(given - share);
    w.fragments.erase(
        std::remove_if(w.fragments.begin(), w.fragments.end(), [](const Fragment& f) { return f.lanes == 0; }),
        w.fragments.end());
  }
  const uint64_t done = before - budget;
  w.issued += done;
  count_.by_warp[w.id] += done;
  executed_ += done;
  if (w.live == 0) exited(w);
  return done != 0;
}

// Nothing can run: lets every blocked mbarrier.try_wait answer false, which it may do at any time (PTX
// ISA 9.7.13.15.16); a warp may ask ahead and have other work to do. False when that was tried and led everyone back to
// the same place.
bool Runner::time_out(Cluster& cluster) {
  std::vector<uint64_t> at = {cluster.effects};
  bool any = false;
  for (const auto& cta : cluster.ctas)
    for (const auto& w : cta->warps)
      for (Fragment& f : w->fragments) {
        at.push_back(f.pc);
        const bool waits = ops_[f.pc].from->parts[0] == "mbarrier";
        f.timed_out = waits;
        any |= waits;
      }
  if (at == cluster.timed_out_at) return false;
  cluster.timed_out_at = std::move(at);
  return any;
}

void Runner::deadlock(Cluster& cluster) {
  std::string text =
      "kernel " + launch_.program->function->name + ": deadlock in cluster " + std::to_string(cluster.index) + ":";
  for (const auto& cta : cluster.ctas)
    for (const auto& w : cta->warps)
      for (const Fragment& f : w->fragments) {
        char why[256] = "", lanes[32];
        if (f.why.format != nullptr)
          snprintf(why, sizeof why, f.why.format, f.why.v[0], f.why.v[1], f.why.v[2], f.why.v[3]);
        snprintf(lanes, sizeof lanes, "%#x", f.lanes);
        const Statement& s = *ops_[f.pc].from;
        text += "\n  CTA (" + std::to_string(cta->index[0]) + ", " + std::to_string(cta->index[1]) + ", " +
                std::to_string(cta->index[2]) + ") warp " + std::to_string(w->id) + " lanes " + lanes + ", line " +
                std::to_string(s.line) + " '" + s.text + "': " + why;
      }
  throw Deadlock(text);
}

End Runner::slice(Cluster& cluster, uint64_t& executed) {
  std::vector<Warp*> order;
  const bool random = launch_.options.seed != 0;
  executed_ = 0;
  while (executed_ < kSlice) {
    order.clear();
    for (const auto& cta : cluster.ctas)
      for (const auto& w : cta->warps)
        if (w->live != 0) order.push_back(w.get());
    if (order.empty()) {
      while (drain_one(cluster)) {}
      executed += executed_;
      return End::finished;
    }
    if (random)
      for (size_t i = order.size() - 1; i > 0; i--) std::swap(order[i], order[cluster.next_random() % (i + 1)]);
    bool progress = false;
    for (Warp* w : order) progress |= turn(*w, random ? 1 + cluster.next_random() % kTurn : kTurn);
    if (!progress && !drain_one(cluster) && !time_out(cluster)) deadlock(cluster);
  }
  drain_one(cluster);  // a warp that polls is never blocked, but time passes for it, too
  executed += executed_;
  return End::slice;
}

}  // namespace

// What one OS thread does: starts clusters and runs them to their end.
class Worker {
 public:
  Worker(Launch& launch, Shared& shared) : launch_(launch), shared_(shared), runner_(launch, count_) {
    count_.executed.resize(launch.program->ops.size());
    count_.by_warp.resize((launch.block[0] * launch.block[1] * launch.block[2] + kLanes - 1) / kLanes);
  }
  void run() {
    uint32_t index = 0;
    while (!shared_.stop) {
      if (active_.empty()) {
        if (!launch_.take_waiting(index)) break;
        start(index);
      }
      Cluster& cluster = *active_.front();
      const uint64_t effects = cluster.effects;
      uint64_t executed = 0;
      const End end = runner_.slice(cluster, executed);
      if (end == End::finished) {
        active_.pop_front();
        shared_.resident--;
      } else if (cluster.effects == effects) {
        yield(index);
      }
      shared_.executed += executed;
      if (launch_.options.limit != 0 && shared_.executed > launch_.options.limit)
        throw Error("kernel " + launch_.program->function->name + ": more than " +
                    std::to_string(launch_.options.limit) + " warp instructions (the limit of this launch)");
    }
    std::lock_guard<std::mutex> lock(launch_.result_lock);
    launch_.counters.add(count_);
  }

 private:
  void start(uint32_t index) {
    active_.push_front(make_cluster(launch_, index));
    shared_.resident++;
  }
  // The front cluster may be waiting for another one's writes.
  void yield(uint32_t& index) {
    const uint32_t ctas = launch_.cluster[0] * launch_.cluster[1] * launch_.cluster[2];
    if ((shared_.resident + 1) * ctas <= launch_.options.processors && launch_.take_waiting(index)) {
      start(index);
    } else {
      active_.push_back(std::move(active_.front()));
      active_.pop_front();
    }
  }

  Launch& launch_;
  Shared& shared_;
  Counters count_;
  Runner runner_;
  std::deque<std::unique_ptr<Cluster>> active_;
};

void run_workers(Launch& launch, unsigned threads) {
  Shared shared;
  std::exception_ptr failure;
  auto work = [&] {
    try {
      Worker(launch, shared).run();
    } catch (...) {
      std::lock_guard<std::mutex> lock(launch.result_lock);
      if (!failure) failure = std::current_exception();
      shared.stop = true;
    }
  };
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; i++) others.emplace_back(work);
  work();
  for (std::thread& t : others) t.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace ptx
