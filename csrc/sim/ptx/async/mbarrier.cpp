// mbarrier: PTX ISA 9.7.13.15. The object in shared memory is opaque; its state lives beside the CTA's memory.
#include <algorithm>

#include "async/async.h"

namespace ptx {

namespace {

constexpr int64_t kMaxCount = (1 << 20) - 1;   // 9.7.13.15.2 "Contents of the mbarrier object"

// What mbarrier.arrive returns: the phase before it and, for mbarrier.pending_count, the arrivals then pending.
uint64_t state_of(const Mbarrier& m) { return m.phase << 20 | static_cast<uint64_t>(m.pending); }
uint64_t phase_of(uint64_t state) { return state >> 20; }

struct Barrier {
  Address address;
  bool own = false;          // .shared::cta or a form that takes no other
  Slot value = 0;            // count, tx-count, parity or state
  bool counted = false;      // `value` is there
  bool relaxed = false, expect = false, drop = false, no_complete = false, parity = false, blocking = false;
  bool returns = false;      // a state register is written
  Slot destination = 0;
};

std::string name_of(const SharedPlace& p) {
  return "the mbarrier at shared offset " + hex(p.offset) + " of CTA rank " + std::to_string(p.cta->rank);
}

SharedPlace place(const Context& c, uint64_t address, bool generic, bool own) {
  return shared_place(c, address, generic, 8, 8, own, "the mbarrier");
}

Mbarrier& valid(const Context& c, const SharedPlace& p) {
  Mbarrier& m = p.cta->mbarrier(p.offset);
  if (!m.valid) c.fail(name_of(p) + " is used before mbarrier.init (or after mbarrier.inval)");
  return m;
}

// 9.7.13.15.6 "Phase Completion of the mbarrier object".
void settle(const Context& c, Mbarrier& m) {
  if (m.pending != 0 || m.tx != 0) return;
  m.phase++;
  m.pending = m.count;
  if (c.check) c.check->phase(m);
}

void change_tx(const Context& c, const SharedPlace& p, Mbarrier& m, int64_t by) {
  m.tx += by;
  if (m.tx > kMaxCount || m.tx < -kMaxCount)
    c.fail(name_of(p) + ": its tx-count became " + std::to_string(m.tx) + ", the limit is 2^20 - 1 either way");
}

void take_arrivals(const Context& c, const SharedPlace& p, Mbarrier& m, int64_t count, bool no_complete) {
  if (count < 1 || count > kMaxCount)
    c.fail(name_of(p) + ": an arrival with count " + std::to_string(count) + ", accepted are 1 to 2^20 - 1");
  if (count > m.pending)
    c.fail(name_of(p) + " gets " + std::to_string(count) + " arrivals when " + std::to_string(m.pending) + " of " +
           std::to_string(m.count) + " are pending in phase " + std::to_string(m.phase) +
           (m.tx ? " (" + std::to_string(m.tx) + " bytes outstanding)" : ""));
  if (no_complete && count == m.pending && m.tx == 0)
    c.fail(name_of(p) + ": mbarrier.arrive.noComplete would complete phase " + std::to_string(m.phase));
  m.pending -= count;
}

Step run_init(Context& c, const Op& op) {
  const auto& r = record<Barrier>(op);
  uint64_t at[kLanes];
  r.address.lanes(c, at);
  const V32& count = c.warp.v32(r.value);
  // All lanes of a warp may execute one init without electing one: it counts once.
  uint64_t done = ~0ull;
  for (unsigned l = 0; l < kLanes; l++) {
    if (!(c.mask >> l & 1)) continue;
    const SharedPlace p = place(c, at[l], r.address.generic, true);
    if (count.x[l] < 1 || count.x[l] > kMaxCount)
      c.fail(name_of(p) + ": mbarrier.init with count " + std::to_string(count.x[l]) + ", accepted are 1 to 2^20 - 1");
    Mbarrier& m = p.cta->mbarrier(p.offset);
    if (at[l] == done && m.count == count.x[l]) continue;
    const bool untouched = m.phase == 0 && m.tx == 0 && m.pending == m.count;
    if (m.valid && !(untouched && m.count == count.x[l]))
      c.fail(name_of(p) + " is initialised again while it is valid (phase " + std::to_string(m.phase) + ", " +
             std::to_string(m.pending) + " arrivals pending): mbarrier.inval first");
    done = at[l];
    m.valid = true;
    m.count = count.x[l];
    m.pending = count.x[l];
    m.tx = 0;
    m.phase = 0;
    if (c.check) c.check->initialise(c, *p.cta, p.offset, l);
  }
  return Step::next;
}

Step run_inval(Context& c, const Op& op) {
  const auto& r = record<Barrier>(op);
  uint64_t at[kLanes];
  r.address.lanes(c, at);
  uint64_t done = ~0ull;
  for (unsigned l = 0; l < kLanes; l++) {
    if (!(c.mask >> l & 1) || at[l] == done) continue;
    const SharedPlace p = place(c, at[l], r.address.generic, true);
    Mbarrier& m = valid(c, p);
    if (m.tx != 0) c.fail(name_of(p) + " is invalidated with " + std::to_string(m.tx) + " bytes outstanding");
    m.valid = false;
    done = at[l];
    if (c.check) c.check->invalidate(c, *p.cta, p.offset, l);
  }
  return Step::next;
}

Step run_tx(Context& c, const Op& op) {
  const auto& r = record<Barrier>(op);
  uint64_t at[kLanes];
  r.address.lanes(c, at);
  const V32& bytes = c.warp.v32(r.value);
  for (unsigned l = 0; l < kLanes; l++) {
    if (!(c.mask >> l & 1)) continue;
    const SharedPlace p = place(c, at[l], r.address.generic, r.own);
    Mbarrier& m = valid(c, p);
    change_tx(c, p, m, r.expect ? int64_t{bytes.x[l]} : -int64_t{bytes.x[l]});
    if (!r.expect && c.check) c.check->arrive(c, m, 1u << l, false);
    settle(c, m);
  }
  return Step::next;
}

// Those of `lanes` that name the same mbarrier as lane l.
Mask same(const uint64_t* at, unsigned l, Mask lanes) {
  Mask found = 0;
  for (Mask left = lanes; left != 0; left &= left - 1)
    if (at[__builtin_ctz(left)] == at[l]) found |= left & -left;
  return found;
}

Step run_arrive(Context& c, const Op& op) {
  const auto& r = record<Barrier>(op);
  uint64_t at[kLanes];
  r.address.lanes(c, at);
  const V32* value = r.counted ? &c.warp.v32(r.value) : nullptr;
  uint64_t told = ~0ull, told_phase = 0;   // the checker learns of a warp's arrivals once per barrier and phase
  for (unsigned l = 0; l < kLanes; l++) {
    if (!(c.mask >> l & 1)) continue;
    const SharedPlace p = place(c, at[l], r.address.generic, r.own);
    if (r.returns && p.cta != &c.cta)
      c.fail("mbarrier.arrive on " + name_of(p) + ", which is another CTA's, cannot return a state: '_' is needed");
    Mbarrier& m = valid(c, p);
    if (r.returns) c.warp.v64(r.destination).x[l] = state_of(m);
    const int64_t count = value && !r.expect ? int64_t{value->x[l]} : 1;
    if (r.expect) change_tx(c, p, m, int64_t{value->x[l]});
    if (c.check && (at[l] != told || m.phase != told_phase)) {
      c.check->arrive(c, m, same(at, l, c.mask >> l << l), !r.relaxed);
      told = at[l];
      told_phase = m.phase;
    }
    take_arrivals(c, p, m, count, r.no_complete);
    if (r.drop) {
      if (count > m.count) c.fail(name_of(p) + ": more arrivals are dropped than it expects");
      m.count -= static_cast<uint32_t>(count);
    }
    settle(c, m);
  }
  return Step::next;
}

// True when the phase that lane l names has completed.
bool completed(const Context& c, const Barrier& r, const SharedPlace& p, const Mbarrier& m, uint64_t value) {
  if (r.parity) {
    if (value > 1) c.fail(name_of(p) + ": phaseParity is " + std::to_string(value) + ", accepted are 0 and 1");
    return (m.phase & 1) != value;
  }
  const uint64_t phase = phase_of(value);
  if (phase > m.phase || phase + 1 < m.phase)
    c.fail(name_of(p) + " is asked for phase " + std::to_string(phase) + " when it is in phase " +
           std::to_string(m.phase) + ": a state is good for its own phase and the next");
  return phase < m.phase;
}

// Those of the lanes that need no answer to know that their phase is over.
Mask knowing(Context& c, const Barrier& r, const uint64_t* at, Mask done) {
  Mask known = 0;
  while (done != 0) {
    const unsigned l = static_cast<unsigned>(__builtin_ctz(done));
    const Mask lanes = same(at, l, done);
    known |= c.check->know_phase(c, valid(c, place(c, at[l], r.address.generic, true)), lanes);
    done &= ~lanes;
  }
  return known;
}

// The checker hears of a warp's waits once for each barrier.
void tell(Context& c, const Barrier& r, const uint64_t* at, Mask done) {
  while (done != 0) {
    const unsigned l = static_cast<unsigned>(__builtin_ctz(done));
    const Mask lanes = same(at, l, done);
    c.check->observe(c, valid(c, place(c, at[l], r.address.generic, true)), lanes, !r.relaxed);
    done &= ~lanes;
  }
}

// --- refusals. try_wait may answer false (9.7.13.15.16) as long as its thread cannot know that the phase is over. A
// hostile schedule makes it, so that a kernel that does not look at the answer goes on too early: whenever a warp comes
// to a wait for the first time, and now and then later.

constexpr uint32_t kMostFirst = 64, kMostLater = 2;  // answers in a row

// Whether the wait is a loop that only a true answer leaves: back to itself unless p, or past the jump back if p.
bool loops(const Launch& launch, const Op& wait) {
  const std::vector<Op>& ops = launch.program->ops;
  const std::vector<int>& removed = launch.options.removed;
  const size_t at = static_cast<size_t>(wait.index);
  const auto jumps = [&](size_t i) {
    return i < ops.size() && ops[i].from->parts[0] == "bra" &&
           std::find(removed.begin(), removed.end(), ops[i].index) == removed.end();
  };
  if (wait.guard != 0 || !jumps(at + 1)) return false;
  const Op& next = ops[at + 1];
  if (next.guard != record<Barrier>(wait).destination) return false;
  if (next.guard_negated) return next.target == at;
  return next.target == at + 3 && jumps(at + 2) && ops[at + 2].guard == 0 && ops[at + 2].target == at;
}

Refusals& refusals_of(Context& c, const Op& op) {
  for (Refusals& r : c.warp.refusals)
    if (r.op == &op) return r;
  Refusals r{&op};
  r.met = r.loops = loops(c.launch, op);
  c.warp.refusals.push_back(r);
  return c.warp.refusals.back();
}

// Of all registers, FNV-1a over words.
uint64_t state_of(const Warp& w) {
  const auto* words = reinterpret_cast<const uint64_t*>(w.file.data());
  uint64_t hash[4] = {1, 2, 3, 4}, sum = 0xcbf29ce484222325ull;
  for (size_t i = 0, n = w.file.size() * (sizeof(V32) / sizeof(uint64_t)); i < n; i += 4)
    for (size_t k = 0; k < 4; k++) hash[k] = (hash[k] ^ words[i + k]) * 0x100000001b3ull;
  for (const uint64_t one : hash) sum = (sum ^ one) * 0x100000001b3ull;
  return sum;
}

// Whether to answer false now. `done`: the lanes whose phase is over; `known`: those of them that know it already. A
// warp that has come back with the same registers does look at the answer, and would come back for ever: then it gets
// the true one. A warp that counts its attempts has others, and is refused until it gives up. The usual loop is known
// by its look, and is refused now and then for the sake of the order that follows.
bool refuses(Context& c, const Op& op, Mask done, Mask known) {
  if (c.launch.options.seed == 0) return false;
  Refusals& r = refusals_of(c, op);
  const bool truth = r.enough || known == c.mask || (done != 0 && c.check == nullptr);
  const bool spared = r.count == 0 && r.met && (done != 0 || !chance(c.cluster, 4));
  if (!truth && !spared) {
    const uint64_t state = r.met ? 0 : state_of(c.warp);
    const uint32_t most = r.loops ? 1 : r.met ? kMostLater : kMostFirst;
    r.enough = r.count != 0 && (r.count >= most || (!r.met && state == r.state));
    if (!r.enough) {
      r.count++;
      r.state = state;
      return true;
    }
  }
  r.met |= r.count != 0;
  if (done != 0) r.count = 0, r.enough = false;  // the next wait is another one
  return false;
}

Step run_wait(Context& c, const Op& op) {
  const auto& r = record<Barrier>(op);
  uint64_t at[kLanes];
  r.address.lanes(c, at);
  const V32* parity = r.parity ? &c.warp.v32(r.value) : nullptr;
  const V64* state = r.parity ? nullptr : &c.warp.v64(r.value);
  Mask done = 0;
  uint64_t last = ~0ull, last_value = 0;
  bool last_done = false;
  for (unsigned l = 0; l < kLanes; l++) {
    if (!(c.mask >> l & 1)) continue;
    const uint64_t value = parity ? parity->x[l] : state->x[l];
    if (at[l] != last || value != last_value) {
      const SharedPlace p = place(c, at[l], r.address.generic, true);
      Mbarrier& m = valid(c, p);
      last = at[l];
      last_value = value;
      last_done = completed(c, r, p, m, value);
      if (!last_done)
        c.fragment.why = {"mbarrier at shared %#llx, parity %llu: %llu arrivals and %lld bytes still expected",
                          {p.address(), parity ? value : phase_of(value) & 1, static_cast<uint64_t>(m.pending),
                           static_cast<uint64_t>(m.tx)}};
    }
    if (last_done) done |= 1u << l;
  }
  Fragment& f = c.fragment;
  Mask& result = c.warp.pred(r.destination);
  if (r.blocking && !f.timed_out) {
    const Mask before = result, known = done && c.check ? knowing(c, r, at, done) : 0;
    result = (result & ~c.mask) | known;
    if (refuses(c, op, done, known)) {
      done = known;
    } else if (!done) {
      result = before;
      return Step::blocked;
    }
  }
  if (done && c.check) tell(c, r, at, done);
  // A lane whose phase is over must not be held up by the others: they come back in a fragment of their own.
  f.timed_out = false;
  result = (result & ~c.mask) | done;
  // A test that fails takes time, in which something may complete.
  if (!done && c.launch.options.seed && chance(c.cluster, 4)) drain_one(c.cluster);
  return Step::next;
}

Step run_pending_count(Context& c, const Op& op) {
  const V64& state = c.warp.v64(op.s[0]);
  V32& d = c.warp.v32(op.d[0]);
  for (unsigned l = 0; l < kLanes; l++)
    if (c.mask >> l & 1) d.x[l] = static_cast<uint32_t>(state.x[l] & kMaxCount);
  return Step::next;
}

// {.sem.scope}: both or none. Returns whether it is .relaxed.
bool decode_semantics(Decoder& d, Modifiers& m, const char* strong) {
  const std::string sem = m.take_optional({strong, "relaxed"}, "");
  const std::string scope = m.take_optional({"cta", "cluster"}, "");
  if (sem.empty() != scope.empty()) d.fail("the semantics and the scope of an mbarrier operation come together");
  return sem == "relaxed";
}

// {.shared{::cta}} or, when `remote`, .shared::cluster; neither: generic.
void decode_address(Decoder& d, Modifiers& m, Barrier& r, const Operand& o, bool remote) {
  const bool cluster = remote && m.take("shared::cluster");
  const bool cta = !cluster && (m.take("shared::cta") || m.take("shared"));
  r.own = cta || !remote;
  r.address = address_of(d, o, cluster || cta ? In::shared : In::generic);
}

void decode_wait(Decoder& d, Op& op, Modifiers& m, Barrier& r) {
  r.parity = m.take("parity");
  r.relaxed = decode_semantics(d, m, "acquire");
  d.count(3, r.blocking ? 4 : 3);
  decode_address(d, m, r, d.operand(1), false);
  r.destination = d.destination(d.operand(0), 0);
  r.value = d.source(d.operand(2), r.parity ? 4 : 8);
  if (d.from.operands.size() == 4) d.source(d.operand(3), 4);   // suspendTimeHint
  op.run = run_wait;
}

void decode_arrive(Decoder& d, Op& op, Modifiers& m, Barrier& r) {
  r.expect = m.take("expect_tx");
  r.no_complete = m.take("noComplete");
  if (r.expect && r.no_complete) d.fail(".expect_tx and .noComplete exclude each other");
  r.relaxed = decode_semantics(d, m, "release");
  // The state may be left out altogether; ptxas takes that form, and NVIDIA's own headers use it.
  const size_t first = d.operand(0).kind == Operand::memory ? 0 : 1;
  const bool needs_value = r.expect || r.no_complete;
  d.count(first + (needs_value ? 2 : 1), first + 2);
  if (first && d.operand(0).kind != Operand::sink) {
    r.returns = true;
    r.destination = d.destination(d.operand(0), 8);
  }
  decode_address(d, m, r, d.operand(first), true);
  if (d.from.operands.size() > first + 1) {
    r.counted = true;
    r.value = d.source(d.operand(first + 1), 4);
  }
  op.run = run_arrive;
}

}  // namespace

SharedPlace mbarrier_place(const Context& c, uint64_t address, bool generic) {
  const SharedPlace p = place(c, address, generic, false);
  valid(c, p);
  return p;
}

void mbarrier_complete(const Context& c, SharedPlace p, uint64_t bytes, const AsyncRef& ref) {
  Mbarrier& m = valid(c, p);
  change_tx(c, p, m, -static_cast<int64_t>(bytes));
  if (c.check) c.check->arrive(ref, m);
  settle(c, m);
}

void mbarrier_arrive_async(const Context& c, SharedPlace p, const std::vector<AsyncRef>& refs) {
  Mbarrier& m = valid(c, p);
  if (c.check)
    for (const AsyncRef& ref : refs) c.check->arrive(ref, m);
  take_arrivals(c, p, m, 1, false);
  settle(c, m);
}

void mbarrier_arrive(const Context& issuer, Cta& owner, uint32_t offset, uint32_t count, const AsyncRef& by) {
  const SharedPlace p = mbarrier_place(issuer, offset | owner.rank << kRankShift, false);
  Mbarrier& m = p.cta->mbarrier(p.offset);
  if (issuer.check) issuer.check->arrive(by, m);
  take_arrivals(issuer, p, m, count, false);
  settle(issuer, m);
}

void mbarrier_expect_arrival(const Context& c, SharedPlace p) {
  Mbarrier& m = valid(c, p);
  if (m.pending >= kMaxCount) c.fail(name_of(p) + ": more than 2^20 - 1 pending arrivals");
  m.pending++;
}

void decode_mbarrier(Decoder& d, Op& op) {
  Modifiers m(d.from);
  auto extra = std::make_shared<Barrier>();
  Barrier& r = *extra;
  op.kind = Class::sync;
  op.effect = true;
  const std::string what = d.from.parts.size() > 1 ? d.from.parts[1] : "";
  m.take(what.c_str());
  if (!m.take("b64")) d.fail("the type .b64 is missing");
  if (what == "init" || what == "inval") {
    const bool init = what == "init";
    d.count(init ? 2 : 1, init ? 2 : 1);
    decode_address(d, m, r, d.operand(0), false);
    if (init) r.value = d.source(d.operand(1), 4);
    op.run = init ? run_init : run_inval;
  } else if (what == "expect_tx" || what == "complete_tx") {
    r.relaxed = decode_semantics(d, m, "relaxed");
    r.expect = what == "expect_tx";
    d.count(2, 2);
    decode_address(d, m, r, d.operand(0), true);
    r.value = d.source(d.operand(1), 4);
    op.run = run_tx;
  } else if (what == "arrive" || what == "arrive_drop") {
    r.drop = what == "arrive_drop";
    decode_arrive(d, op, m, r);
  } else if (what == "test_wait" || what == "try_wait") {
    r.blocking = what == "try_wait";
    op.effect = false;
    decode_wait(d, op, m, r);
  } else if (what == "pending_count") {
    d.count(2, 2);
    op.effect = false;
    op.d[0] = d.destination(d.operand(0), 4);
    op.s[0] = d.source(d.operand(1), 8);
    op.run = run_pending_count;
  } else {
    d.fail("unknown mbarrier operation '" + what + "'");
  }
  m.done();
  op.extra = std::move(extra);
}

}  // namespace ptx
