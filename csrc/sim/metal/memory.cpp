// Every access of a checked kernel: bounds, alignment, initialisation, races. Of a counting one: traffic.
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "api.h"
#include "machine.h"
#include "shadow.h"

namespace sim {

std::vector<Slot> slots;

namespace {

struct Region {
  Span span;
  Shadow shadow;
};
std::vector<Region> regions;  // slots that overlap share one
Shadow threadgroup_shadow;
size_t last_slot;
std::vector<uint32_t> group_times;  // clock at which each threadgroup began, to name the other side of a race
uint32_t group_grid[3];

const char* kinds[2][2] = {{"read", "write"}, {"atomic read", "atomic write"}};

std::string group_of(uint32_t time) {
  size_t n = std::upper_bound(group_times.begin(), group_times.end(), time) - group_times.begin() - 1;
  size_t x = group_grid[0], y = group_grid[1];
  return format("threadgroup (%zu, %zu, %zu)", n % x, n / x % y, n / (x * y));
}

// Whether an access by another thread came before everything that the current thread does now.
bool ordered(const Access& a, int fence) {
  if (a.time == 0) return true;
  if (a.time < group_began) return false;  // another threadgroup of the same launch
  if (a.thread == current->thread || a.time < group_fenced[fence]) return true;
  return a.thread / kLanes == current->simdgroup && a.time < simdgroups[current->simdgroup].fenced[fence];
}

std::string race(const Access& other, bool other_writes, bool write, bool atomic, const std::string& where) {
  std::string them = other.time < group_began ? format("thread %u of ", other.thread) + group_of(other.time)
                                              : format("thread %u", other.thread);
  const char* missing =
      other.time < group_began ? "nothing orders threadgroups of one launch" : "no barrier between them";
  return "data race in " + where + ": " + kinds[atomic][write] + " here, " + kinds[other.atomic][other_writes] +
         " by " + them + at(other.site) + ", " + missing;
}

// Two unordered writes of one value leave that value, whoever is first; kernels let all lanes store a common result.
// The new value is only there when the thread asks for something next, which it does before any other thread runs.
struct Doubt {
  uintptr_t p = 0;
  std::string before, message;
  int site = -1;
} doubt;

void check_races(Shadow& shadow, uintptr_t p, size_t offset, size_t size, bool write, bool atomic, int fence, int site,
                 const std::string (*where)(size_t)) {
  size_t count;
  Cell* cell = shadow.cells(offset, size, count);
  Access mine{now, uint16_t(current->thread), atomic, site};
  for (size_t i = 0; i < count; i++, cell++) {
    auto conflict = [&](const Access& a) { return !(atomic && a.atomic) && !ordered(a, fence); };
    if (conflict(cell->write)) {
      std::string message = race(cell->write, true, write, atomic, where(offset));
      if (!write || atomic || cell->write.atomic || options.strict) fail(site, message);
      if (!doubt.p) doubt = {p, std::string(reinterpret_cast<const char*>(p), size), message, site};
    }
    if (!write) {
      bool again = cell->read.time >= group_began && cell->read.thread == mine.thread;
      if (!again && !ordered(cell->read, fence)) {
        // Keep a reader of another simdgroup if there is one: a simdgroup's own barrier does not order it.
        bool near = cell->read_too.thread / kLanes == mine.thread / kLanes;
        if (cell->read_too.time < group_began || near || cell->read_too.thread == mine.thread)
          cell->read_too = cell->read;
      } else if (!again) {
        cell->read_too = Access();
      }
      cell->read = mine;
      continue;
    }
    for (const Access& read : {cell->read, cell->read_too})
      if (conflict(read)) fail(site, race(read, false, write, atomic, where(offset)));
    cell->write = mine;
  }
}

const std::string in_threadgroup(size_t offset) {
  for (auto& v : variables)
    if (offset >= v.offset && offset < v.offset + v.size)
      return format("threadgroup variable %s, byte %zu", v.name.c_str(), offset - v.offset);
  return format("threadgroup memory, byte %zu", offset);
}

// `variable` is the one that the pointer was made from, and -1 where that is not known.
void threadgroup_access(uintptr_t p, size_t size, bool write, bool atomic, int variable, int site) {
  size_t offset = p - reinterpret_cast<uintptr_t>(arena);
  if (variable >= 0) {
    const ThreadgroupVariable& v = variables[variable];
    long inside = long(offset) - long(v.offset);
    if (inside < 0 || inside + size > v.size)
      fail(site, format("%s of %zu bytes outside threadgroup variable %s: byte %ld of %zu", kinds[atomic][write], size,
                        v.name.c_str(), inside, v.size));
  }
  if (offset >= arena_size || size > arena_size - offset)
    fail(site, format("%s of %zu bytes outside threadgroup memory (byte %ld of %zu)", kinds[atomic][write], size,
                      long(offset), arena_size));
  if (!write) {
    size_t count;
    Cell* cell = threadgroup_shadow.cells(offset, size, count);
    for (size_t i = 0; i < count; i++)
      if (cell[i].write.time == 0)
        fail(site, "read of " + in_threadgroup(offset) + ", which no thread of this threadgroup has written");
  }
  check_races(threadgroup_shadow, p, offset, size, write, atomic, 1, site, in_threadgroup);
  (write ? counters.threadgroup_written : counters.threadgroup_read) += size;
}

bool in_image(uintptr_t p) {
  Dl_info info;
  return dladdr(reinterpret_cast<void*>(p), &info) && info.dli_fbase == image_base;
}

Region* region;  // of the access being checked

const std::string in_region(size_t offset) {
  return slot_name(slots[last_slot].index) +
         format(", byte %zu", size_t(region->span.begin + offset - slots[last_slot].begin));
}

// The slot that holds all of [p, p + size), or null for a program-scope constant.
Slot* find_slot(uintptr_t p, size_t size, bool write, bool atomic, int space, int site) {
  auto reaches = [&](const Slot& s) { return p >= s.begin && p < s.end && size <= s.end - p; };
  auto holds = [&](const Slot& s) { return reaches(s) && (s.writable || !write); };
  if (last_slot < slots.size() && holds(slots[last_slot])) return &slots[last_slot];
  for (size_t i = 0; i < slots.size(); i++)
    if (holds(slots[i])) return &slots[last_slot = i];
  if (space == kConstant && in_image(p)) return nullptr;
  for (auto& s : slots)
    if (reaches(s))
      fail(site, format("%s of %zu bytes in ", kinds[atomic][write], size) + slot_name(s.index) +
                     ", which the kernel declares const");
  std::string near = describe_address(p);
  fail(site, format("%s of %zu bytes out of bounds", kinds[atomic][write], size) + (near.empty() ? "" : ": ") + near);
}

void device_access(uintptr_t p, size_t size, bool write, bool atomic, int space, int site) {
  Slot* slot = find_slot(p, size, write, atomic, space, site);
  if (!slot) return;
  (write ? slot->written : slot->read) += size;
  for (auto& r : regions)
    if (p >= r.span.begin && p < r.span.end) region = &r;
  size_t offset = p - region->span.begin;
  check_races(region->shadow, p, offset, size, write, atomic, 0, site, in_region);
  if (char* written = region->span.written) {
    if (write) std::memset(written + offset, 1, size);
    else if (auto* hole = static_cast<char*>(std::memchr(written + offset, 0, size)))
      fail(site, "read of " + in_region(size_t(hole - written)) + ", which nothing has written since it was allocated");
  }
  if (options.counting) cache_access(p, size, write);
}

void check(uintptr_t p, size_t size, bool write, bool atomic, int space, size_t align, int variable, int site) {
  settle();
  if (space == kThreadgroup) threadgroup_access(p, size, write, atomic, variable, site);
  else device_access(p, size, write, atomic, space, site);
  if (p % align) {
    std::string where =
        space == kThreadgroup ? in_threadgroup(p - reinterpret_cast<uintptr_t>(arena)) : describe_address(p);
    fail(site, format("misaligned %s of %zu bytes: %s is not a multiple of %zu", kinds[atomic][write], size,
                      where.c_str(), align));
  }
  if (options.counting) log_access(p, unsigned(size), write, space, site);
}

// Arrays of threads. A byte of `holes` is 1 where an array has no value yet; they lie as the stacks do.
const char* stacks_begin;
size_t stacks_size;
char* holes;
size_t lowest[kMaxThreads];  // the first byte of each stack that has been an array's in this launch

char* holes_of(const void* p, size_t bytes) {
  size_t offset = size_t(static_cast<const char*>(p) - stacks_begin);
  return holes && offset < stacks_size && bytes <= stacks_size - offset ? holes + offset : nullptr;
}

}  // namespace

namespace entry {

void access(const void* p, unsigned info, int site) {
  check(reinterpret_cast<uintptr_t>(p), info & 0xffff, info & kInfoWrite, false, info >> kInfoSpace & 7,
        size_t(1) << (info >> kInfoAlign & 15), int(info >> kInfoVariable) - 1, site);
}

void range(const void* p, size_t bytes, unsigned info, int site) {
  if (bytes)
    check(reinterpret_cast<uintptr_t>(p), bytes, info & kInfoWrite, false, info >> kInfoSpace & 7,
          size_t(1) << (info >> kInfoAlign & 15), int(info >> kInfoVariable) - 1, site);
}

// A constant of the program, which lies in the kernel's image among others.
void within(const void* p, const void* base, size_t bytes, unsigned info, int site) {
  long offset = long(reinterpret_cast<uintptr_t>(p) - reinterpret_cast<uintptr_t>(base));
  size_t size = info & 0xffff;
  if (offset < 0 || offset + size > bytes)
    fail(site, format("read of %zu bytes outside a constant of %zu bytes: byte %ld of it", size, bytes, offset));
}

void array(const void* p, size_t bytes) {
  char* hole = holes_of(p, bytes);
  if (!hole) return;
  std::memset(hole, 1, bytes);
  size_t& low = lowest[current->thread];
  low = std::min(low, size_t(hole - holes));
}

void array_access(const void* p, size_t bytes, int write, int site) {
  char* hole = holes_of(p, bytes);
  if (!hole) return;
  if (write) std::memset(hole, 0, bytes);
  else if (std::memchr(hole, 1, bytes))
    fail(site, "read of an array's element in thread memory that nothing has been written to");
}

// An access to an object of a thread that a pointer into it makes.
void array_within(const void* p, const void* base, size_t object, size_t bytes, int write, int site) {
  size_t offset = size_t(static_cast<const char*>(p) - static_cast<const char*>(base));
  if (offset > object || bytes > object - offset)
    fail(site, format("%s of %zu bytes outside an array of %zu bytes in thread memory: byte %ld of it", kinds[0][write],
                      bytes, object, long(offset)));
  array_access(p, bytes, write, site);
}

// One by a pointer whose object is not known: what is not in a stack can be a constant of the program alone.
void thread_access(const void* p, size_t bytes, int write, int site) {
  auto address = reinterpret_cast<uintptr_t>(p);
  if (!holes_of(p, bytes) && (write || !in_image(address))) {
    std::string near = describe_address(address);
    fail(site, format("%s of %zu bytes by a pointer to thread memory that leads elsewhere", kinds[0][write], bytes) +
                   (near.empty() ? "" : ": ") + near);
  }
  array_access(p, bytes, write, site);
}

// What has no value has none in the copy: structures are copied with their padding.
void array_copy(const void* to, const void* from, size_t bytes) {
  char *target = holes_of(to, bytes), *origin = holes_of(from, bytes);
  if (!target) return;
  if (origin) std::memmove(target, origin, bytes);
  else std::memset(target, 0, bytes);
}

}  // namespace entry

void thread_memory(const char* stacks, size_t bytes) {
  stacks_begin = stacks, stacks_size = bytes;
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  holes = static_cast<char*>(pages);
}

void Shadow::reset(size_t bytes, int granule) {
  bytes_ = bytes;
  granule_ = granule;
  cells_.assign((bytes + granule - 1) / granule, Cell());
}

void Shadow::clear() { std::fill(cells_.begin(), cells_.end(), Cell()); }

Cell* Shadow::cells(size_t offset, size_t size, size_t& count) {
  if (granule_ > 1 && (offset % granule_ || size % granule_)) {
    std::vector<Cell> finer(bytes_ + granule_);
    for (size_t i = 0; i < bytes_; i++) finer[i] = cells_[i / granule_];
    cells_.swap(finer);
    granule_ = 1;
  }
  count = size / granule_;
  return cells_.data() + offset / granule_;
}

void settle() {
  if (!doubt.p) return;
  Doubt d;
  std::swap(d, doubt);
  if (std::memcmp(reinterpret_cast<const void*>(d.p), d.before.data(), d.before.size())) fail(d.site, d.message);
}

std::string slot_name(int index) {
  return index < kListed ? format("buffer(%d)", index) : format("buffer(%d)[%d]", index / kListed - 1, index % kListed);
}

std::string describe_address(uintptr_t p) {
  std::string best;
  uintptr_t nearest = 1 << 24;
  for (auto& s : slots) {
    size_t bytes = s.end - s.begin;
    if (p >= s.begin && p < s.end && nearest) {
      nearest = 0;
      best = format("byte %zu of %s of %zu bytes", size_t(p - s.begin), slot_name(s.index).c_str(), bytes);
    } else if (p >= s.end && p - s.end < nearest) {
      nearest = p - s.end;
      best = format("%zu bytes past the end of %s of %zu bytes", size_t(nearest), slot_name(s.index).c_str(), bytes);
    } else if (p < s.begin && s.begin - p < nearest) {
      nearest = s.begin - p;
      best = format("%zu bytes before %s of %zu bytes", size_t(nearest), slot_name(s.index).c_str(), bytes);
    }
  }
  return best;
}

void memory_begin(const std::vector<Span>& spans) {
  regions.clear();
  group_times.clear();
  last_slot = 0;
  doubt = Doubt();
  if (!options.checked) return;
  for (auto& span : spans) {
    int granule = 4;
    for (auto& s : slots)
      if (s.begin >= span.begin && s.end <= span.end) {
        granule = std::min(granule, s.granule);
        if ((s.begin - span.begin) % granule) granule = 1;
      }
    regions.push_back({span, Shadow()});
    regions.back().shadow.reset(span.end - span.begin + 4, granule);
  }
  threadgroup_shadow.reset(arena_size + 4, 4);
  for (size_t t = 0; t < kMaxThreads; t++) lowest[t] = (t + 1) * kStack;
}

void memory_begin_group() {
  if (!options.checked) return;
  group_times.push_back(now);
  for (int d = 0; d < 3; d++) group_grid[d] = fibers[0].context.grid[kGroupsPerGrid][d];
  threadgroup_shadow.clear();
}

void memory_end() {
  if (options.counting) cache_drain();
  if (options.checked)
    for (size_t t = 0; t < kMaxThreads; t++) std::memset(holes + lowest[t], 0, (t + 1) * kStack - lowest[t]);
  regions.clear();
}

void atomic_access(uintptr_t p, int size, bool write, int space, int site) {
  if (options.checked) {
    check(p, size, write, true, space, size, -1, site);
  } else if (space != kThreadgroup) {
    for (auto& s : slots)
      if (p >= s.begin && p + size <= s.end) return;
    std::string near = describe_address(p);
    fail(site, format("atomic access of %d bytes out of bounds", size) + (near.empty() ? "" : ": ") + near);
  }
}

}  // namespace sim
