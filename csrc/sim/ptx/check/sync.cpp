// The checker's hooks for synchronisation: who learns what from whom.
#include <algorithm>

#include "check/state.h"

namespace ptx {

namespace {
void acquire(WarpState& w, Mask lanes, const Clock& from) {
  apart(w, lanes, [&](View& v) { v.clock.join(from); });
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

// An arrival in another CTA, which has to be there.
void remote(Checker::State& s, const CtaState& owner, const Clock& known, const Actor& actor, uint32_t offset) {
  if (!s.started(known, owner)) s.report(Finding::not_started, Space::shared, actor, &owner, 0, offset);
}

// The same for lanes, which know what they have created themselves.
void created(Checker::State& s, const Meeting& m, const Context& c, Mask lanes) {
  WarpState& w = warp_state(c);
  if (agent_of(m.created) == w.agent) lanes &= ~mask_of(lanes_of(m.created));
  for (const View& v : w.views)
    if ((v.lanes & lanes) != 0) created(s, m, v.clock, actor_of(c), false);
}
}  // namespace

// --- mbarriers

void Checker::initialise(const Context& c, Cta& owner, uint32_t offset, unsigned lane) {
  CtaState& state = *owner.checked;
  state.barriers[offset / 8] = 0;  // another lane's init of the same mbarrier
  range(c, Space::shared, &owner, offset, 8, true, lane);
  state.barriers[offset / 8] = 1;
  state.barriers_begin = std::min<uint64_t>(state.barriers_begin, offset);
  state.barriers_end = std::max<uint64_t>(state.barriers_end, offset + 8);
  WarpState& w = warp_state(c);
  Mbarrier& barrier = owner.mbarrier(offset);
  barrier.meeting = nullptr;
  Meeting& m = state_->meeting(barrier.meeting, *w.cluster);
  m.owner = &state;
  m.offset = offset;
  m.created = epoch(w.agent, w.now, c.op->index, lane);
}

void Checker::invalidate(const Context& c, Cta& owner, uint32_t offset, unsigned lane) {
  owner.checked->barriers[offset / 8] = 0;
  range(c, Space::shared, &owner, offset, 8, true, lane);
}

void Checker::arrive(const Context& c, Mbarrier& barrier, Mask lanes, bool releases) {
  state_->settle(&c);
  WarpState& w = warp_state(c);
  Meeting& m = state_->meeting(barrier.meeting, *w.cluster);
  created(*state_, m, c, lanes);
  if (m.owner && m.owner != w.cta)
    remote(*state_, *m.owner, view_of(w, static_cast<unsigned>(__builtin_ctz(lanes))).clock, actor_of(c), m.offset);
  if (m.owner && m.owner != w.cta)
    state_->visit(*m.owner, epoch(w.agent, w.now, c.op->index, static_cast<unsigned>(__builtin_ctz(lanes))), false);
  if (releases) return state_->release(w, lanes, m.gathering);
  for (const View& v : w.views)
    if ((v.lanes & lanes) != 0) m.gathering.join(v.fenced);
}

// PTX ISA 8.9.1.1: the complete-tx of a bulk copy orders the copy itself, and nothing else that its issuer has done. A
// tcgen05.commit stands for all the work of its pipe, and for what that work was ordered after.
void Checker::arrive(const AsyncRef& ref, Mbarrier& barrier) {
  Meeting& m = state_->meeting(barrier.meeting, *ref->cluster);
  // cp.async.mbarrier.arrive, st.async and clusterlaunchcontrol reach their mbarrier through the generic proxy.
  const std::string& text = ref->actor.op->from->text;
  created(*state_, m, *ref->known, ref->actor, ref->pipe || text.find("async.bulk") != std::string::npos);
  if (m.owner && !std::equal(ref->actor.cta, ref->actor.cta + 3, m.owner->index))
    remote(*state_, *m.owner, *ref->known, ref->actor, m.offset);
  if (m.owner && ref->pipe) state_->visit(*m.owner, epoch(ref->agent, ref->writes, ref->actor.op->index), true);
  if (ref->pipe) m.gathering.join(*ref->known);
  Seen& seen = m.gathering.of(ref->local);
  for (Knowledge k : {kOrder, kTensorBefore}) seen.at[k] = std::max(seen.at[k], ref->writes);
}

void Checker::phase(Mbarrier& barrier) {
  if (barrier.meeting == nullptr) return;
  Meeting& m = *barrier.meeting;
  m.done.join(m.gathering);
}

void Checker::observe(const Context& c, Mbarrier& barrier, Mask lanes, bool acquires) {
  WarpState& w = warp_state(c);
  Meeting& m = state_->meeting(barrier.meeting, *w.cluster);
  created(*state_, m, c, lanes);
  if (acquires) acquire(w, lanes, m.done);
  else apart(w, lanes, [&](View& v) { v.observed.join(m.done); });
}

Mask Checker::know_phase(const Context& c, const Mbarrier& barrier, Mask lanes) const {
  if (barrier.meeting == nullptr) return lanes;
  const WarpState& w = warp_state(c);
  const Clock& done = barrier.meeting->done;
  const auto seen = [](const Vector& by, size_t i) { return i < by.size() ? by[i].at[kOrder] : 0; };
  const auto knows = [&](const View& v) {
    for (size_t i = 0; i < done.seen.size(); i++) {
      const Agent& other = state_->agents[w.cluster->agents[i]];
      uint32_t known = std::max(seen(v.clock.seen, i), seen(v.observed.seen, i));
      // Of one lane is known what is known of all of its warp.
      known = std::max({known, seen(v.clock.seen, other.local), seen(v.observed.seen, other.local)});
      if (w.cluster->agents[i] != w.agent && done.seen[i].at[kOrder] > known) return false;
    }
    return true;
  };
  Mask known = 0;
  for (const View& v : w.views)
    if ((v.lanes & lanes) != 0 && knows(v)) known |= v.lanes & lanes;
  return known;
}

void Checker::group_done(const Context& c, const AsyncRef& ref, Mask lanes, bool reading) {
  WarpState& w = warp_state(c);
  apart(w, lanes, [&](View& v) {
    uint32_t& seen = v.clock.of(ref->local).at[kOrder];
    seen = std::max(seen, reading ? ref->reads : ref->writes);
  });
  if (ref->pipe && w.any_multiplying) {
    w.any_multiplying = false;
    for (uint32_t& m : w.multiplying) {
      if (m <= ref->writes) m = 0;
      w.any_multiplying |= m != 0;
    }
  }
}

// --- named barriers and the cluster's

void Checker::named_arrive(const Context& c, NamedBarrier& barrier) {
  WarpState& w = warp_state(c);
  state_->release(w, c.mask, state_->meeting(barrier.meeting, *w.cluster).gathering);
}

void Checker::named_complete(NamedBarrier& barrier) {
  if (barrier.meeting == nullptr) return;
  Meeting& m = *barrier.meeting;
  m.done.join(m.gathering);
}

void Checker::named_leave(const Context& c, NamedBarrier& barrier) {
  WarpState& w = warp_state(c);
  if (w.views.size() > 1) state_->unite(w, c.mask);  // its lanes have met each other, too
  acquire(w, c.mask, state_->meeting(barrier.meeting, *w.cluster).done);
}

void Checker::cluster_arrive(const Context& c, bool releases) {
  WarpState& w = warp_state(c);
  if (releases) return state_->release(w, c.mask, w.cluster->barrier.gathering);
  for (const View& v : w.views) w.cluster->barrier.gathering.join(v.fenced);
  w.cluster->barrier.gathering.of(w.local).at[kStarted] = 1;
}

void Checker::cluster_complete(Cluster& cluster) {
  Meeting& m = *cluster.barrier_meeting;
  m.done.join(m.gathering);
}

void Checker::cluster_leave(const Context& c) {
  WarpState& w = warp_state(c);
  acquire(w, c.mask, w.cluster->barrier.done);
}

// --- fences

// A relaxed arrival or store after this hands on what is known now.
static void fenced(Checker::State& s, WarpState& w, View& v) {
  v.fenced.join(v.clock);
  Seen own = v.own;
  own.at[kOrder] = w.now;
  s.give(w, v.lanes, own, v.fenced);
}

void Checker::proxy_fence(const Context& c, const std::string& kind) {
  WarpState& w = warp_state(c);
  const bool both = kind.find("::shared") == std::string::npos && kind.find(".shared") == std::string::npos;
  apart(w, c.mask, [&](View& v) {
    auto raise = [&](Knowledge k) {
      v.clock.raise(k);
      v.own.at[k] = w.now;
    };
    if (starts(kind, "mbarrier_init")) {
      v.own.at[kBarrierInit] = w.now;
      Seen fenced;
      fenced.at[kBarrierInit] = w.now;
      state_->give(w, v.lanes, fenced, v.fenced);
    } else if (starts(kind, "proxy.async")) {
      if (kind.find(".global") == std::string::npos) raise(kSharedProxy);
      if (both) raise(kGlobalProxy);
    } else if (starts(kind, "proxy.tensormap")) {
      if (kind.find("acquire") != std::string::npos) {
        v.clock.join(v.observed);
        raise(kMapProxy);
      }
      if (kind.find("release") != std::string::npos) fenced(*state_, w, v);
    }
  });
  w.now++;
}

void Checker::fence(const Context& c, const std::string&) {
  WarpState& w = warp_state(c);
  apart(w, c.mask, [&](View& v) {
    v.clock.join(v.observed);
    fenced(*state_, w, v);
  });
  w.now++;
}

void Checker::tensor_fence(const Context& c, bool before) {
  if (!state_->registers.tensor_fences) return;
  WarpState& w = warp_state(c);
  apart(w, c.mask, [&](View& v) {
    if (before) {
      v.clock.raise(kTensorBefore);
      v.own.at[kTensorBefore] = w.now;
      fenced(*state_, w, v);  // also what a relaxed arrival hands on
    } else {
      v.clock.join(v.observed);
      for (Seen& s : v.clock.seen) s.at[kTensorFence] = std::max(s.at[kTensorFence], s.at[kTensorBefore]);
    }
  });
  if (before) w.now++;
}

// --- atomics, and loads and stores that are not weak

void Checker::atomic(const Context& c, Space space, Cta* owner, const uint64_t* address, Mask mask, unsigned bytes,
                     bool acquires, bool releases, bool write, Reach reach) {
  State& s = *state_;
  s.settle(&c);
  WarpState& w = warp_state(c);
  const bool store = c.op->from->parts[0] == "st";
  auto flag = [&](unsigned lane) -> State::Flag& {
    return s.flags[space == Space::global ? address[lane] : address[lane] | reinterpret_cast<uint64_t>(owner) << 24];
  };
  Mask taking = 0;
  for (Mask left = mask; left != 0; left &= left - 1) {
    const unsigned lane = static_cast<unsigned>(__builtin_ctz(left));
    Access a = s.by_lanes(c, view_of(w, lane), space, owner, write, lane);
    a.mark |= kStrong;
    a.reads = write && !store;
    s.memory(a, address[lane], address[lane] + bytes);
    if (!store && !flag(lane).released.empty()) taking |= 1u << lane;
  }
  // What one lane takes, all lanes of the instruction that take something have: a view for each would cost too much.
  if (taking != 0)
    apart(w, taking, [&](View& v) {
      for (Mask left = taking; left != 0; left &= left - 1)
        for (const auto& f : flag(static_cast<unsigned>(__builtin_ctz(left))).released)
          if (reach >= Reach::gpu || f.first == w.cluster->index)
            (acquires ? v.clock : v.observed).meet(f.first, f.second);
    });
  if (!write) return;
  while (mask != 0) {
    const unsigned lane = static_cast<unsigned>(__builtin_ctz(mask));
    Mask same = 0;  // the lanes of the same flag
    for (Mask left = mask; left != 0; left &= left - 1)
      if (address[__builtin_ctz(left)] == address[lane]) same |= left & -left;
    mask &= ~same;
    Clock sum;
    sum.cluster = w.cluster->index;
    for (const View& v : w.views)
      if ((v.lanes & same) != 0) sum.join(releases ? v.clock : v.fenced);
    if (releases) s.give_own(w, same, sum);
    if (sum.seen.empty() && sum.foreign.empty()) continue;
    State::Flag& to = flag(lane);
    for (const auto& f : to.released) sum.meet(f.first, f.second);
    to.released[sum.cluster] = std::make_shared<const Vector>(sum.seen);
    for (const auto& f : sum.foreign) to.released[f.first] = f.second;
  }
  if (releases) w.now++;
}

}  // namespace ptx
