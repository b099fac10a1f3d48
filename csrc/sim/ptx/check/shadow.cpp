// Shadow memory: who wrote each piece last and who has read it since, held against what the present access knows.
//
// FastTrack's idea (Flanagan and Freund, PLDI 2009): one epoch for the last write, one for the last read as long as the
// reads are ordered, and a set of epochs only while they are not. Runs of pieces with the same past are looked at once.
#include <algorithm>

#include "check/state.h"

namespace ptx {

// True when the answer is the same for an access by any other lane.
bool Checker::State::before(const Access& a, Epoch earlier, bool earlier_wrote, uint64_t at) {
  uint32_t agent = agent_of(earlier);
  if (agent == 0 || ((earlier & kStrong) && a.strong())) return true;
  if (agent == a.agent() && same_lanes(earlier, a.mark)) return lanes_of(earlier) == kWhole;
  const Agent& other = agents[agent];
  const bool any = a.known.knows_all(other, earlier);
  if (!any && !a.known.knows(other, earlier)) {
    if (earlier & kSilent) report(Finding::same_value, a, earlier, at);
    else
      report(!earlier_wrote ? Finding::write_after_read
             : a.write      ? Finding::write_after_write
                            : Finding::read_after_write,
             a, earlier, at);
    return true;
  }
  if (a.space == Space::tensor) {
    bool own =
        other.kind != Agent::pipe && other.id == a.actor.warp && std::equal(other.cta, other.cta + 3, a.actor.cta);
    if (registers.tensor_fences && !own && !a.known.knows(other, earlier, kTensorFence))
      report(Finding::tensor_fence, a, earlier, at);
  } else if (a.proxy != kOrder && (earlier_wrote || a.after_reads) && !(earlier & kAsyncProxy) &&
             !a.known.knows(other, earlier, a.proxy)) {
    report(a.proxy == kMapProxy ? Finding::map_fence : Finding::proxy_fence, a, earlier, at);
  }
  return any && a.proxy == kOrder;
}

// The readers of a piece once this one has joined them: those that happened before it need not be remembered. Of pieces
// that lanes side by side read after other warps have, the lanes are forgotten: a set for each would cost too much.
Epoch Checker::State::with_reader(const Access& a, Epoch readers) {
  const Epoch wide = a.each != 0 ? kLaneBits : 0;
  if (readers == 0) return a.mark;
  Epoch kept[64];
  size_t n = 0;
  auto keep = [&](Epoch e) {
    const bool own = agent_of(e) == a.agent() && same_lanes(e, a.mark);
    if (!own && !a.known.knows(agents[agent_of(e)], e) && n < 63) kept[n++] = lanes_of(e) == kEach ? e : e | wide;
  };
  if (readers & kTagged) {
    size_t index = readers & ~kTagged;
    for (size_t i = 1; i <= sets[index]; i++) keep(sets[index + i]);
  } else {
    keep(readers);
  }
  if (n == 0) return a.mark | wide;
  kept[n++] = a.mark | wide;
  Epoch result = kTagged | sets.size();
  sets.push_back(n);
  sets.insert(sets.end(), kept, kept + n);
  return result;
}

// Drops the sets that no piece refers to any more.
void Checker::State::compact() {
  std::vector<Epoch> kept;
  std::unordered_map<Epoch, Epoch> moved;
  auto move = [&](Epoch& e) {
    if (!(e & kTagged)) return;
    auto [at, fresh] = moved.try_emplace(e, kTagged | kept.size());
    if (fresh) {
      size_t index = e & ~kTagged;
      kept.insert(kept.end(), sets.begin() + index, sets.begin() + index + 1 + sets[index]);
    }
    e = at->second;
  };
  for (auto& cluster : clusters)
    for (CtaState& cta : cluster.second->ctas) {
      for (Epoch& e : cta.read) move(e);
      for (Epoch& e : cta.tensor_read) move(e);
    }
  for (auto& page : pages)
    for (Epoch& e : page.second->read) move(e);
  for (Split& s : splits)
    for (Epoch& e : s.read) move(e);
  sets.swap(kept);
  sets_limit = std::max<size_t>(1u << 22, sets.size() * 2);
}

namespace {
// One piece. `fine`: the last writer that was found in order, whatever its lane; `same` and `then`: the readers seen
// last and what they become.
struct Memo {
  Epoch fine = 0, same = ~0ull, then = 0;
};

// The last one to use a piece was this lane: the common case of a lane that works on what is its own.
bool own(Epoch earlier, Epoch mark) {
  constexpr Epoch kWho = (static_cast<Epoch>(kAgentMask) << kAgentShift) | kLaneBits;
  return ((earlier ^ mark) & (kWho | kTagged)) == 0;
}
}  // namespace

static bool all_readers(Checker::State& s, const Access& a, Epoch readers, uint64_t at) {
  if (!(readers & kTagged)) return s.before(a, readers, false, at);
  size_t index = readers & ~kTagged;
  bool any = true;
  for (size_t i = 1; i <= s.sets[index]; i++) any &= s.before(a, s.sets[index + i], false, at);
  return any;
}

static void piece(Checker::State& s, const Access& a, Memo& memo, Epoch& written, Epoch& read, uint64_t at) {
  if ((written & ~kLaneBits) != memo.fine && !own(written, a.mark) && s.before(a, written, true, at))
    memo.fine = written & ~kLaneBits;
  if (a.write) {
    if (read != 0 && (read & ~kLaneBits) != memo.same && !own(read, a.mark) && all_readers(s, a, read, at))
      memo.same = read & ~kLaneBits;
    written = a.mark;
    read = 0;
  } else if (read == 0 || own(read, a.mark)) {
    read = a.mark;
  } else {
    const Epoch same = a.each != 0 ? read & ~kLaneBits : read;
    if (same != memo.same) {
      memo.same = same;
      memo.then = s.with_reader(a, read);
    }
    read = memo.then;
  }
}

// `a.each`: where the access of a lane ends and the next lane's begins, counted from the first piece of the whole.
void Checker::State::sweep(const Access& a, Epoch* written, Epoch* read, size_t n, uint64_t at, uint64_t step) {
  Memo memo;
  uint32_t left = a.left;
  for (size_t i = 0; i < n; i++) {
    if (a.each != 0 && left-- == 0) {
      left = a.each - 1;
      a.mark += kLaneOne;
    }
    if (written[i] & kTagged) bytes(a, &written[i], &read[i], at + i * step, 15);
    else piece(*this, a, memo, written[i], read[i], at + i * step);
  }
  a.left = left;
}

// Some of the four bytes of a piece, or a piece whose bytes have different pasts.
void Checker::State::bytes(const Access& a, Epoch* written, Epoch* read, uint64_t at, unsigned mask) {
  uint32_t index;
  if (*written & kTagged) {
    index = static_cast<uint32_t>(*written);
  } else if (free_splits.empty()) {
    index = static_cast<uint32_t>(splits.size());
    splits.emplace_back();
  } else {
    index = free_splits.back();
    free_splits.pop_back();
  }
  if (!(*written & kTagged)) {
    std::fill_n(splits[index].written, 4, *written);
    std::fill_n(splits[index].read, 4, *read);
    *written = kTagged | index;
    *read = 0;
  }
  Memo memo;
  for (unsigned b = 0; b < 4; b++)
    if (mask >> b & 1) piece(*this, a, memo, splits[index].written[b], splits[index].read[b], at + b);
  const Split& s = splits[index];
  for (unsigned b = 1; b < 4; b++)
    if (s.written[b] != s.written[0] || s.read[b] != s.read[0]) return;
  *written = s.written[0];
  *read = s.read[0];
  free_splits.push_back(index);
}

Page& Checker::State::page(uint64_t number) {
  Cached& c = cached[number % cached.size()];
  if (c.number != number) {
    auto& p = pages[number];
    if (!p) p = std::make_unique<Page>();
    c = {number, p.get()};
  }
  return *c.page;
}

void Checker::State::visit(CtaState& owner, Epoch mark, bool lingers) {
  if (mark == owner.last_visit) return;
  owner.last_visit = mark;
  const Agent& who = agents[agent_of(mark)];
  if (who.kind == Agent::warp && std::equal(who.cta, who.cta + 3, owner.index)) return;
  Epoch& last = (lingers ? owner.lingerers : owner.visitors)[agent_of(mark)];
  if (clock_of(last) <= clock_of(mark)) last = mark;
}

// Whether it is known that any warp of the CTA has begun to run.
bool Checker::State::started(const Clock& known, const CtaState& cta) const {
  for (uint32_t i = 0; i < cta.cta->warps.size(); i++) {
    const uint32_t local = cta.first_agent - 1 + i;
    if (local < known.seen.size() && known.seen[local].at[kStarted] != 0) return true;
    const Agent& warp = agents[cta.cluster->agents[local]];
    for (unsigned l = 0; warp.lanes && l < kLanes; l++) {
      const uint32_t slot = (*warp.lanes)[l];
      if (slot != 0 && slot < known.seen.size() && known.seen[slot].at[kStarted] != 0) return true;
    }
  }
  return false;
}

// PTX ISA 9.7.13.15: operations that are none of mbarrier's, on an initialised mbarrier, are undefined behaviour.
void Checker::State::barriers(const Access& a, uint64_t begin, uint64_t end) {
  const CtaState& owner = *a.owner;
  if (begin >= owner.barriers_end || end <= owner.barriers_begin) return;
  for (uint64_t i = begin / 8; i <= (end - 1) / 8; i++)
    if (owner.barriers[i] != 0)
      return report(a.write ? Finding::barrier_overwritten : Finding::barrier_read, a.space, a.actor, a.owner, 0,
                    i * 8);
}

void Checker::State::validity(const Access& a, uint64_t begin, uint64_t end) {
  std::vector<uint8_t>& valid = a.owner->valid;
  if (!a.write || a.reads)
    for (uint64_t at = begin; at < end; at++) {
      if (at % 4 == 0 && end - at >= 4 && valid[at / 4] == 15) {
        at += 3;
      } else if (!(valid[at / 4] >> at % 4 & 1) && !(a.unused >> (at - begin) % a.bytes & 1)) {
        report(a.product ? Finding::operand_uninitialised : Finding::uninitialised, a, 0, at);
        break;
      }
    }
  if (a.write)
    for (uint64_t at = begin; at < end;) {
      if (at % 4 == 0 && end - at >= 4) {
        valid[at / 4] = 15;
        at += 4;
      } else {
        valid[at / 4] |= static_cast<uint8_t>(1u << at % 4);
        at++;
      }
    }
}

void Checker::State::memory(const Access& a, uint64_t begin, uint64_t end) {
  if (begin >= end) return;
  if (sets.size() > sets_limit) compact();
  if (a.space == Space::shared) {
    CtaState& owner = *a.owner;
    if (owner.ended) return report(Finding::exited, a, 0, begin);
    if (end > owner.written.size() * 4) return;  // out of bounds: the instruction itself fails
    if (!std::equal(a.actor.cta, a.actor.cta + 3, owner.index) && !started(a.known, owner))
      report(Finding::not_started, a.space, a.actor, a.owner, 0, begin);
    barriers(a, begin, end);
    // The source of a bulk store that nobody has waited for: FlashAttention-4's backward exits so, and works.
    visit(owner, a.mark, !a.write && !a.product && agents[a.agent()].kind == Agent::operation);
    validity(a, begin, end);
  }
  const size_t settled = doubts.size();
  a.left = a.each;
  for (uint64_t at = begin; at < end;) {
    uint64_t first = at / 4, stop = a.space == Space::shared ? end : std::min(end, (at / 4096 + 1) * 4096);
    Epoch *written, *read;
    if (a.space == Space::shared) {
      written = a.owner->written.data() + first;
      read = a.owner->read.data() + first;
    } else {
      Page& p = page(at / 4096);
      written = p.written.data() + first % 1024;
      read = p.read.data() + first % 1024;
      if (a.constant && std::any_of(written, written + (stop - at + 3) / 4, [](Epoch e) { return e != 0; }))
        report(Finding::not_constant, a.space, a.actor, nullptr, 0, at);
    }
    if (at % 4 != 0 || stop - at < 4) {
      unsigned skip = at % 4, n = static_cast<unsigned>(std::min<uint64_t>(4 - skip, stop - at));
      if (a.each != 0 && at != begin) a.mark += kLaneOne;  // only a word shared by lanes ends so
      bytes(a, written, read, first * 4, ((1u << n) - 1) << skip);
      at += n;
    } else {
      size_t n = (stop - at) / 4;
      sweep(a, written, read, n, at, 4);
      at += n * 4;
    }
  }
  if (doubts.size() > settled) keep(a, begin, end);
}

void Checker::State::tensor(const Access& a, unsigned lane, unsigned lanes, unsigned column, unsigned columns) {
  CtaState& owner = *a.owner;
  if (sets.size() > sets_limit) compact();
  if (lane + lanes > kTmemLanes || column + columns > kTmemColumns) return;  // the instruction itself fails
  if (owner.ended) return report(Finding::exited, a, 0, lane * kTmemColumns + column);
  if (owner.tensor_written.empty()) {
    owner.tensor_written.resize(kTmemLanes / 16 * kTmemColumns);
    owner.tensor_read.resize(owner.tensor_written.size());
    owner.tensor_valid.resize(owner.tensor_written.size());
  }
  for (unsigned group = lane / 16; group <= (lane + lanes - 1) / 16; group++) {
    unsigned low = std::max(lane, group * 16) - group * 16, high = std::min(lane + lanes, group * 16 + 16) - group * 16;
    uint16_t mask = static_cast<uint16_t>((1u << high) - (1u << low));
    size_t first = group * kTmemColumns + column;
    uint64_t at = (group * 16 + low) * kTmemColumns + column;
    for (unsigned i = 0; i < columns; i++) {
      uint16_t& valid = owner.tensor_valid[first + i];
      if (a.write) valid |= mask;
      else if ((valid & mask) != mask) {
        report(a.product ? Finding::operand_uninitialised : Finding::uninitialised, a, 0, at + i);
        break;
      }
    }
    sweep(a, &owner.tensor_written[first], &owner.tensor_read[first], columns, at, 1);
  }
}

}  // namespace ptx
