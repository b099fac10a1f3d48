// Joins of vector clocks.
#include "check/clock.h"

#include <algorithm>

namespace ptx::checking {

namespace {
void most(Vector& into, const Vector& from) {
  if (into.size() < from.size()) into.resize(from.size());
  uint32_t* a = into.empty() ? nullptr : into[0].at;
  const uint32_t* b = from.empty() ? nullptr : from[0].at;
  for (size_t i = 0, n = from.size() * kKnowledge; i < n; i++) a[i] = a[i] < b[i] ? b[i] : a[i];
}

bool covers(const Vector& a, const Vector& b) {
  if (a.size() < b.size()) return false;
  for (size_t i = 0; i < b.size(); i++)
    for (unsigned k = 0; k < kKnowledge; k++)
      if (a[i].at[k] < b[i].at[k]) return false;
  return true;
}
}  // namespace

const Vector* Clock::of_cluster(uint32_t which) const {
  if (which == cluster) return &seen;
  for (const auto& f : foreign)
    if (f.first == which) return f.second.get();
  return nullptr;
}

bool Clock::knows_all(const Agent& a, Epoch e, Knowledge what) const {
  const Vector* of = of_cluster(a.cluster);
  return of && a.local < of->size() ? (*of)[a.local].at[what] >= clock_of(e) : clock_of(e) == 0;
}

bool Clock::knows(const Agent& a, Epoch e, Knowledge what) const {
  if (knows_all(a, e, what)) return true;
  const unsigned lanes = lanes_of(e);
  if (!a.lanes || lanes == kEach) return false;
  const Vector* of = of_cluster(a.cluster);
  for (Mask left = of ? mask_of(lanes) : 0; left != 0; left &= left - 1) {
    const uint32_t local = (*a.lanes)[static_cast<size_t>(__builtin_ctz(left))];
    if (local != 0 && local < of->size() && (*of)[local].at[what] >= clock_of(e)) return true;
  }
  return false;
}

void Clock::join(const Vector& other) { most(seen, other); }

void Clock::meet(uint32_t of_cluster, const std::shared_ptr<const Vector>& snapshot) {
  if (of_cluster == cluster) return most(seen, *snapshot);
  auto at = std::lower_bound(foreign.begin(), foreign.end(), of_cluster,
                             [](const auto& entry, uint32_t c) { return entry.first < c; });
  if (at == foreign.end() || at->first != of_cluster) {
    foreign.insert(at, {of_cluster, snapshot});
  } else if (at->second != snapshot && !covers(*at->second, *snapshot)) {
    if (covers(*snapshot, *at->second)) {
      at->second = snapshot;
    } else {
      auto both = std::make_shared<Vector>(*at->second);
      most(*both, *snapshot);
      at->second = both;
    }
  }
}

void Clock::join(const Clock& other) {
  most(seen, other.seen);
  for (const auto& f : other.foreign) meet(f.first, f.second);
}

void Clock::raise(Knowledge what) {
  for (Seen& s : seen) s.at[what] = std::max(s.at[what], s.at[kOrder]);
  for (auto& f : foreign) {
    auto raised = std::make_shared<Vector>(*f.second);
    for (Seen& s : *raised) s.at[what] = std::max(s.at[what], s.at[kOrder]);
    f.second = raised;
  }
}

}  // namespace ptx::checking
