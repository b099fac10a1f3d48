// The checker's hooks for synchronisation: who learns what from whom.
#include "check_state.h"

namespace ptx {

namespace {
// What the warp has done so far is over for whoever gets its clock from here; what it does next is not.
void release(WarpState& w, Clock& into) {
  into.join(w.clock);
  w.clock.of(w.local).at[kOrder]++;
  w.snapshot.reset();
}

void acquire(WarpState& w, const Clock& from) {
  w.clock.join(from);
  w.snapshot.reset();
}

bool starts(const std::string& text, const char* with) { return text.rfind(with, 0) == 0; }

// An mbarrier is created by a store like any other: its users have to know of it.
void created(Checker::State& s, const Meeting& m, const Clock& known, const Actor& actor, bool operation) {
  if (m.created == 0) return;
  const Agent& by = s.agents[agent_of(m.created)];
  const bool visible = known.knows(by, m.created, kBarrierInit);
  if (!known.knows(by, m.created) && !visible)
    s.report(Finding::barrier_init, Space::shared, actor, m.owner, m.created, m.offset);
  else if (operation && !visible && !known.knows(by, m.created, kSharedProxy))
    s.report(Finding::barrier_visible, Space::shared, actor, m.owner, m.created, m.offset);
}

bool own_agent(const WarpState& w, const Meeting& m) { return agent_of(m.created) == w.agent; }
}  // namespace

// --- mbarriers

void Checker::initialise(const Context& c, Cta& owner, uint32_t offset) {
  range(c, Space::shared, &owner, offset, 8, true);
  WarpState& w = warp_state(c);
  Mbarrier& barrier = owner.mbarrier(offset);
  barrier.clock = nullptr;
  Meeting& m = state_->meeting(barrier.clock, *w.cluster);
  m.owner = static_cast<CtaState*>(owner.shadow);
  m.offset = offset;
  m.created = epoch(w.agent, w.clock.of(w.local).at[kOrder], c.op->index);
}

void Checker::invalidate(const Context& c, Cta& owner, uint32_t offset) {
  range(c, Space::shared, &owner, offset, 8, true);
}

void Checker::arrive(const Context& c, Mbarrier& barrier, bool releases) {
  state_->settle(&c);
  WarpState& w = warp_state(c);
  Meeting& m = state_->meeting(barrier.clock, *w.cluster);
  if (!own_agent(w, m)) created(*state_, m, w.clock, actor_of(c), false);
  if (m.owner && m.owner != w.cta)
    state_->visit(*m.owner, epoch(w.agent, w.clock.of(w.local).at[kOrder], c.op->index), false);
  if (releases) release(w, m.gathering);
  else m.gathering.join(w.fenced);
}

// PTX ISA 8.9.1.1: the complete-tx of a bulk copy orders the copy itself, and nothing else that its issuer has done. A
// tcgen05.commit stands for all the work of its pipe, and for what that work was ordered after.
void Checker::arrive(const AsyncRef& ref, Mbarrier& barrier) {
  Meeting& m = state_->meeting(barrier.clock, *ref->cluster);
  // cp.async.mbarrier.arrive, st.async and clusterlaunchcontrol reach their mbarrier through the generic proxy.
  const std::string& text = ref->actor.op->from->text;
  created(*state_, m, *ref->known, ref->actor, ref->pipe || text.find("async.bulk") != std::string::npos);
  if (m.owner && ref->pipe) state_->visit(*m.owner, epoch(ref->agent, ref->writes, ref->actor.op->index), true);
  if (ref->pipe) m.gathering.join(*ref->known);
  Seen& seen = m.gathering.of(ref->local);
  for (Knowledge k : {kOrder, kTensorBefore}) seen.at[k] = std::max(seen.at[k], ref->writes);
}

void Checker::phase(Mbarrier& barrier) {
  if (barrier.clock == nullptr) return;
  Meeting& m = *static_cast<Meeting*>(barrier.clock);
  m.done.join(m.gathering);
}

void Checker::observe(const Context& c, Mbarrier& barrier, bool acquires) {
  WarpState& w = warp_state(c);
  Meeting& m = state_->meeting(barrier.clock, *w.cluster);
  if (!own_agent(w, m)) created(*state_, m, w.clock, actor_of(c), false);
  if (acquires) acquire(w, m.done);
  else w.observed.join(m.done);
}

void Checker::commit(const Context& c, const void* pipe, Mbarrier& barrier) { arrive(issue_tensor(c, pipe), barrier); }

void Checker::group_done(const Context& c, const AsyncRef& ref, bool reading) {
  WarpState& w = warp_state(c);
  uint32_t& seen = w.clock.of(ref->local).at[kOrder];
  seen = std::max(seen, reading ? ref->reads : ref->writes);
  if (ref->pipe && w.any_multiplying) {
    w.any_multiplying = false;
    for (uint32_t& m : w.multiplying) {
      if (m <= ref->writes) m = 0;
      w.any_multiplying |= m != 0;
    }
  }
  w.snapshot.reset();
}

// --- named barriers and the cluster's

void Checker::named_arrive(const Context& c, NamedBarrier& barrier) {
  WarpState& w = warp_state(c);
  release(w, state_->meeting(barrier.clock, *w.cluster).gathering);
}

void Checker::named_complete(NamedBarrier& barrier) {
  if (barrier.clock == nullptr) return;
  Meeting& m = *static_cast<Meeting*>(barrier.clock);
  m.done.join(m.gathering);
}

void Checker::named_leave(const Context& c, NamedBarrier& barrier) {
  WarpState& w = warp_state(c);
  acquire(w, state_->meeting(barrier.clock, *w.cluster).done);
}

void Checker::cluster_arrive(const Context& c, bool releases) {
  WarpState& w = warp_state(c);
  if (releases) release(w, w.cluster->barrier.gathering);
  else w.cluster->barrier.gathering.join(w.fenced);
}

void Checker::cluster_complete(Cluster& cluster) {
  Meeting& m = *static_cast<Meeting*>(cluster.barrier_clock);
  m.done.join(m.gathering);
}

void Checker::cluster_leave(const Context& c) {
  WarpState& w = warp_state(c);
  acquire(w, w.cluster->barrier.done);
}

// --- fences

void Checker::proxy_fence(const Context& c, const std::string& kind) {
  WarpState& w = warp_state(c);
  uint32_t& now = w.clock.of(w.local).at[kOrder];
  if (starts(kind, "mbarrier_init")) {
    Seen& fenced = w.fenced.of(w.local);
    fenced.at[kBarrierInit] = w.clock.of(w.local).at[kBarrierInit] = now;
  } else if (starts(kind, "proxy.async")) {
    const bool shared = kind.find("::shared") != std::string::npos || kind.find(".shared") != std::string::npos;
    if (kind.find(".global") == std::string::npos) w.clock.raise(kSharedProxy);
    if (!shared) w.clock.raise(kGlobalProxy);
  } else if (starts(kind, "proxy.tensormap")) {
    if (kind.find("acquire") != std::string::npos) {
      acquire(w, w.observed);
      w.clock.raise(kMapProxy);
    }
    if (kind.find("release") != std::string::npos) w.fenced.join(w.clock);
  }
  w.clock.of(w.local).at[kOrder]++;
  w.snapshot.reset();
}

void Checker::fence(const Context& c, const std::string&) {
  WarpState& w = warp_state(c);
  acquire(w, w.observed);
  release(w, w.fenced);
}

void Checker::tensor_fence(const Context& c, bool before) {
  if (!state_->registers.tensor_fences) return;
  WarpState& w = warp_state(c);
  if (before) {
    w.clock.raise(kTensorBefore);
    release(w, w.fenced);  // also what a relaxed arrival hands on
  } else {
    acquire(w, w.observed);
    auto after = [](Vector& v) {
      for (Seen& s : v) s.at[kTensorFence] = std::max(s.at[kTensorFence], s.at[kTensorBefore]);
    };
    after(w.clock.seen);
  }
  w.snapshot.reset();
}

void Checker::converge(const Context&) {}  // lanes of a warp are one agent

// --- atomics, and loads and stores that are not weak

void Checker::atomic(const Context& c, Space space, Cta* owner, uint64_t address, unsigned bytes, bool acquires,
                     bool releases, bool write, Reach reach) {
  State& s = *state_;
  s.settle(&c);
  WarpState& w = warp_state(c);
  const bool store = c.op->from->parts[0] == "st";
  Access a{w.clock,
           epoch(w.agent, w.clock.of(w.local).at[kOrder], c.op->index) | kStrong,
           actor_of(c),
           space,
           write,
           kOrder,
           owner ? static_cast<CtaState*>(owner->shadow) : nullptr};
  a.reads = write && !store;
  s.memory(a, address, address + bytes);
  State::Flag& flag = s.flags[space == Space::global ? address : address | reinterpret_cast<uint64_t>(owner) << 24];
  auto take = [&](Clock& into) {
    for (const auto& f : flag.released)
      if (reach >= Reach::gpu || f.first == w.cluster->index) into.meet(f.first, f.second);
  };
  if (!store) take(acquires ? w.clock : w.observed);
  auto give = [&](const Clock& from) {
    if (from.seen.empty() && from.foreign.empty()) return;
    Clock sum;
    sum.cluster = w.cluster->index;
    for (const auto& f : flag.released) sum.meet(f.first, f.second);
    sum.join(from);
    flag.released[sum.cluster] = std::make_shared<const Vector>(sum.seen);
    for (const auto& f : sum.foreign) flag.released[f.first] = f.second;
  };
  if (write) give(releases ? w.clock : w.fenced);
  if (write && releases) w.clock.of(w.local).at[kOrder]++;
  w.snapshot.reset();
}

}  // namespace ptx
