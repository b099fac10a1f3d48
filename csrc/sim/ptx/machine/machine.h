// The state of a launch: lanes, warps and their fragments, CTAs, clusters, and how one instruction sees them.
//
// One OS thread runs a cluster at a time, so nothing inside a cluster is locked. Clusters share global memory only.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "front/ir.h"

namespace ptx {

constexpr unsigned kLanes = 32;
constexpr uint32_t kAll = 0xffffffffu;
constexpr uint32_t kSharedBase = 1024;      // the first 1 KB of shared memory belongs to the system
constexpr uint32_t kRankShift = 24;         // a shared::cluster address is offset | CTA rank << 24
constexpr uint32_t kOffsetMask = (1u << kRankShift) - 1;
constexpr uint64_t kGenericShared = 1ull << 56, kGenericLocal = 1ull << 57;  // windows of generic addresses
constexpr unsigned kTmemLanes = 128, kTmemColumns = 512;

using Mask = uint32_t;
using Slot = uint32_t;                      // offset into a warp's register file, in units of 128 bytes
struct alignas(64) V32 { uint32_t x[kLanes]; };
struct alignas(64) V64 { uint64_t x[kLanes]; };

struct Warp;
struct Cta;
struct Cluster;
struct Launch;
struct Op;
class Checker;
namespace checking {  // check/state.h: what a checked run keeps of a warp, of a CTA, and of a barrier
struct WarpState;
struct CtaState;
struct Meeting;
}  // namespace checking
struct WgmmaState;  // tensor/wgmma.cpp: the operations that its groups cover
struct TensorPair;  // tensor/tcgen05_memory.cpp: the allocations of a pair of CTAs

// Why a fragment cannot go on, for the deadlock report. `format` takes the four values as %llu / %#llx.
struct Wait {
  const char* format = nullptr;
  uint64_t v[4] = {};
};

// Lanes of a warp that are at the same instruction.
struct Fragment {
  uint32_t pc = 0;
  Mask lanes = kAll;
  bool blocked = false;
  Wait why;
  uint64_t state = 0;     // for an instruction that waits in two steps (bar.sync: arrived, generation + 1); 0: not yet
  uint32_t spent = 0;     // instructions in this turn of the warp while it has several fragments
  bool timed_out = false; // mbarrier.try_wait: nothing else could run; answer false instead of blocking
};

// An asynchronous operation that has been issued and not yet completed. Operations with the same nonzero `order`
// complete in the order of issue (the tensor pipe of a CTA pair); others complete in any order.
struct Pending {
  uint64_t order = 0;
  std::function<void()> complete;
};

// What a hostile schedule has made of an mbarrier.try_wait of one warp.
struct Refusals {
  const Op* op = nullptr;
  uint32_t count = 0;     // answers in a row that were false
  uint64_t state = 0;     // of the warp's registers, at the last one
  bool met = false;       // there has been an earlier wait that was refused
  bool enough = false;    // this wait has been refused often enough
  bool loops = false;     // it can be seen to loop until the answer is true
};

struct Groups;  // async/async.h: the bulk groups or the cp.async groups of a warp's threads

struct Warp {
  Cta* cta = nullptr;
  uint32_t id = 0;                          // index in the CTA
  Mask live = kAll;                         // lanes that have not exited
  std::vector<V32> file;                    // register file; 64-bit registers take two slots; 128-bit ones four:
                                            // the low halves of 32 lanes as a V64, then the high halves
  std::vector<Fragment> fragments;
  std::vector<uint8_t> local;               // .local memory, lane-major: lane * local_bytes + offset
  uint64_t issued = 0;                      // instructions
  Mask carry = 0;                           // CC.CF of each lane
  std::shared_ptr<Groups> bulk_groups, async_groups;   // null until the first operation that is tracked
  uint64_t cluster_generation = 0;          // barrier.cluster: the phase this warp arrived in
  std::vector<Refusals> refusals;           // by a hostile schedule
  uint32_t tensor_stores = 0;               // tcgen05.st issued and not yet complete
  uint32_t registers = 0;                   // a lane's, since the last setmaxnreg
  bool registers_changed = false;           // there has been one
  std::shared_ptr<WgmmaState> wgmma;        // null until the first wgmma
  checking::WarpState* checked = nullptr;   // null when nothing is checked

  V32& v32(Slot s) { return file[s]; }
  V64& v64(Slot s) { return *reinterpret_cast<V64*>(&file[s]); }
  Mask& pred(Slot s) { return file[s].x[0]; }  // a predicate keeps its 32 bits in one word
};

// An mbarrier object (PTX ISA 9.7.13.15). The 8 bytes in shared memory are opaque to programs; the state is here.
struct Mbarrier {
  bool valid = false;
  uint32_t count = 0;       // expected arrivals of the next phase
  int64_t pending = 0, tx = 0;
  uint64_t phase = 0;       // completed phases
  checking::Meeting* meeting = nullptr;  // of a checked run
};

struct NamedBarrier {
  uint32_t expected = 0, arrived = 0;
  uint64_t generation = 0;
  uint32_t count_true = 0, total = 0;   // barrier.red: of this phase
  uint32_t last_true = 0, last_total = 0;
  checking::Meeting* meeting = nullptr;  // of a checked run
};

// A tcgen05.dealloc, for the error of who uses its columns after it.
struct TensorFreed {
  const Op* op = nullptr;
  uint32_t warp = 0, first = 0, columns = 0;
};

struct Cta {
  Cluster* cluster = nullptr;
  uint32_t index[3] = {};        // %ctaid
  uint32_t rank = 0;             // %cluster_ctarank
  uint32_t shared_bytes = 0;     // valid offsets are kSharedBase .. shared_bytes
  uint8_t* shared = nullptr;     // 1024-byte aligned; indexed by offset (from 0, so kSharedBase is included)
  std::vector<uint8_t> shared_storage;
  std::vector<uint32_t> tmem;    // [lane * kTmemColumns + column]; empty until the first tcgen05.alloc
  std::vector<int> tmem_owner;   // per column: index of the allocation's first column, -1 free; managed by tcgen05
  std::vector<TensorFreed> tmem_freed;  // per column: the last tcgen05.dealloc that gave it back
  bool tmem_relinquished = false;
  std::shared_ptr<TensorPair> tensor_pair;          // null until the first tcgen05.alloc of a pair
  std::vector<Mbarrier> mbarriers;                  // by offset / 8, grown on demand
  NamedBarrier named[16];
  checking::CtaState* checked = nullptr;            // null when nothing is checked
  std::vector<std::unique_ptr<Warp>> warps;
  Mbarrier& mbarrier(uint32_t offset) {
    if (mbarriers.size() <= offset / 8) mbarriers.resize(offset / 8 + 1);
    return mbarriers[offset / 8];
  }
};

struct Cluster {
  Launch* launch = nullptr;
  uint32_t index = 0;
  std::vector<std::unique_ptr<Cta>> ctas;           // by rank
  std::deque<Pending> pending;                      // async operations not yet completed (only under a seed)
  uint32_t barrier_arrived = 0;                     // barrier.cluster: warps
  uint64_t barrier_generation = 0;
  checking::Meeting* barrier_meeting = nullptr;     // of a checked run
  uint64_t random = 0;                              // state of the schedule's generator
  bool cancelled_all = false;                       // clusterlaunchcontrol found no more work
  uint64_t effects = 0;                             // instructions that others may see; without any it may be spinning
  std::vector<uint64_t> timed_out_at;               // where all fragments were when waits last timed out, and `effects`

  // Hands over an asynchronous operation: completed at once, or later and in adversarial order under a seed.
  void submit(uint64_t order, std::function<void()> complete);
  uint64_t next_random();                           // splitmix64 on `random`
};

// No fragment of a cluster can go on, and no asynchronous operation is left that could change that.
struct Deadlock : Error {
  using Error::Error;
};
// Completes one pending operation, chosen by the seed; false when there is none. The scheduler calls it when no warp of
// the cluster can run, now and then while some can (a warp may be spinning), and until it returns false at the end.
bool drain_one(Cluster&);

// What a run counts. One object per OS thread, added up at the end.
struct Counters {
  std::vector<uint64_t> executed;   // by Op index: warp instructions
  uint64_t global_read = 0, global_written = 0, shared_read = 0, shared_written = 0;     // bytes of ld / st / atom
  uint64_t tma_read = 0, tma_written = 0, tma_transactions = 0;                          // bytes of bulk copies
  uint64_t cp_async = 0;                                                                 // bytes of non-bulk cp.async
  uint64_t tmem_read = 0, tmem_written = 0;
  uint64_t tensor_shared_read = 0;                       // bytes of shared memory that wgmma and tcgen05 read
  uint64_t shared_wavefronts = 0, shared_accesses = 0;   // bank conflicts = wavefronts - the least an access needs
  uint64_t shared_least_wavefronts = 0;
  uint64_t global_sectors = 0;                           // 32-byte sectors touched by ld / st of a warp
  std::map<std::string, uint64_t> flops;                 // by kind: "f16", "tf32", "f8f6f4", "mxf4nvf4", "mma.sync f16"
  std::vector<uint64_t> by_warp;                         // warp index in the CTA: instructions, for roles
  void add(const Counters&);
};

// Everything a handler needs. `mask`: the lanes that execute (fragment and guard).
struct Context {
  Launch& launch;
  Cluster& cluster;
  Cta& cta;
  Warp& warp;
  Fragment& fragment;
  Counters& count;
  Checker* check;       // null when nothing is checked
  const Op* op = nullptr;
  Mask mask = 0;

  unsigned first() const { return static_cast<unsigned>(__builtin_ctz(mask)); }
  [[noreturn]] void fail(const std::string& what) const;   // Error with kernel, PTX line, CTA, warp, lanes
  std::string quote(const Op&) const;                      // PTX line and text of an operation, and its source line
};

enum class Step : uint8_t { next, blocked, jumped, exited };
using Handler = Step (*)(Context&, const Op&);

// Registered memory: every global address must lie in one of these. Sorted, disjoint.
struct Range {
  uint64_t begin, end;
  bool writable = true;
  std::string name;
};

struct Program;  // front/decode.h

struct Options {
  bool check = false;           // races, validity, misuse: one OS thread, slower
  bool poison = true;           // shared and tensor memory start as NaN
  uint64_t seed = 0;            // 0: async operations complete at once; else adversarial order and warp schedule
  unsigned threads = 0;         // 0: as many as there are processors (1 when checking)
  uint64_t limit = 0;           // warp instructions before a launch counts as endless; 0: none
  unsigned processors = 148;    // %nsmid, and how many clusters are resident (spinning between CTAs)
  std::vector<int> removed;     // statements to skip (mutation study): indices into Function::body
  std::vector<std::string> waived;  // findings that a checked run only counts: names of finding_names()
  std::vector<std::string> strict;  // those that it would only count, or not look for, and raises
};

struct Launch {
  const Program* program = nullptr;
  uint32_t grid[3] = {1, 1, 1}, block[3] = {1, 1, 1}, cluster[3] = {1, 1, 1};
  bool explicit_cluster = false;           // %is_explicit_cluster
  uint32_t dynamic_shared = 0;
  std::vector<uint8_t> params;             // 64-byte aligned copy; `param_base` is its address
  uint64_t param_base = 0;
  std::vector<Range> ranges;
  Options options;
  Counters counters;
  std::deque<uint32_t> waiting;            // clusters not yet started (clusterlaunchcontrol takes from here)
  std::mutex waiting_lock;                 // held while `waiting` is looked at or changed
  std::vector<std::string> printed;        // what vprintf wrote, one entry for each lane that called it
  std::mutex result_lock;                  // held while `printed` or `counters` is changed
  std::unique_ptr<Checker> checker;

  // The host pointer behind a global address; fails unless [address, address + bytes) is registered.
  uint8_t* global(const Context&, uint64_t address, uint64_t bytes, bool write) const;
  // Whether all of [begin, end) is in one range and may be used so.
  bool inside_one_range(uint64_t begin, uint64_t end, bool write) const;
  // The next cluster that has not been started; false when none is left.
  bool take_waiting(uint32_t& index);
  void run();                              // to the end, or throws Error
};

// What the register file of a multiprocessor gives each thread of a block that has it to itself.
constexpr uint32_t kRegisterFile = 65536, kMostRegisters = 256;
inline uint32_t registers_at_launch(uint32_t threads) {
  return std::min(kMostRegisters, kRegisterFile / std::max(threads, 1u) / 8 * 8);
}

// The special registers (PTX ISA 10) that do not change while a warp lives. False when the name is not one of them.
bool special_known(const std::string& name);
uint64_t special_value(const std::string& name, const Launch&, const Warp&, unsigned lane);

// Where a generic or shared address leads. The fields are valid for the space that it names.
struct Place {
  enum Space : uint8_t { global, shared, local } space;
  Cta* cta = nullptr;      // shared: whose memory
  uint32_t offset = 0;     // shared: from the start of the CTA's memory; local: from the lane's
  uint64_t address = 0;    // global
};
Place place_generic(const Context&, uint64_t address);
// The CTA and the bytes behind a shared::cta / shared::cluster address; fails when out of bounds or misaligned.
Cta& shared_owner(const Context&, uint32_t address);
uint8_t* shared_bytes(const Context&, uint32_t address, uint32_t bytes, uint32_t align);

}  // namespace ptx
