// What the checker keeps: shadows of the memories, clocks of whoever acts, and the reports.
#pragma once
#include <array>
#include <map>

#include "check/clock.h"
#include "front/decode.h"

namespace ptx {
namespace checking {

struct ClusterState;
struct CtaState;

// Who does something, as a report names it.
struct Actor {
  const Op* op = nullptr;
  uint32_t cta[3] = {};
  uint32_t warp = 0;
};

// The operations of an agent other than a warp: the last one has number `clock`.
struct Queue {
  uint32_t agent = 0, local = 0, clock = 0;  // agent 0: not used so far
  int statement = -1;                        // of the last operation
};

// Lanes of a warp that know the same of everyone else. A warp begins as one view; where some of its lanes learn what
// the others do not, it has several, until bar.warp.sync or a barrier makes it one again.
struct View {
  Mask lanes = kAll;
  Clock clock;
  Clock fenced, observed;  // what a relaxed release gives, and what a fence will make of relaxed acquires
  Seen own;                // of kOrder nothing: each lane knows what it has done itself, narrowed by its own fences
  std::shared_ptr<const Clock> snapshot;  // of `clock` and one lane's own; empty once that has changed
  unsigned snapshot_lane = 0;
  uint32_t snapshot_now = 0;
};

struct WarpState {
  ClusterState* cluster = nullptr;
  CtaState* cta = nullptr;
  const Warp* warp = nullptr;
  uint32_t id = 0, agent = 0, local = 0;
  uint32_t now = 1;               // the clock of all its lanes
  std::vector<View> views;
  Queue loads, stores;            // tcgen05.ld, tcgen05.st
  std::vector<Queue> operations;  // asynchronous operations: one queue may be used again once its last is known
  size_t last_operation = 0;
  std::vector<uint32_t> loading;  // by Registers::loads: number of the load in `loads` whose registers nobody has used
  std::vector<uint32_t> multiplying;  // by Registers::products: number in the pipe of a wgmma not yet waited for
  std::vector<uint8_t> touched;       // by Registers::products: its registers were used since the last wgmma.fence
  bool any_loading = false, any_multiplying = false;
  struct Change {
    const Op* op;
    uint32_t clock;
  };
  std::vector<Change> register_changes;  // the setmaxnreg executed
};

// A barrier: what arrivals bring, and what its completed phases hand on.
struct Meeting {
  Clock gathering, done;
  Epoch created = 0;  // mbarrier.init
  CtaState* owner = nullptr;
  uint32_t offset = 0;
};

struct CtaState {
  Cta* cta = nullptr;
  ClusterState* cluster = nullptr;
  uint32_t index[3] = {};
  std::vector<Epoch> written, read;                // shared memory, by 4 bytes
  std::vector<uint8_t> valid;                      // one bit per byte
  std::vector<uint8_t> barriers;                   // by 8 bytes: a live mbarrier, and where the first and last are
  uint64_t barriers_begin = ~0ull, barriers_end = 0;
  uint32_t first_agent = 0;                        // local numbers of its warps, one after the other
  std::vector<Epoch> tensor_written, tensor_read;  // by 16 lanes and a column: [lane / 16 * 512 + column]
  std::vector<uint16_t> tensor_valid;              // one bit per lane
  // Agents that are no warps of this CTA: their last use of its memory. Apart those that hardware is seen to wait for.
  std::unordered_map<uint32_t, Epoch> visitors, lingerers;
  Epoch last_visit = 0;
  bool ended = false;
};

struct ClusterState {
  uint32_t index = 0;
  std::vector<uint32_t> agents;  // by local number
  std::deque<WarpState> warps;
  std::deque<CtaState> ctas;
  std::deque<Meeting> meetings;
  std::map<std::pair<TensorPipe, uint32_t>, Queue> pipes;
  Meeting barrier;       // barrier.cluster
  unsigned running = 0;  // CTAs that have not ended
};

// A use of memory that is about to happen.
struct Access {
  const Clock& known;
  mutable Epoch mark;  // of the piece that is being looked at
  Actor actor;
  Space space;
  bool write;
  Knowledge proxy = kOrder;  // what has to be known of a generic write
  CtaState* owner = nullptr;
  bool product = false;      // by the tensor cores
  bool reads = false;        // a write that reads, too: atom, red
  bool after_reads = false;  // generic reads before it need the proxy fence as well
  uint32_t each = 0;         // lanes side by side: so many pieces belong to one of them, then the next; 0: one mark
  mutable uint32_t left = 0;  // of them, to be looked at
  bool constant = false;     // ld.global.nc
  uint32_t unused = 0;       // bytes of what each lane loads that go to registers without a use, of `bytes`
  unsigned bytes = 1;
  uint32_t agent() const { return agent_of(mark); }
  bool strong() const { return mark & kStrong; }
};

// How operations share registers with tcgen05.ld and wgmma: found once per launch.
struct Registers {
  std::vector<uint16_t> loads, products;  // ordinals of tcgen05.ld / wgmma.mma_async, by statement
  struct Use {
    std::vector<uint16_t> loads, stored;      // computes with what these load; hands it to memory
    std::vector<uint16_t> pending, unfenced;  // wgmmas that must be over before it, and that need a fence after
  };
  std::vector<Use> uses;               // by statement
  std::vector<uint32_t> unused;        // by statement: bytes of a load that nothing depends on
  std::vector<int> product_statement, load_statement;  // by ordinal
  bool tensor_fences = false;  // the kernel has tcgen05.fence::after_thread_sync
};
Registers find_registers(const Program&);

enum class Finding : uint8_t {
  read_after_write,
  write_after_read,
  write_after_write,
  proxy_fence,
  map_fence,
  uninitialised,
  exited,
  in_flight,
  barrier_init,
  barrier_visible,
  registers_unfenced,
  registers_pending,
  barrier_overwritten,
  not_started,
  not_constant,
  setmaxnreg,
  setmaxnreg_unordered,
  barrier_read,
  foreign_lanes,
  same_value,
  operand_uninitialised,
  tensor_fence,
  lingering,         // the quieter class
  registers_loading  // not looked for unless a launch asks
};
constexpr size_t kFindings = static_cast<size_t>(Finding::registers_loading) + 1;

struct Page {
  std::array<Epoch, 1024> written{}, read{};
};
struct Split {  // four bytes that differ in who used them
  Epoch written[4], read[4];
};

}  // namespace checking

using namespace checking;  // this header is for the checker's own files

struct Async {
  std::shared_ptr<ClusterState> cluster;
  std::shared_ptr<const Clock> known;  // by whoever issued it, then
  WarpState* warp = nullptr;
  Actor actor;
  uint32_t agent = 0, local = 0;
  uint32_t reads = 0, writes = 0;  // their numbers in its queue
  bool pipe = false;               // wgmma or tcgen05
};

struct Checker::State {
  Launch& launch;
  Registers registers;
  std::vector<Agent> agents{1};  // 0: nobody
  std::unordered_map<const Cluster*, std::shared_ptr<ClusterState>> clusters;
  std::unordered_map<uint64_t, std::unique_ptr<Page>> pages;
  struct Cached {
    uint64_t number = ~0ull;
    Page* page = nullptr;
  };
  std::array<Cached, 64> cached;
  std::vector<Split> splits;
  std::vector<uint32_t> free_splits;
  std::vector<Epoch> sets;  // sets of readers: [size, epochs...]; a tagged epoch is an index into it
  size_t sets_limit = 1u << 22;
  struct Flag {
    std::map<uint32_t, std::shared_ptr<const Vector>> released;
  };
  std::unordered_map<uint64_t, Flag> flags;  // global addresses that were released

  struct Report {
    std::string text;
    uint64_t count = 0;
    bool quiet = false;
  };
  using Key = std::array<int, 4>;  // finding, space, this statement, the other
  std::map<Key, Report> reports;
  std::array<bool, kFindings> waived{}, raised{};
  bool raises(Finding f) const { return raised[static_cast<size_t>(f)]; }
  bool quiet(Finding f) const { return f >= Finding::same_value && !raises(f); }
  // A race of a plain store: in the quieter class if the bytes turn out not to have changed.
  struct Doubt {
    Key key;
    std::string text;
  };
  struct Store {
    Space space;
    CtaState* owner;
    uint64_t begin;
    Epoch mark;
    std::vector<uint8_t> was;
  };
  std::vector<Doubt> doubts;
  std::vector<Store> doubtful;       // what the instruction that they come from writes
  const Warp* doubt_warp = nullptr;  // the instruction they come from
  const Op* doubt_op = nullptr;
  uint64_t doubt_operation = 0;      // or the asynchronous operation: its agent and its number there

  explicit State(Launch& l) : launch(l) { splits.reserve(64); }

  // check.cpp
  uint32_t new_agent(ClusterState&, const CtaState&, Agent::Kind, uint32_t warp, uint32_t& local);
  void use(Queue&, WarpState&, Agent::Kind);
  Access by_lanes(const Context&, const View&, Space, Cta* owner, bool write, unsigned lanes);
  // lanes.cpp
  uint32_t slot(WarpState&, unsigned lane);
  void give(WarpState&, Mask lanes, const Seen&, Clock& into);
  void give_own(WarpState&, Mask lanes, Clock& into);
  void release(WarpState&, Mask lanes, Clock& into);
  void unite(WarpState&, Mask lanes);
  std::shared_ptr<const Clock> snapshot(WarpState&, unsigned lane);
  Meeting& meeting(Meeting*& of, ClusterState&);  // made when it is asked for first
  // shadow.cpp
  void memory(const Access&, uint64_t begin, uint64_t end);
  void tensor(const Access&, unsigned lane, unsigned lanes, unsigned column, unsigned columns);
  void visit(CtaState& owner, Epoch mark, bool lingers);
  bool started(const Clock& known, const CtaState&) const;
  void barriers(const Access&, uint64_t begin, uint64_t end);
  bool before(const Access&, Epoch earlier, bool earlier_wrote, uint64_t at);
  void sweep(const Access&, Epoch* written, Epoch* read, size_t n, uint64_t at, uint64_t step);
  void bytes(const Access&, Epoch* written, Epoch* read, uint64_t at, unsigned mask);
  void validity(const Access&, uint64_t begin, uint64_t end);
  Epoch with_reader(const Access&, Epoch readers);
  void compact();
  Page& page(uint64_t number);
  // report.cpp
  void report(Finding, const Access&, Epoch earlier, uint64_t at);
  void report(Finding, Space, const Actor&, const CtaState* owner, Epoch earlier, uint64_t at,
              const std::string& more = "");
  void count(const Key&, const std::string& text, bool quiet);
  void keep(const Access&, uint64_t begin, uint64_t end);
  void settle(const Context*);  // decides the doubts once their instruction is over
  void settle(const AsyncRef&);  // the same, before an access by an operation
  std::string describe(const Actor&) const;
  std::string describe(Epoch) const;
  std::string describe_lanes(const Access&, Epoch earlier) const;
};

// What the lanes of a warp do to each other (lanes.cpp).
Mask live_lanes(const WarpState&);
View& view_of(WarpState&, unsigned lane);
// Calls f(view) for the views that hold any of `lanes`; parts them first, so that f may change what only these know.
template <class F>
void apart(WarpState& w, Mask lanes, F f) {
  for (size_t i = 0, n = w.views.size(); i < n; i++) {
    const Mask here = w.views[i].lanes & lanes;
    if ((here & live_lanes(w)) == 0) continue;
    if ((w.views[i].lanes & live_lanes(w) & ~here) != 0) {
      w.views.push_back(w.views[i]);
      w.views.back().lanes = w.views[i].lanes & ~here;
      w.views[i].lanes = here;
    }
    f(w.views[i]);
    w.views[i].snapshot.reset();
  }
}
// What the lanes of a warp know taken together, for what they do as one.
const Clock& together(const WarpState&, Clock& room);

inline WarpState& warp_state(const Context& c) { return *c.warp.checked; }
inline CtaState* state_of(const Cta* owner) { return owner ? owner->checked : nullptr; }
inline Actor actor_of(const Context& c) { return {c.op, {c.cta.index[0], c.cta.index[1], c.cta.index[2]}, c.warp.id}; }

}  // namespace ptx
