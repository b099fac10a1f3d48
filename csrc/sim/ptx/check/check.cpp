// The checker's hooks for accesses and for the life of a CTA.
#include "check/check.h"

#include <algorithm>

#include "check/state.h"

namespace ptx {

static size_t finding_named(const char* option, const std::string& name) {
  const std::vector<std::string> names = finding_names();
  const auto at = std::find(names.begin(), names.end(), name);
  if (at != names.end()) return static_cast<size_t>(at - names.begin());
  std::string accepted;
  for (const std::string& one : names) accepted += (accepted.empty() ? "" : ", ") + one;
  throw Error(std::string(option) + ": no finding is called '" + name + "', accepted: " + accepted);
}

Checker::Checker(Launch& launch) : state_(std::make_unique<State>(launch)) {
  if (launch.program->ops.size() > kStatementMask)
    throw Error("kernel " + launch.program->function->name + ": " + std::to_string(launch.program->ops.size()) +
                " statements, a checked run takes " + std::to_string(kStatementMask));
  state_->registers = find_registers(*launch.program);
  for (const std::string& name : launch.options.waived) state_->waived[finding_named("waive", name)] = true;
  for (const std::string& name : launch.options.strict) state_->raised[finding_named("strict", name)] = true;
  for (const Registers::Use& u : state_->registers.uses)
    watched.push_back(!u.loads.empty() || !u.stored.empty() || !u.pending.empty() || !u.unfenced.empty());
}
Checker::~Checker() = default;

uint32_t Checker::State::new_agent(ClusterState& cluster, const CtaState& cta, Agent::Kind kind, uint32_t warp,
                                   uint32_t& local) {
  if (agents.size() > kAgentMask)
    throw Error("kernel " + launch.program->function->name +
                ": more than half a million warps and queues in one checked launch");
  Agent a;
  a.kind = kind;
  a.id = static_cast<uint16_t>(warp);
  a.cluster = cluster.index;
  a.local = local = static_cast<uint32_t>(cluster.agents.size());
  std::copy(cta.index, cta.index + 3, a.cta);
  agents.push_back(a);
  cluster.agents.push_back(static_cast<uint32_t>(agents.size() - 1));
  return cluster.agents.back();
}

void Checker::State::use(Queue& q, WarpState& w, Agent::Kind kind) {
  if (q.agent == 0) q.agent = new_agent(*w.cluster, *w.cta, kind, w.id, q.local);
}

Meeting& Checker::State::meeting(Meeting*& of, ClusterState& cluster) {
  if (of == nullptr) {
    cluster.meetings.emplace_back();
    of = &cluster.meetings.back();
    of->gathering.cluster = of->done.cluster = cluster.index;
  }
  return *of;
}

// --- a warp's own accesses to tensor memory: the lanes of the warp make them together

void Checker::foreign_lanes(const Context& c, unsigned lane, unsigned column) {
  const uint64_t at = lane * kTmemColumns + column;
  state_->report(Finding::foreign_lanes, Space::tensor, actor_of(c), c.cta.checked, 0, at);
}

void Checker::tensor(const Context& c, Cta& owner, unsigned lane, unsigned lanes, unsigned column, unsigned columns,
                     bool write) {
  state_->settle(&c);
  WarpState& w = warp_state(c);
  Queue& q = write ? w.stores : w.loads;
  state_->use(q, w, write ? Agent::store_queue : Agent::load_queue);
  q.clock++;
  if (!write) {
    w.loading[state_->registers.loads[static_cast<size_t>(c.op->index)]] = q.clock;
    w.any_loading = true;
  }
  Clock room;
  Access a{together(w, room), epoch(q.agent, q.clock, c.op->index), actor_of(c), Space::tensor, write, kOrder,
           state_of(&owner)};
  state_->tensor(a, lane, lanes, column, columns);
}

// The warp knows that the operations of its queue up to number `clock` are over.
static void finished(WarpState& w, const Queue& q, uint32_t clock) {
  for (View& v : w.views) {
    uint32_t& seen = v.clock.of(q.local).at[kOrder];
    if (seen >= clock) continue;
    seen = clock;
    v.snapshot.reset();
  }
}

void Checker::tensor_stored(const Context& c) {
  WarpState& w = warp_state(c);
  if (w.stores.agent != 0) finished(w, w.stores, w.stores.clock);
}

void Checker::tensor_loaded(const Context& c) {
  WarpState& w = warp_state(c);
  if (w.loads.agent != 0) finished(w, w.loads, w.loads.clock);
  std::fill(w.loading.begin(), w.loading.end(), 0);
  w.any_loading = false;
}

void Checker::tensor_allocated(const Context&, Cta& owner, unsigned column, unsigned columns) {
  std::vector<uint16_t>& valid = state_of(&owner)->tensor_valid;
  for (size_t group = 0; group * kTmemColumns < valid.size(); group++)
    std::fill_n(valid.begin() + static_cast<long>(group * kTmemColumns + column), columns, 0);
}

void Checker::tensor_freed(const Context& c, Cta& owner, unsigned column, unsigned columns) {
  state_->settle(&c);
  WarpState& w = warp_state(c);
  Clock room;
  Access a{together(w, room), epoch(w.agent, w.now, c.op->index), actor_of(c), Space::tensor, true, kOrder,
           state_of(&owner)};
  state_->tensor(a, 0, kTmemLanes, column, columns);
}

// --- asynchronous operations

// A queue for one more asynchronous operation: one whose last operation is known to be over, of the same instruction if
// there is one, or a new one.
static Queue& next_queue(Checker::State& s, WarpState& w, int statement, unsigned lane) {
  constexpr size_t kFew = 8, kMany = 128;
  Queue* free = nullptr;
  Clock& clock = view_of(w, lane == Checker::kWarp ? 0 : lane).clock;
  for (Queue& q : w.operations)
    if (clock.of(q.local).at[kOrder] >= q.clock && (!free || q.statement == statement)) free = &q;
  if (free && (free->statement == statement || w.operations.size() >= kFew)) return *free;
  if (w.operations.size() >= kMany) return w.operations[w.last_operation++ % kMany];  // hides an earlier operation
  w.operations.emplace_back();
  s.use(w.operations.back(), w, Agent::operation);
  return w.operations.back();
}

static AsyncRef begin_operation(Checker::State& s, const Context& c, Queue& q, bool reads_first, unsigned lane) {
  WarpState& w = warp_state(c);
  auto ref = std::make_shared<Async>();
  ref->cluster = s.clusters.at(&c.cluster);
  ref->known = s.snapshot(w, lane);
  ref->warp = &w;
  ref->actor = actor_of(c);
  ref->agent = q.agent;
  ref->local = q.local;
  ref->reads = ++q.clock;
  if (reads_first) q.clock++;
  ref->writes = q.clock;
  q.statement = c.op->index;
  return ref;
}

AsyncRef Checker::issue(const Context& c, unsigned lane) {
  State& s = *state_;
  s.settle(&c);
  WarpState& w = warp_state(c);
  if (c.op->from->parts[0] == "tcgen05") {  // st: those of a warp are waited for together
    s.use(w.stores, w, Agent::store_queue);
    return begin_operation(s, c, w.stores, false, kWarp);
  }
  return begin_operation(s, c, next_queue(s, w, c.op->index, lane), true, lane);
}

AsyncRef Checker::issue_tensor(const Context& c, TensorPipe pipe, unsigned lane) {
  State& s = *state_;
  s.settle(&c);
  WarpState& w = warp_state(c);
  const bool warpgroup = c.op->from->parts[0] == "wgmma";
  // A tcgen05.commit speaks for what its own thread has issued (PTX ISA 9.7.16.12.1): one queue a lane.
  Queue& q = w.cluster->pipes[{pipe, c.cta.rank << 16 | (warpgroup ? w.id / 4 : w.id << 6 | lane)}];
  s.use(q, w, Agent::pipe);
  AsyncRef ref = begin_operation(s, c, q, false, lane);
  ref->pipe = true;
  if (warpgroup) {
    auto all = std::make_shared<Clock>();
    all->cluster = w.cluster->index;
    for (uint32_t i = w.id / 4 * 4; i < w.id / 4 * 4 + 4 && i < c.cta.warps.size(); i++) {
      WarpState& one = *c.cta.warps[i]->checked;
      all->join(*s.snapshot(one, kWarp));
      begin_product(c, one, q.clock);
    }
    ref->known = all;
  }
  return ref;
}

AsyncRef Checker::commit(const Context& c, TensorPipe pipe, unsigned lane) { return issue_tensor(c, pipe, lane); }

static Access by_operation(const AsyncRef& ref, Space space, Cta* owner, bool write, Proxy proxy) {
  Access a{*ref->known,  epoch(ref->agent, write ? ref->writes : ref->reads, ref->actor.op->index),
           ref->actor,   space,
           write,        kOrder,
           state_of(owner)};
  a.product = ref->pipe;
  if (proxy != Proxy::generic) {
    a.mark |= kAsyncProxy;
    a.proxy = proxy == Proxy::tensormap ? kMapProxy : space == Space::shared ? kSharedProxy : kGlobalProxy;
    // The response of clusterlaunchcontrol is the one case where the ISA's own examples (9.7.13.17) fence a generic
    // read against the next write; pipelines of TMA loads into what ld.shared has read do without, and are taken as
    // right.
    a.after_reads = write && ref->actor.op->from->parts[0] == "clusterlaunchcontrol";
  }
  return a;
}

void Checker::access(const AsyncRef& ref, Space space, Cta* owner, uint64_t address, uint64_t bytes, bool write,
                     Proxy proxy) {
  state_->settle(ref);
  if (space == Space::tensor)
    return tensor(ref, *owner, static_cast<unsigned>(address / kTmemColumns), 1, address % kTmemColumns,
                  static_cast<unsigned>(bytes / 4), write);
  state_->memory(by_operation(ref, space, owner, write, proxy), address, address + bytes);
}

void Checker::reduce(const AsyncRef& ref, Space space, Cta* owner, uint64_t address, uint64_t bytes, Proxy proxy) {
  state_->settle(ref);
  Access a = by_operation(ref, space, owner, true, proxy);
  a.mark |= kStrong;
  a.reads = true;
  state_->memory(a, address, address + bytes);
}

void Checker::tensor(const AsyncRef& ref, Cta& owner, unsigned lane, unsigned lanes, unsigned column, unsigned columns,
                     bool write) {
  Access a = by_operation(ref, Space::tensor, &owner, write, Proxy::generic);
  state_->tensor(a, lane, lanes, column, columns);
}

// --- life

void Checker::begin(Cta& cta) {
  State& s = *state_;
  std::shared_ptr<ClusterState>& cluster = s.clusters[cta.cluster];
  if (!cluster) {
    cluster = std::make_shared<ClusterState>();
    cluster->index = cta.cluster->index;
    cluster->barrier.gathering.cluster = cluster->barrier.done.cluster = cluster->index;
    cta.cluster->barrier_meeting = &cluster->barrier;
  }
  cluster->running++;
  cluster->ctas.emplace_back();
  CtaState& state = cluster->ctas.back();
  state.cta = &cta;
  state.cluster = cluster.get();
  std::copy(cta.index, cta.index + 3, state.index);
  state.written.resize((cta.shared_bytes + 3) / 4);
  state.read.resize(state.written.size());
  state.valid.resize(state.written.size());
  state.barriers.resize(state.written.size() / 2 + 1);
  cta.checked = &state;
  for (auto& warp : cta.warps) {
    cluster->warps.emplace_back();
    WarpState& w = cluster->warps.back();
    w.cluster = cluster.get();
    w.cta = &state;
    w.id = warp->id;
    w.agent = s.new_agent(*cluster, state, Agent::warp, w.id, w.local);
    w.warp = warp.get();
    w.views.resize(1);
    View& v = w.views[0];
    v.clock.cluster = v.fenced.cluster = v.observed.cluster = cluster->index;
    v.own.at[kStarted] = 1;
    v.clock.of(w.local).at[kStarted] = 1;
    if (state.first_agent == 0) state.first_agent = w.local + 1;
    w.loading.resize(s.registers.load_statement.size());
    w.multiplying.resize(s.registers.product_statement.size());
    w.touched.assign(s.registers.product_statement.size(), 1);
    warp->checked = &w;
  }
}

void Checker::end(Cta& cta) {
  State& s = *state_;
  s.settle(nullptr);
  CtaState& state = *cta.checked;
  ClusterState& cluster = *state.cluster;
  Clock known;
  known.cluster = cluster.index;
  for (const auto& warp : cta.warps) {
    for (const View& v : warp->checked->views) {
      known.join(v.clock);
      known.join(v.observed);  // after a relaxed wait its lanes may not use the data, but it has come
    }
  }
  for (bool lingers : {false, true})
    for (const auto& visitor : lingers ? state.lingerers : state.visitors) {
      const Agent& who = s.agents[visitor.first];
      if (known.knows(who, visitor.second)) continue;
      Actor actor{&s.launch.program->ops[statement_of(visitor.second)], {who.cta[0], who.cta[1], who.cta[2]}, who.id};
      s.report(lingers ? Finding::lingering : Finding::in_flight, Space::shared, actor, &state, 0, 0);
    }
  registers_changed(cta);
  state.ended = true;
  for (std::vector<Epoch>* v : {&state.written, &state.read, &state.tensor_written, &state.tensor_read})
    std::vector<Epoch>().swap(*v);
  if (--cluster.running == 0) s.clusters.erase(cta.cluster);  // operations still under way hold on to it
}

}  // namespace ptx
