// Who runs next. A fiber runs until it waits; a simdgroup is drained before the next one starts, which is as far from
// lockstep as Metal allows and so shows a missing barrier. The order is always the same.
#include <cstring>

#include "api.h"
#include "machine.h"

namespace sim {

Fiber* fibers;
Fiber* current;
Simdgroup simdgroups[kMaxSimdgroups];
int threads, simdgroup_count, live_threads, threads_at_barrier;
uint32_t group[3];
uint32_t now, group_began, group_fenced[2];
Options options;
Counters counters;
std::vector<ThreadgroupVariable> variables;
char* arena;
size_t arena_size;

namespace {

void switch_to(Fiber* next) {
  Fiber* me = current;
  if (next == me) return;
  current = next;
  counters.switches++;
  attnkit_metal_switch(&me->sp, next->sp);
}

Fiber* ready_lane(int simdgroup, int after) {
  Fiber* lanes = fibers + simdgroup * kLanes;
  int count = threads - simdgroup * kLanes < kLanes ? threads - simdgroup * kLanes : kLanes;
  for (int i = 1; i <= kLanes; i++) {
    int lane = (after + i) % kLanes;
    if (lane < count && lanes[lane].state == kReady) return lanes + lane;
  }
  return nullptr;
}

bool meet(const Post& a, const Post& b) { return a.op == b.op && a.site == b.site && a.type == b.type; }

void release(int simdgroup, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) fibers[simdgroup * kLanes + __builtin_ctz(m)].state = kReady;
  simdgroups[simdgroup].waiting &= ~mask;
}

void refuse_divergence(Fiber* lanes, uint32_t mask, uint32_t others) {
  Fiber* here = lanes + __builtin_ctz(mask);
  uint32_t waiting = 0;
  for (uint32_t m = others; m; m &= m - 1)
    if (lanes[__builtin_ctz(m)].state != kDone) waiting |= 1u << __builtin_ctz(m);
  if (!waiting)
    fail_as(here, here->post.site, format("%s runs on the lanes 0x%08x only, while lanes 0x%08x have returned",
                                          op_name(here->post.op).c_str(), mask, others));
  others = waiting;
  Fiber* there = lanes + __builtin_ctz(others);
  std::string what = there->state == kAtBarrier ? "threadgroup_barrier" : op_name(there->post.op);
  fail_as(here, here->post.site,
          format("%s runs on the lanes 0x%08x only, while lanes 0x%08x are at %s", op_name(here->post.op).c_str(), mask,
                 others, what.c_str()) +
              at(there->state == kAtBarrier ? there->site : there->post.site));
}

// No lane of the simdgroup can run. The collective that comes first in the source runs on the lanes that reached it:
// the order in which hardware would bring branches together again.
bool complete(int simdgroup) {
  Simdgroup& s = simdgroups[simdgroup];
  if (!s.waiting) return false;
  Fiber* lanes = fibers + simdgroup * kLanes;
  int first = -1;
  for (uint32_t m = s.waiting; m; m &= m - 1) {
    int lane = __builtin_ctz(m);
    if (first < 0 || lanes[lane].post.site < lanes[first].post.site) first = lane;
  }
  uint32_t mask = 0;
  for (uint32_t m = s.waiting; m; m &= m - 1) {
    int lane = __builtin_ctz(m);
    if (meet(lanes[lane].post, lanes[first].post)) mask |= 1u << lane;
  }
  if (mask != s.live) counters.divergent++;
  if (mask != s.all && options.strict) refuse_divergence(lanes, mask, s.all & ~mask);
  evaluate(simdgroup, mask);
  release(simdgroup, mask);
  return true;
}

void wait() {
  int mine = current->simdgroup;
  Fiber* next = ready_lane(mine, current->lane);
  for (int k = 0; !next && k < simdgroup_count; k++) {
    int simdgroup = (mine + k) % simdgroup_count;
    next = ready_lane(simdgroup, kLanes - 1);
    if (!next && complete(simdgroup)) next = ready_lane(simdgroup, kLanes - 1);
  }
  if (next) return switch_to(next);
  Fiber* me = current;  // nobody can run: the threadgroup is finished, or stuck
  current = nullptr;
  counters.switches++;
  attnkit_metal_switch(&me->sp, main_stack);
}

void check_barrier(int site) {
  for (int i = 0; i < threads; i++) {
    if (fibers[i].state == kDone)
      fail(site, format("threadgroup_barrier is reached by %d of %d threads: thread %d returned without it",
                        live_threads, threads, i));
    if (fibers[i].site != site)
      fail(site, format("threads wait at different barriers: thread %d at this one, thread %d at the one",
                        current->thread, i) + at(fibers[i].site));
  }
}

}  // namespace

namespace entry {

void simd(int op, int type, int count, const void* in, void* out, unsigned arg, const void* fill, int site) {
  settle();
  Fiber* me = current;
  Post& p = me->post;
  p.op = op, p.type = type, p.count = count, p.site = site, p.in = in, p.out = out, p.arg = arg, p.fill = fill;
  Simdgroup& s = simdgroups[me->simdgroup];
  me->state = kAtCollective;
  s.waiting |= 1u << me->lane;
  if (s.waiting == s.live) {
    Fiber* lanes = fibers + me->simdgroup * kLanes;
    bool together = true;
    for (uint32_t m = s.waiting; m && together; m &= m - 1) together = meet(lanes[__builtin_ctz(m)].post, p);
    if (together) {
      if (s.live != s.all && options.strict) refuse_divergence(lanes, s.live, s.all & ~s.live);
      evaluate(me->simdgroup, s.waiting);
      release(me->simdgroup, s.waiting);
      return;
    }
  }
  wait();
}

void matrix(int td, void* d, int ta, void* a, int tb, void* b, int tc, void* c, int site) {
  Post& p = current->post;
  p.types[0] = td, p.types[1] = ta, p.types[2] = tb, p.types[3] = tc;
  p.matrix[0] = d, p.matrix[1] = a, p.matrix[2] = b, p.matrix[3] = c;
  simd(kMatrix, 0, 0, nullptr, nullptr, 0, nullptr, site);
}

void barrier(int flags, int site) {
  settle();
  Fiber* me = current;
  me->state = kAtBarrier;
  me->site = site;
  if (++threads_at_barrier < live_threads) return wait();
  check_barrier(site);
  if (options.counting)
    for (int g = 0; g < simdgroup_count; g++) log_flush(g);
  threads_at_barrier = 0;
  counters.barriers++;
  now++;
  for (int k = 0; k < 2; k++)
    if (flags >> k & 1) {
      group_fenced[k] = now;
      for (int g = 0; g < simdgroup_count; g++) simdgroups[g].fenced[k] = now;
    }
  for (int i = 0; i < threads; i++) fibers[i].state = kReady;
}

}  // namespace entry

void thread_ended() {
  settle();
  current->state = kDone;
  live_threads--;
  simdgroups[current->simdgroup].live &= ~(1u << current->lane);
  wait();
}

}  // namespace sim
