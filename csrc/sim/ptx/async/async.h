// What the asynchronous units share: addresses of operands, mbarriers, groups, and operations that outlive their issue.
#pragma once
#include "async/mbarrier.h"
#include "check/check.h"
#include "front/decode.h"

namespace ptx {

// An address operand: op.offset holds only one, and copies name up to three.
struct Address {
  Slot slot = 0;
  unsigned bytes = 0;      // 4: shared; 8: global or generic
  int64_t offset = 0;
  bool generic = false;    // a 64-bit address of no particular space
  void lanes(Context& c, uint64_t out[kLanes]) const { addresses(c, slot, bytes, offset, out); }
};
enum class In : uint8_t { shared, global, generic };
Address address_of(Decoder&, const Operand& memory, In);

// A register or immediate of 32 bits, 16-bit registers included.
inline Slot source32(Decoder& d, const Operand& o) { return d.source(o, 4, true); }

// A place in some CTA's shared memory, bounds and alignment checked.
struct SharedPlace {
  Cta* cta;
  uint32_t offset;
  uint8_t* bytes() const { return cta->shared + offset; }
  uint32_t address() const { return offset | cta->rank << kRankShift; }
};
// `own`: the address has to be in the executing CTA (.shared::cta). `what` names the operand in the error.
SharedPlace shared_place(const Context&, uint64_t address, bool generic, uint64_t bytes, uint32_t align, bool own,
                         const char* what);
// The same for a destination whose CTA is replaced (multicast): the offset is kept.
SharedPlace shared_in(const Context&, SharedPlace, unsigned rank);

// Global memory in both directions, with the check of 9.7.9.25: aligned, and inside one registered range.
uint8_t* global_place(const Context&, uint64_t address, uint64_t bytes, uint32_t align, bool write, const char* what);

// The context of an instruction, kept for what completes after it: the fragment may be gone by then.
struct Issued {
  Fragment fragment;
  Context c;
  explicit Issued(const Context& o)
      : fragment(o.fragment), c{o.launch, o.cluster, o.cta, o.warp, fragment, o.count, o.check, o.op, o.mask} {}
  Issued(const Issued&) = delete;
};
using IssuedRef = std::shared_ptr<const Issued>;

// Operations are tracked by their groups only when somebody can tell: under a seed, or when checking.
inline bool tracking(const Context& c) { return c.check || c.launch.options.seed; }
// A draw from the schedule's generator: true once in `n`.
bool chance(Cluster&, unsigned n);

// --- mbarriers (mbarrier.cpp)
SharedPlace mbarrier_place(const Context&, uint64_t address, bool generic);   // fails unless it is initialised
// complete-tx by an asynchronous operation; `ref` may be null.
void mbarrier_complete(const Context&, SharedPlace, uint64_t bytes, const AsyncRef& ref);
// An arrival by an asynchronous operation, after `refs`.
void mbarrier_arrive_async(const Context&, SharedPlace, const std::vector<AsyncRef>& refs);
void mbarrier_expect_arrival(const Context&, SharedPlace);                    // one more pending arrival

// --- groups (pending.cpp). PTX ISA 9.7.9.25.1.1 "Async-group mechanism".
struct Tracked {
  bool reading = true, incomplete = true;
  AsyncRef ref;                                 // the checker's
  bool signalled = false;                       // an mbarrier tracks it as well (cp.async.mbarrier.arrive)
  std::vector<std::function<void()>> then;      // what waits for the completion
  void done();
};
struct Groups {
  struct Entry {
    Mask lanes;
    std::shared_ptr<Tracked> operation;
  };
  struct Commit {
    Mask lanes;
    std::vector<Entry> entries;
  };
  std::vector<Entry> open;                      // issued and not committed
  std::deque<Commit> committed;                 // oldest first; a lane leaves a group when it has waited for it

  std::shared_ptr<Tracked> add(Mask, const AsyncRef&);
  void commit(Mask);
  // Waits until at most `n` groups of each lane are pending. `reading`: their reads are enough.
  Step wait(Context&, unsigned n, bool reading, const char* what);
};
inline Groups& groups(std::shared_ptr<Groups>& all) {
  if (!all) all = std::make_shared<Groups>();
  return *all;
}

// Shared memory to global memory: `read` takes the source into the buffer, `write` puts it where it goes, some time
// later under a seed. Both belong to the bulk group of `lanes`.
using Buffer = std::vector<uint8_t>;
void submit_store(Context&, Mask lanes, const AsyncRef&, std::function<void(Buffer&)> read,
                  std::function<void(const Buffer&)> write);

// --- element-wise reductions (reduce.cpp), atomic where other clusters may do the same.
enum class Reduce : uint8_t { add, min, max, inc, dec, op_and, op_or, op_xor };
using Reducer = void (*)(uint8_t* to, const uint8_t* from, uint64_t bytes);
Reduce reduce_named(const std::string&);
Reducer reducer(Reduce, Ty);                    // null when there is no such combination
constexpr std::initializer_list<const char*> kReduceNames = {"add", "min", "max", "inc", "dec", "and", "or", "xor"};

// --- the opcodes, by file
void decode_cp_async(Decoder&, Op&);            // cp_async.cpp
void decode_bulk(Decoder&, Op&);                // bulk.cpp: cp.async.bulk, cp.reduce.async.bulk, prefetch
void decode_bulk_group(Decoder&, Op&);          // bulk.cpp: commit_group, wait_group
void decode_tma(Decoder&, Op&);                 // tma.cpp: the .tensor forms
void decode_tensormap(Decoder&, Op&);           // tensormap_ops.cpp: tensormap.replace, tensormap.cp_fenceproxy
void decode_store_async(Decoder&, Op&);         // remote.cpp: st.async, st.bulk
void decode_reduce_async(Decoder&, Op&);        // remote.cpp: red.async

// A unit's own record, made at decoding and read by its handler.
template <class T>
const T& record(const Op& op) {
  return *static_cast<const T*>(op.extra.get());
}

std::string hex(uint64_t);

}  // namespace ptx
