// The simulated GPU: threads of one threadgroup, what they wait for, memory, and what is counted.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "fiber.h"

namespace sim {

constexpr int kLanes = 32, kMaxThreads = 1024, kMaxSimdgroups = kMaxThreads / kLanes, kMaxBuffers = 31;
constexpr size_t kStack = 256 * 1024;

// What a kernel's launcher reads its arguments from. include/msl_types.h has the same layout.
struct Context {
  uint64_t buffer[40];
  uint32_t grid[16][4];
};
using Launcher = void (*)(const Context*);

enum GridValue {
  kThreadInGrid, kThreadInGroup, kGroupInGrid, kLaneInSimdgroup, kSimdgroupInGroup, kThreadsPerGroup,
  kThreadsPerGrid, kGroupsPerGrid, kThreadIndexInGroup, kSimdgroupsPerGroup, kThreadsPerSimdgroup,
  kDispatchedThreadsPerGroup, kQuadInGroup, kLaneInQuad
};

// Operations and element types, numbered as in include/msl_types.h.
enum Op {
  kSum, kProduct, kMax, kMin, kAnd, kOr, kXor, kBroadcast, kShuffle, kShuffleDown, kShuffleUp, kShuffleXor,
  kFillDown, kFillUp, kInclusiveSum, kExclusiveSum, kAll, kAny, kBallot, kSimdgroupBarrier, kMatrix,
  kRotateDown, kRotateUp, kBroadcastFirst, kIsFirst, kInclusiveProduct, kExclusiveProduct, kActiveMask,
  kQuadShuffle, kMatrixMemory
};
constexpr int kQuads = 64;  // added to an operation that each quad does for itself
extern const char* const kOpNames[];
std::string op_name(int op);
enum Type { kF32, kF16, kBF16, kI32, kU32, kI16, kU16, kI8, kU8, kI64, kU64, kBool };
constexpr int kTypeSize[] = {4, 2, 2, 4, 4, 2, 2, 1, 1, 8, 8, 1};

enum Space { kThread, kDevice, kConstant, kThreadgroup };
enum Fence { kFenceDevice = 1, kFenceThreadgroup = 2 };  // bits of metal::mem_flags

enum State : uint8_t { kReady, kAtCollective, kAtBarrier, kDone };

// One call of a collective by one lane. Lanes meet if operation, element type and source position agree.
struct Post {
  int op, type, count, site;
  const void* in;
  const void* fill;
  void* out;
  uint32_t arg;
  int types[4];
  void* matrix[4];
};

struct Fiber {
  void* sp;
  Context context;
  State state;
  uint8_t lane;
  uint16_t simdgroup, thread;
  int site;  // of the barrier it waits at
  Post post;
};

struct Simdgroup {
  uint32_t live, waiting, all;  // `all`: the lanes that it began with
  uint32_t fenced[2];  // clock of the last barrier that ordered [device, threadgroup] memory for these lanes
};

struct Options {
  bool checked = false, counting = false, strict = false;
  bool lockstep = false;  // operations of simdgroups order threadgroup memory
  int64_t turns = 0;  // of loops in one threadgroup
  size_t cache = 0;  // bytes of the modelled cache between the GPU and memory
};

// A bound slot, or with an index from kListed on one tensor of a list in slot index / kListed - 1. Addresses are those
// of the guarded copy that the kernel sees.
constexpr int kListed = 1000;
struct Slot {
  int index;
  uintptr_t begin, end;
  int granule;  // bytes of one tensor element
  bool writable;
  uint64_t read = 0, written = 0;
};

// Memory of one or more slots that overlap. `written` has a byte for each of its bytes, 1 where it holds a value; null:
// all of them do.
struct Span {
  uintptr_t begin, end;
  char* written;
};

struct ThreadgroupVariable {
  std::string name;
  size_t offset, size;
};

struct Counters {
  uint64_t switches = 0, collectives = 0, divergent = 0, barriers = 0, simdgroup_barriers = 0, matrix = 0, atomics = 0;
  uint64_t flops = 0, special = 0, integer = 0, conversions = 0, choices = 0, threadgroup_read = 0, threadgroup_written = 0;
  uint64_t memory_read = 0, memory_written = 0;  // past the modelled cache
};

// The state of the one launch that runs (launch.cpp holds a lock). schedule.cpp defines it, but for what names another.
extern Fiber* fibers;
extern Fiber* current;
extern void* main_stack;  // stack pointer of whoever launched, while fibers run (launch.cpp)
extern void* image_base;  // where the kernel's image is loaded: its constants lie there (launch.cpp)
extern Simdgroup simdgroups[kMaxSimdgroups];
extern int threads, simdgroup_count, live_threads, threads_at_barrier;
extern uint32_t group[3];
extern uint32_t now, group_began, group_fenced[2];
extern Options options;
extern Counters counters;
extern std::vector<Slot> slots;  // memory.cpp
extern std::vector<ThreadgroupVariable> variables;
extern char* arena;
extern size_t arena_size;

// Ends the launch with an error of the current thread (or of the threadgroup if none runs). `site` may be -1.
[[noreturn]] void fail(int site, const std::string& message);
// The same, for an error that belongs to another thread than the current one.
[[noreturn]] void fail_as(Fiber* who, int site, const std::string& message);
std::string who(int thread);
std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));
std::string at(int site);  // a mark that Python replaces by line and text

void thread_ended();
void evaluate(int simdgroup, uint32_t mask);

// Memory, in checked and counting launches.
void thread_memory(const char* stacks, size_t bytes);  // once: where the memory of threads lies
void memory_begin(const std::vector<Span>& spans);  // a launch
void memory_begin_group();                          // a threadgroup
void memory_end();
void settle();  // an unordered write that may have been harmless; called by whoever may switch threads
void atomic_access(uintptr_t p, int size, bool write, int space, int site);

// Traffic, in counting launches (traffic.cpp).
void log_reset();  // a launch
void log_access(uintptr_t p, unsigned size, bool write, int space, int site);
void log_flush(int simdgroup);
void cache_access(uintptr_t p, size_t size, bool write);
void cache_drain();

struct SiteStat {
  int site, space, write;
  uint64_t instructions = 0, lanes = 0, bytes = 0, transactions = 0, ideal = 0;
  uint32_t worst = 0;
};
std::vector<SiteStat> site_stats();

std::string slot_name(int index);                 // "buffer(2)", "buffer(2)[0]" for a tensor of a list
std::string describe_address(uintptr_t address);  // "3 bytes past the end of buffer(0) of 256 bytes", or ""

}  // namespace sim
