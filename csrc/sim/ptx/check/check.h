// What a checked run watches: happens-before between warps, asynchronous operations and the tensor pipe (vector
// clocks), the validity of shared and tensor memory, and the proxies that writes went through.
//
// Units call these hooks when `Context::check` is not null, at the moment an operation happens: issue hooks when the
// instruction executes, access hooks when its bytes move (for an asynchronous operation: on completion).
#pragma once
#include <tuple>

#include "machine/machine.h"

namespace ptx {

enum class Space : uint8_t { shared, tensor, global };
enum class Proxy : uint8_t { generic, async, tensormap };  // tensormap: the read of a TMA descriptor (128 bytes)
enum class Reach : uint8_t { cta, cluster, gpu, sys };     // the scope of an atomic, an acquire or a release

// What one asynchronous operation knows and is known by; made when it is issued, shared until it has completed.
struct Async;
using AsyncRef = std::shared_ptr<Async>;

// A pipe of the tensor cores, whose operations complete in order.
struct TensorPipe {
  const Cta* cta = nullptr;         // tcgen05: its CTA, or the first of the pair
  const Warp* warpgroup = nullptr;  // wgmma: the first warp
  bool operator<(const TensorPipe& o) const { return std::tie(cta, warpgroup) < std::tie(o.cta, o.warpgroup); }
};

// The names of what a checked run can find; a launch may waive some.
std::vector<std::string> finding_names();

class Checker {
 public:
  explicit Checker(Launch&);
  ~Checker();

  // Operations whose registers a tcgen05.ld or a wgmma also touches, by Op index: touch() before such a one executes.
  std::vector<uint8_t> watched;
  void touch(const Context&);

  // --- accesses, always before the bytes move (so that a write of the value that is there already can be told apart).
  // Addresses: shared: offset in the owner's memory; global: the address; tensor: lane * 512 + column (4 bytes each).
  // A warp's own loads and stores, `bytes` at each lane in `mask`. Not for tensor memory.
  // `constant`: through the path for data that nobody writes (ld.global.nc).
  void lanes(const Context&, Space, Cta* owner, const uint64_t* address, Mask mask, unsigned bytes, bool write,
             bool constant = false);
  // ldmatrix: the lanes of the warp read together what the addresses of some name.
  void gather(const Context&, Cta& owner, const uint64_t* offset, unsigned rows, unsigned bytes);
  // One range, of one lane or (kWarp) of the warp in a collective operation.
  static constexpr unsigned kWarp = 63;
  void range(const Context&, Space, Cta* owner, uint64_t address, uint64_t bytes, bool write, unsigned lane = kWarp);
  // atom, red, and every ld / st that is not weak (.relaxed, .acquire, .release, .volatile, .mmio), for the lanes in
  // `mask`. `write`: false for loads. `acquire` / `release` as the modifiers say, both false for relaxed.
  void atomic(const Context&, Space, Cta* owner, const uint64_t* address, Mask mask, unsigned bytes, bool acquire,
              bool release, bool write = true, Reach = Reach::gpu);
  // tcgen05.ld / tcgen05.st of this warp: a block of tensor memory.
  void tensor(const Context&, Cta& owner, unsigned lane, unsigned lanes, unsigned column, unsigned columns, bool write);
  // They name a lane that is not among those of this warp; its own quarter's is used.
  void foreign_lanes(const Context&, unsigned lane, unsigned column);
  // An asynchronous operation's.
  // Starts with what the issuing lane knows; kWarp: with what all lanes of the warp know together.
  AsyncRef issue(const Context&, unsigned lane);
  // A wgmma / tcgen05 operation: ordered after earlier operations of the same pipe.
  AsyncRef issue_tensor(const Context&, TensorPipe, unsigned lane = kWarp);
  void access(const AsyncRef&, Space, Cta* owner, uint64_t address, uint64_t bytes, bool write, Proxy = Proxy::async);
  void tensor(const AsyncRef&, Cta& owner, unsigned lane, unsigned lanes, unsigned column, unsigned columns,
              bool write);
  // cp.reduce, red.async: no race among them.
  void reduce(const AsyncRef&, Space, Cta* owner, uint64_t address, uint64_t bytes, Proxy = Proxy::async);

  // --- synchronisation
  void initialise(const Context&, Cta& owner, uint32_t offset, unsigned lane);  // mbarrier.init: 8 bytes become valid
  void invalidate(const Context&, Cta& owner, uint32_t offset, unsigned lane);  // mbarrier.inval
  void arrive(const Context&, Mbarrier&, Mask lanes, bool release = true);      // these threads' arrive; or .relaxed
  void arrive(const AsyncRef&, Mbarrier&);  // complete_tx or an arrival by an asynchronous operation
  void phase(Mbarrier&);                    // the phase has completed
  void observe(const Context&, Mbarrier&, Mask lanes, bool acquire = true);  // their wait saw the phase complete
  // Those of the lanes for which the completed phases of the barrier lie in the past, without a look at it.
  Mask know_phase(const Context&, const Mbarrier&, Mask lanes) const;
  // tcgen05.commit: knows all earlier work of the lane in the pipe; when it completes, arrive(ref, mbarrier).
  AsyncRef commit(const Context&, TensorPipe, unsigned lane);
  void named_arrive(const Context&, NamedBarrier&);
  void named_complete(NamedBarrier&);
  void named_leave(const Context&, NamedBarrier&);
  void cluster_arrive(const Context&, bool release = true);  // false: .relaxed
  void cluster_complete(Cluster&);
  void cluster_leave(const Context&);
  // A wait_group of these lanes covered the operation; `reading`: wait_group.read, only its reads are over.
  void group_done(const Context&, const AsyncRef&, Mask lanes, bool reading = false);
  void proxy_fence(const Context&,
                   const std::string& kind);  // what follows "fence.": "proxy.async", "proxy.async.shared::cta",
                                              // "mbarrier_init.release.cluster", "proxy.tensormap::generic.acquire"
  void fence(const Context&, const std::string& scope);  // fence / membar: "cta", "cluster", "gpu", "sys"
  void tensor_stored(const Context&);                    // tcgen05.wait::st
  void tensor_loaded(const Context&);                    // tcgen05.wait::ld
  void tensor_fence(const Context&, bool before);        // tcgen05.fence::before_/after_thread_sync
  void wgmma_fence(const Context&);
  void change_registers(const Context&);                 // setmaxnreg
  // bar.warp.sync of these lanes. No other .sync operation orders memory (PTX ISA 9.7.13.2; the vote, match, shuffle
  // and reduce functions "do not imply a memory barrier", says the CUDA programming guide).
  void converge(const Context&, Mask lanes);

  // --- life
  void begin(Cta&);
  void end(Cta&);  // leaks, barriers left pending
  void tensor_allocated(const Context&, Cta&, unsigned column, unsigned columns);
  void tensor_freed(const Context&, Cta&, unsigned column, unsigned columns);
  std::vector<std::string> reports() const;  // each once, with how often it was seen
  struct State;

 private:
  void registers_changed(const Cta&);
  void begin_product(const Context&, checking::WarpState&, uint32_t number);  // wgmma
  std::unique_ptr<State> state_;
};

}  // namespace ptx
