// What the lanes of one warp know of each other and of the rest: views that part and unite.
//
// A lane that alone waits, fences or acquires learns what its neighbours do not know; what it releases covers its own
// past and what it knows of theirs, no more. Nothing of that costs anything while the lanes of a warp act together.
#include <algorithm>

#include "check/state.h"

namespace ptx {

Mask live_lanes(const WarpState& w) { return w.warp->live; }

View& view_of(WarpState& w, unsigned lane) {
  for (View& v : w.views)
    if (v.lanes >> lane & 1) return v;
  return w.views.front();
}

const Clock& together(const WarpState& w, Clock& room) {
  if (w.views.size() == 1) return w.views[0].clock;
  room = w.views[0].clock;
  for (size_t i = 1; i < w.views.size(); i++) room.join(w.views[i].clock);
  return room;
}

static void raise(Seen& into, const Seen& by) {
  for (unsigned k = 0; k < kKnowledge; k++) into.at[k] = std::max(into.at[k], by.at[k]);
}

uint32_t Checker::State::slot(WarpState& w, unsigned lane) {
  auto& lanes = agents[w.agent].lanes;
  if (!lanes) lanes = std::make_shared<std::array<uint32_t, kLanes>>();
  uint32_t& local = (*lanes)[lane];
  if (local == 0) {
    local = static_cast<uint32_t>(w.cluster->agents.size());
    w.cluster->agents.push_back(w.agent);
  }
  return local;
}

// `what` of these lanes becomes known.
void Checker::State::give(WarpState& w, Mask lanes, const Seen& what, Clock& into) {
  const Mask live = live_lanes(w);
  if ((live & lanes) == 0) return;
  if ((live & ~lanes) == 0) return raise(into.of(w.local), what);
  for (Mask left = lanes & live; left != 0; left &= left - 1)
    raise(into.of(slot(w, static_cast<unsigned>(__builtin_ctz(left)))), what);
}

// All that these lanes have done.
void Checker::State::give_own(WarpState& w, Mask lanes, Clock& into) {
  Seen common;
  std::fill_n(common.at, kKnowledge, ~0u);
  const Mask live = live_lanes(w);
  for (const View& v : w.views)
    if ((v.lanes & lanes & live) != 0)
      for (unsigned k = 0; k < kKnowledge; k++) common.at[k] = std::min(common.at[k], v.own.at[k]);
  common.at[kOrder] = w.now;
  give(w, lanes, common, into);
  if (w.views.size() == 1) return;
  for (const View& v : w.views) {
    if ((v.lanes & lanes & live) == 0) continue;
    bool more = false;
    for (unsigned k = kOrder + 1; k < kKnowledge; k++) more |= v.own.at[k] > common.at[k];
    if (!more) continue;
    for (Mask left = v.lanes & lanes & live; left != 0; left &= left - 1) {
      Seen& own = into.of(slot(w, static_cast<unsigned>(__builtin_ctz(left))));
      raise(own, v.own);
      own.at[kOrder] = std::max(own.at[kOrder], w.now);
    }
  }
}

// What these lanes have done and known so far is over for whoever gets it from here; what they do next is not.
void Checker::State::release(WarpState& w, Mask lanes, Clock& into) {
  for (const View& v : w.views)
    if ((v.lanes & lanes) != 0) into.join(v.clock);
  give_own(w, lanes, into);
  w.now++;
}

// Each of these lanes learns all that the others know and have done.
void Checker::State::unite(WarpState& w, Mask lanes) {
  View* one = nullptr;
  if (w.views.size() == 1 && (live_lanes(w) & ~lanes) == 0) {
    one = &w.views[0];
    give_own(w, lanes, one->clock);
  } else {
    apart(w, lanes, [](View&) {});
    Clock all;
    all.cluster = w.cluster->index;
    give_own(w, lanes, all);
    for (View& v : w.views) {
      if ((v.lanes & lanes & live_lanes(w)) == 0) continue;
      if (one == nullptr) {
        one = &v;
        one->clock.join(all);
        continue;
      }
      one->clock.join(v.clock);
      one->fenced.join(v.fenced);
      one->observed.join(v.observed);
      for (unsigned k = 0; k < kKnowledge; k++) one->own.at[k] = std::min(one->own.at[k], v.own.at[k]);
      one->lanes |= v.lanes;
      v.lanes = 0;
    }
    if ((live_lanes(w) & ~lanes) == 0) one->lanes = kAll;
    View kept = std::move(*one);
    std::vector<View> rest;
    for (View& v : w.views)
      if (&v != one && (v.lanes & ~kept.lanes & live_lanes(w)) != 0) rest.push_back(std::move(v));
    w.views.clear();
    w.views.push_back(std::move(kept));
    for (View& v : rest) w.views.push_back(std::move(v));
    one = &w.views[0];
  }
  w.now++;
  one->snapshot.reset();
}

// What an operation that this lane issues starts with; Checker::kWarp: one that the warp issues.
std::shared_ptr<const Clock> Checker::State::snapshot(WarpState& w, unsigned lane) {
  View& v = view_of(w, lane == kWarp ? 0 : lane);
  if (v.snapshot && v.snapshot_lane == lane && v.snapshot_now == w.now && (lane != kWarp || w.views.size() == 1))
    return v.snapshot;
  Clock room;
  auto clock = std::make_shared<Clock>(lane == kWarp ? together(w, room) : v.clock);
  if (lane == kWarp) {
    give_own(w, kAll, *clock);
  } else {
    Seen own = v.own;
    own.at[kOrder] = w.now;
    give(w, 1u << lane, own, *clock);
  }
  v.snapshot = clock;
  v.snapshot_lane = lane;
  v.snapshot_now = w.now;
  return v.snapshot;
}

// --- their own accesses

Access Checker::State::by_lanes(const Context& c, const View& v, Space space, Cta* owner, bool write, unsigned lanes) {
  WarpState& w = warp_state(c);
  doubt_warp = &c.warp;
  doubt_op = c.op;
  doubt_operation = 0;
  return {v.clock, epoch(w.agent, w.now, c.op->index, lanes), actor_of(c), space, write, kOrder, state_of(owner)};
}

void Checker::range(const Context& c, Space space, Cta* owner, uint64_t address, uint64_t bytes, bool write,
                    unsigned lane) {
  state_->settle(&c);
  const View& v = view_of(warp_state(c), lane == kWarp ? c.first() : lane);
  state_->memory(state_->by_lanes(c, v, space, owner, write, lane), address, address + bytes);
}

void Checker::gather(const Context& c, Cta& owner, const uint64_t* offset, unsigned rows, unsigned bytes) {
  state_->settle(&c);
  const Access a = state_->by_lanes(c, view_of(warp_state(c), 0), Space::shared, &owner, false, kWhole);
  for (unsigned l = 0; l < rows;) {
    unsigned end = l + 1;
    while (end < rows && offset[end] == offset[end - 1] + bytes) end++;
    state_->memory(a, offset[l], offset[l] + uint64_t{bytes} * (end - l));
    l = end;
  }
}

namespace {
// Lanes one after the other whose accesses lie side by side, or all in one place.
struct Run {
  uint64_t begin = 0, end = 0;
  unsigned first = 0, count = 0;
  bool same = false;

  bool takes(unsigned lane, uint64_t at, unsigned bytes, bool write) {
    if (count == 0) return false;
    if (at == begin && end - begin == bytes && (write || count == 1 || same)) return same = true;
    if (same || at != end || lane != first + count) return false;
    // Words shared by lanes whose number does not tell which: one by one.
    return bytes >= 4 || (begin % 4 == 0 && first % (4 / bytes) == 0);
  }
};

// Marks the pieces of a run with the lanes that they belong to.
void mark(Access& a, const Run& run, unsigned bytes, bool all) {
  unsigned lanes = run.first;
  a.each = 0;
  if (run.same) {  // which of several stores to one place stays, the ISA leaves open: no lane is named for it
    if (a.write) lanes = kWhole;
    else if (all) lanes = kEach;
  } else if (run.count > 1) {
    a.each = bytes >= 4 ? bytes / 4 : 1;
    if (bytes == 2) lanes = kPairs + run.first / 2;
    if (bytes == 1) lanes = kQuads + run.first / 4;
  }
  a.mark = (a.mark & ~kLaneBits) | static_cast<Epoch>(lanes) << kLaneShift;
}
}  // namespace

void Checker::lanes(const Context& c, Space space, Cta* owner, const uint64_t* address, Mask mask, unsigned bytes,
                    bool write, bool constant) {
  state_->settle(&c);
  WarpState& w = warp_state(c);
  const uint32_t unused = write ? 0 : state_->registers.unused[static_cast<size_t>(c.op->index)];
  for (const View& v : w.views) {
    Mask here = mask & v.lanes;
    if (here == 0) continue;
    Access a = state_->by_lanes(c, v, space, owner, write, 0);
    a.constant = constant;
    a.unused = unused;
    a.bytes = bytes;
    Run run;
    auto flush = [&] {
      if (run.count == 0) return;
      mark(a, run, bytes, mask == c.warp.live);
      state_->memory(a, run.begin, run.end);
    };
    for (; here != 0; here &= here - 1) {
      const unsigned lane = static_cast<unsigned>(__builtin_ctz(here));
      const uint64_t at = address[lane];
      if (run.takes(lane, at, bytes, write)) {
        run.count++;
        if (!run.same) run.end = at + bytes;
        continue;
      }
      flush();
      run = {at, at + bytes, lane, 1, false};
    }
    flush();
  }
}

void Checker::converge(const Context& c, Mask lanes) { state_->unite(warp_state(c), lanes); }

}  // namespace ptx
