// Asynchronous operations between issue and completion, and the groups that a thread waits for.
//
// Without a seed an operation completes when it is issued. Under a seed it completes as late as the program can bear
// (when no warp can run), in random order, and some complete early: how many is part of the seed, so that several seeds
// are several schedules. Nothing here is promised by hardware; everything here is allowed by PTX ISA 9.7.9.25.
#include <algorithm>

#include "async/async.h"

namespace ptx {

namespace {

// One early completion in so many issues, by the seed's low bits; 0: none before the last moment.
constexpr unsigned kEarly[4] = {0, 8, 3, 2};

}  // namespace

bool chance(Cluster& cluster, unsigned n) { return n && cluster.next_random() % n == 0; }

void Cluster::submit(uint64_t order, std::function<void()> complete) {
  const uint64_t seed = launch->options.seed;
  if (!seed) {
    complete();
    return;
  }
  pending.push_back({order, std::move(complete)});
  if (chance(*this, kEarly[seed & 3])) drain_one(*this);
}

bool drain_one(Cluster& cluster) {
  // Of the operations with one order only the oldest may complete.
  std::vector<size_t> ready;
  std::vector<uint64_t> seen;
  for (size_t i = 0; i < cluster.pending.size(); i++) {
    const uint64_t order = cluster.pending[i].order;
    if (order) {
      if (std::find(seen.begin(), seen.end(), order) != seen.end()) continue;
      seen.push_back(order);
    }
    ready.push_back(i);
  }
  if (ready.empty()) return false;
  const size_t chosen = ready[cluster.next_random() % ready.size()];
  // Taken out first: completing may submit further operations.
  const std::function<void()> complete = std::move(cluster.pending[chosen].complete);
  cluster.pending.erase(cluster.pending.begin() + static_cast<std::ptrdiff_t>(chosen));
  complete();
  return true;
}

void Tracked::done() {
  reading = incomplete = false;
  const std::vector<std::function<void()>> waiting = std::move(then);
  then.clear();
  for (const auto& call : waiting) call();
}

void submit_store(Context& c, Mask lanes, const AsyncRef& ref, std::function<void(Buffer&)> read,
                  std::function<void(const Buffer&)> write) {
  const auto tracked = tracking(c) ? groups(c.warp.bulk_groups).add(lanes, ref) : nullptr;
  const auto bytes = std::make_shared<Buffer>();
  Cluster* cluster = &c.cluster;
  cluster->submit(0, [cluster, tracked, bytes, read = std::move(read), write = std::move(write)] {
    read(*bytes);
    if (tracked) tracked->reading = false;
    cluster->submit(0, [tracked, bytes, write] {
      write(*bytes);
      if (tracked) tracked->done();
    });
  });
}

std::shared_ptr<Tracked> Groups::add(Mask lanes, const AsyncRef& ref) {
  auto operation = std::make_shared<Tracked>();
  operation->ref = ref;
  // A kernel that waits by mbarrier never commits: what is over and needs no further word is forgotten.
  constexpr size_t kKept = 256;
  if (open.size() >= kKept)
    open.erase(std::remove_if(open.begin(), open.end(),
                              [](const Entry& e) {
                                return !e.operation->incomplete && (e.operation->signalled || !e.operation->ref);
                              }),
               open.end());
  open.push_back({lanes, operation});
  return operation;
}

void Groups::commit(Mask lanes) {
  // An empty group counts too: wait_group counts groups, not operations.
  Commit group{lanes, {}};
  std::vector<Entry> rest;
  for (const Entry& e : open) {
    if (e.lanes & lanes) group.entries.push_back({e.lanes & lanes, e.operation});
    if (e.lanes & ~lanes) rest.push_back({e.lanes & ~lanes, e.operation});
  }
  open = std::move(rest);
  committed.push_back(std::move(group));
}

Step Groups::wait(Context& c, unsigned n, bool reading, const char* what) {
  // From the newest group to the oldest: a lane is past its last n groups when it has met n of them.
  unsigned met[kLanes] = {};
  std::vector<Mask> due(committed.size(), 0);   // by group: the lanes that have to see it complete
  for (size_t i = committed.size(); i-- > 0;) {
    const Mask lanes = committed[i].lanes & c.mask;
    for (unsigned l = 0; l < kLanes; l++)
      if (lanes >> l & 1 && ++met[l] > n) due[i] |= 1u << l;
  }
  uint64_t left = 0;
  for (size_t i = 0; i < committed.size(); i++)
    for (const Entry& e : committed[i].entries)
      if (e.lanes & due[i] && (reading ? e.operation->reading : e.operation->incomplete)) left++;
  if (left) {
    c.fragment.why = {what, {n, left, 0, 0}};
    return Step::blocked;
  }
  for (size_t i = 0; i < committed.size(); i++) {
    if (c.check && due[i])
      for (const Entry& e : committed[i].entries)
        if (e.lanes & due[i]) c.check->group_done(c, e.operation->ref, e.lanes & due[i], reading);
    if (!reading) committed[i].lanes &= ~due[i];
  }
  while (!committed.empty() && !committed.front().lanes) committed.pop_front();
  return Step::next;
}

}  // namespace ptx
