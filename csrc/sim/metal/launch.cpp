#include "launch.h"

#include <signal.h>
#include <sys/mman.h>
#if defined(__APPLE__)
#include <sys/ucontext.h>
#else
#include <ucontext.h>
#endif
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "api.h"

namespace sim {

void* main_stack;
void* image_base;

namespace {

constexpr size_t kPage = 65536;  // a multiple of every page size here, 16 KB on macOS included
constexpr size_t kGuard = 1 << 20;
constexpr unsigned char kPoison = 0xff;  // NaN in every floating format

Launcher launcher;
std::string error;
bool memory_fault;
char* stacks;
char* arena_pages;
char* fault_stack;
volatile sig_atomic_t running;
uintptr_t fault_address;
int fault_signal;

std::string everywhere() { return format(" [threadgroup (%u, %u, %u)", group[0], group[1], group[2]); }

[[noreturn]] void leave() {
  void* nowhere;
  running = 0;
  attnkit_metal_switch(&nowhere, main_stack);
  __builtin_unreachable();
}

// Memory whose end touches inaccessible pages; what lies before its beginning is poisoned and looked at afterwards.
class Guarded {
 public:
  Guarded(size_t bytes, size_t residue) {
    size_t aligned = (bytes + residue + 15) / 16 * 16;
    pages_ = (aligned + kPage - 1) / kPage * kPage;
    if (!aligned) pages_ = kPage;
    const int flags = MAP_PRIVATE | MAP_ANON | MAP_NORESERVE;
    base_ = static_cast<char*>(mmap(nullptr, pages_ + 2 * kGuard, PROT_NONE, flags, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_ + kGuard, pages_, PROT_READ | PROT_WRITE)) throw std::bad_alloc();
    data_ = base_ + kGuard + pages_ - aligned + residue;
    bytes_ = bytes;
    size_t slack = std::min<size_t>(data_ - (base_ + kGuard), kCanary);
    std::memset(data_ - slack, kPoison, slack);
    std::memset(data_ + bytes, kPoison, end() - (data_ + bytes));
  }
  Guarded(Guarded&& other) noexcept { *this = std::move(other); }
  Guarded& operator=(Guarded&& other) noexcept {
    std::swap(base_, other.base_), std::swap(data_, other.data_);
    pages_ = other.pages_, bytes_ = other.bytes_;
    return *this;
  }
  ~Guarded() {
    if (base_) munmap(base_, pages_ + 2 * kGuard);
  }
  char* data() const { return data_; }
  // From now on a write faults.
  void protect() { mprotect(base_ + kGuard, pages_, PROT_READ); }
  // A byte outside the data that was written to, or null.
  const char* damage() const {
    for (const char* p = data_ + bytes_; p < end(); p++)
      if (static_cast<unsigned char>(*p) != kPoison) return p;
    const char* first = std::max<const char*>(base_ + kGuard, data_ - kCanary);
    for (const char* p = data_; p-- > first;)
      if (static_cast<unsigned char>(*p) != kPoison) return p;
    return nullptr;
  }

 private:
  static constexpr ptrdiff_t kCanary = 4096;
  char* end() const { return base_ + kGuard + pages_; }
  char* base_ = nullptr;
  char* data_ = nullptr;
  size_t pages_ = 0, bytes_ = 0;
};

// ---- signals: the handler only redirects the fiber, so that everything else happens outside of it.

void after_signal() {
  std::string where = describe_address(fault_address);
  if (fault_signal == SIGSEGV || fault_signal == SIGBUS) {
    memory_fault = true;
    bool overflow = current && fault_address - reinterpret_cast<uintptr_t>(stacks) < size_t(kMaxThreads) * kStack;
    error = overflow ? "thread memory overflow (a large array, or recursion)"
                     : "invalid memory access" + (where.empty() ? "" : ": " + where);
  } else {
    memory_fault = true;
    error = "the kernel stopped at a check of an array index";
  }
  error += current ? who(current->thread) : everywhere() + "]";
  leave();
}

void on_signal(int signal, siginfo_t* info, void* context) {
  if (!running) {
    ::signal(signal, SIG_DFL);
    return;  // the instruction faults again, now for the default handler
  }
  fault_signal = signal;
  fault_address = reinterpret_cast<uintptr_t>(info->si_addr);
  auto sp = reinterpret_cast<uintptr_t>(fault_stack + kStack - 64);
  auto pc = reinterpret_cast<uintptr_t>(after_signal);
  auto* machine = &static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__APPLE__) && defined(__x86_64__)
  (*machine)->__ss.__rsp = sp - 8, (*machine)->__ss.__rip = pc;
#elif defined(__APPLE__)
  (*machine)->__ss.__sp = sp, (*machine)->__ss.__pc = pc;
#elif defined(__x86_64__)
  machine->gregs[REG_RSP] = sp - 8, machine->gregs[REG_RIP] = pc;
#else
  machine->sp = sp, machine->pc = pc;
#endif
}

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP};
constexpr int kSignalCount = sizeof kSignals / sizeof *kSignals;

class SignalScope {
 public:
  SignalScope() {
    static char* stack = new char[kStack];
    stack_t mine{};
    mine.ss_sp = stack, mine.ss_size = kStack;
    sigaltstack(&mine, &old_stack_);
    struct sigaction action {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < kSignalCount; i++) sigaction(kSignals[i], &action, &old_[i]);
  }
  ~SignalScope() {
    for (int i = 0; i < kSignalCount; i++) sigaction(kSignals[i], &old_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  struct sigaction old_[kSignalCount];
  stack_t old_stack_;
};

// ---- threads

void fiber_main() {
  launcher(&current->context);
  thread_ended();
  fail(-1, "a finished thread was resumed");
}

void set_up_memory() {
  if (stacks) return;
  size_t total = size_t(kMaxThreads) * kStack;
  int flags = MAP_PRIVATE | MAP_ANON | MAP_NORESERVE;
  stacks = static_cast<char*>(mmap(nullptr, total, PROT_READ | PROT_WRITE, flags, -1, 0));
  arena_pages = static_cast<char*>(mmap(nullptr, 3 * kPage, PROT_NONE, flags, -1, 0));
  if (stacks == MAP_FAILED || arena_pages == MAP_FAILED) throw std::bad_alloc();
  for (int i = 0; i < kMaxThreads; i++) mprotect(stacks + size_t(i) * kStack, 16384, PROT_NONE);
  mprotect(arena_pages + kPage, kPage, PROT_READ | PROT_WRITE);
  fault_stack = new char[kStack];
  fibers = new Fiber[kMaxThreads]();
  thread_memory(stacks, size_t(kMaxThreads) * kStack);
}

void begin_thread(int t, const uint32_t* size, const Launch& l) {
  Fiber& f = fibers[t];
  f.state = kReady, f.site = -1;
  f.thread = uint16_t(t), f.simdgroup = uint16_t(t / kLanes), f.lane = uint8_t(t % kLanes);
  uint32_t at[3] = {t % size[0], t / size[0] % size[1], t / (size[0] * size[1])};
  auto* g = f.context.grid;
  for (int d = 0; d < 3; d++) {
    g[kThreadInGrid][d] = group[d] * l.group[d] + at[d];
    g[kThreadInGroup][d] = at[d];
    g[kGroupInGrid][d] = group[d];
    g[kThreadsPerGroup][d] = size[d];
    g[kDispatchedThreadsPerGroup][d] = l.group[d];
    g[kThreadsPerGrid][d] = l.grid[d];
    g[kGroupsPerGrid][d] = (l.grid[d] + l.group[d] - 1) / l.group[d];
  }
  g[kLaneInSimdgroup][0] = t % kLanes, g[kSimdgroupInGroup][0] = t / kLanes, g[kThreadIndexInGroup][0] = t;
  g[kSimdgroupsPerGroup][0] = simdgroup_count, g[kThreadsPerSimdgroup][0] = kLanes;
  g[kQuadInGroup][0] = t / 4, g[kLaneInQuad][0] = t % 4;
  // Tops of stacks at different cache sets, or 1024 fibers would evict each other.
  f.sp = fiber_start(stacks + size_t(t + 1) * kStack - 64 - t * 7 % 16 * 256, fiber_main);
}

void explain_stuck() {
  int waiting = -1, returned = -1, lanes = -1;
  for (int t = threads; t-- > 0;) {
    if (fibers[t].state == kAtBarrier) waiting = t;
    if (fibers[t].state == kDone) returned = t;
    if (fibers[t].state == kAtCollective) lanes = t;
  }
  if (waiting >= 0 && returned >= 0)
    error = format("threadgroup_barrier is reached by %d of %d threads: thread %d returned without it",
                   threads_at_barrier, threads, returned);
  else
    error = "deadlock";
  int shown = waiting >= 0 ? waiting : lanes;
  error += at(shown == lanes ? fibers[shown].post.site : fibers[shown].site) + who(shown);
}

bool run_group(const Launch& l) {
  uint32_t size[3];
  for (int d = 0; d < 3; d++) size[d] = std::min(l.group[d], l.grid[d] - group[d] * l.group[d]);
  threads = live_threads = int(size[0] * size[1] * size[2]);
  simdgroup_count = (threads + kLanes - 1) / kLanes;
  threads_at_barrier = 0;
  group_began = group_fenced[0] = group_fenced[1] = ++now;
  std::memset(arena, kPoison, arena_size);
  for (int s = 0; s < simdgroup_count; s++) {
    int lanes = std::min(kLanes, threads - s * kLanes);
    uint32_t all = lanes == kLanes ? ~0u : (1u << lanes) - 1;
    simdgroups[s] = {all, 0, all, {now, now}};
  }
  for (int t = 0; t < threads; t++) begin_thread(t, size, l);
  memory_begin_group();
  *l.turns = options.turns;
  current = fibers;
  counters.switches++;
  running = 1;
  attnkit_metal_switch(&main_stack, fibers[0].sp);
  running = 0;
  if (!error.empty()) return false;
  if (live_threads) explain_stuck();
  if (options.counting)
    for (int s = 0; s < simdgroup_count; s++) log_flush(s);
  return error.empty();
}

bool run_all(const Launch& l) {
  uint32_t groups[3];
  for (int d = 0; d < 3; d++) groups[d] = (l.grid[d] + l.group[d] - 1) / l.group[d];
  for (group[2] = 0; group[2] < groups[2]; group[2]++)
    for (group[1] = 0; group[1] < groups[1]; group[1]++)
      for (group[0] = 0; group[0] < groups[0]; group[0]++)
        if (!run_group(l)) return false;
  return true;
}

std::mutex one_launch;

}  // namespace

std::string format(const char* text, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, text);
  vsnprintf(buffer, sizeof buffer, text, arguments);
  va_end(arguments);
  return buffer;
}

std::string at(int site) { return site < 0 ? "" : format(" {site %d}", site); }

std::string who(int t) {
  return everywhere() + format(", thread %d = simdgroup %d lane %d]", t, t / kLanes, t % kLanes);
}

void fail_as(Fiber* f, int site, const std::string& message) {
  error = message + at(site) + who(f->thread);
  leave();
}

void fail(int site, const std::string& message) { fail_as(current, site, message); }

Outcome launch(Launch& l) {
  std::lock_guard<std::mutex> lock(one_launch);
  set_up_memory();
  options = l.options;
  launcher = l.run;
  image_base = l.image;
  variables = l.variables;
  arena_size = (l.threadgroup_bytes + 15) / 16 * 16;
  arena = arena_pages + 2 * kPage - arena_size;
  error.clear();
  memory_fault = false;
  now = 0;
  counters = Counters();
  log_reset();
  slots.clear();
  std::vector<Guarded> copies;
  std::vector<Span> spans;
  std::vector<std::vector<char>> written;  // is kept like the data: a launch that fails changes nothing
  for (auto& r : l.regions) {
    copies.emplace_back(r.bytes, r.residue);
    char* data = copies.back().data();
    std::memcpy(data, r.host, r.bytes);
    written.emplace_back(r.written, r.written + (r.written ? r.bytes : 0));
    auto base = reinterpret_cast<uintptr_t>(data);
    spans.push_back({base, base + r.bytes, r.written ? written.back().data() : nullptr});
    for (auto& s : r.slots) {
      auto begin = reinterpret_cast<uintptr_t>(data) + s.offset;
      slots.push_back({s.index, begin, begin + s.bytes, s.granule, s.writable});
    }
  }
  for (size_t i = 0; i < copies.size(); i++)
    for (auto& [offset, index] : l.regions[i].pointers)
      for (auto& s : slots)
        if (s.index == index) std::memcpy(copies[i].data() + offset, &s.begin, sizeof s.begin);
  for (size_t i = 0; i < copies.size(); i++)
    if (!l.regions[i].writable) copies[i].protect();
  for (int t = 0; t < kMaxThreads; t++) std::memset(fibers[t].context.buffer, 0, sizeof fibers[t].context.buffer);
  for (int t = 0; t < kMaxThreads; t++)
    for (auto& s : slots)
      if (s.index < kListed) fibers[t].context.buffer[s.index] = s.begin;
  memory_begin(spans);
  {
    SignalScope signals;
    run_all(l);
    running = 0;
  }
  current = nullptr;
  memory_end();
  for (size_t i = 0; error.empty() && i < copies.size(); i++)
    if (const char* p = copies[i].damage()) {
      memory_fault = true;
      error = "a write out of bounds: " + describe_address(reinterpret_cast<uintptr_t>(p));
    }
  if (error.empty())
    for (size_t i = 0; i < copies.size(); i++) {
      const HostRegion& r = l.regions[i];
      if (!r.writable) continue;
      std::memcpy(r.host, copies[i].data(), r.bytes);
      if (!r.written) continue;
      if (options.checked) std::memcpy(r.written, written[i].data(), r.bytes);
      else std::memset(r.written, 1, r.bytes);  // nobody looked what the kernel wrote
    }
  return {error.empty(), memory_fault, error};
}

}  // namespace sim
