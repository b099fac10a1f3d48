// The largest entries of rows, their places in ascending order: topk_rows.
//
// A score becomes an unsigned integer, its *order*: the smallest for the largest score, and HIDDEN for what does not
// count (NaN, -inf, what lies behind a row's length). Up to three passes count the orders of a row by their next 11, 11
// and 10 bits and find the bin of the K-th; when all of a bin is wanted the search is over. Then all orders below a
// limit are chosen, and the first so many that equal it. Each simdgroup has neighbouring entries: what it has chosen is
// counted, the counts are added up over simdgroups, and ballots say where each place goes. Atomic operations add up
// counts and decide no order, so a row has one result.
//
// A row of up to 32 * SIMDS * KEPT entries is read once and stays in registers; with KEPT 0 each pass reads it anew.
// With LISTED an entry stands for another one, that its list names (-1: none): the K best of every part of a long row
// are such a list, in ascending order, and the K best of the row are among them.
//
// Grid: x rows, y parts of ``part`` entries of each; SIMDS simdgroups in a threadgroup, no other number.
//
// Defined by the host: TYPE, SIMDS (a power of two up to 32), KEPT, LISTED, RAGGED.

constant constexpr int THREADS = 32 * SIMDS;
constant constexpr int BITS = 11;  // of an order, that one pass decides
constant constexpr int BINS = 1 << BITS;
constant constexpr int OWN_BINS = BINS / THREADS;  // of a thread, at least 2
// Numbers of 16 bits differ in their first 19 bits as floats, so that two passes are enough: the rest are ones.
constant constexpr int PASSES = sizeof(TYPE) == 2 ? 2 : 3;
constant constexpr uint REST = PASSES == 2 ? (1u << (32 - 2 * BITS)) - 1u : 0u;
constant constexpr uint HIDDEN = 0xffffffffu;

#if KEPT
#define STEPS KEPT
#define UNROLL_STEPS ATTNKIT_UNROLL
#else
#define STEPS row.steps
#define UNROLL_STEPS
#endif

struct TopkShape {
  long entries;  // of a row, or of its list
  long topk;
  long part;  // entries of a threadgroup
  long row_step;  // elements of scores from one row to the next
  long scored;  // entries of a row of scores
};

// By bits: a float that is compared may count as zero where it is very small.
inline uint order_of(uint bits) {
  const uint size = bits & 0x7fffffffu;
  if (size > 0x7f800000u || bits == 0xff800000u) {
    return HIDDEN;
  }
  return (bits == size || size == 0u ? 0x7fffffffu - size : bits) | REST;
}

inline uint order_of(float x) {
  return order_of(as_type<uint>(x));
}

inline uint order_of(half x) {
  return order_of(as_type<uint>(float(x)));
}

inline uint order_of(bfloat x) {
  return order_of(uint(as_type<ushort>(x)) << 16);
}

// The entries of a threadgroup, as one of its simdgroups sees them: its own are neighbours, and step i is 32 of them.
struct Row {
  const device TYPE* scores;
  const device int* list;
  int first;  // of this lane
  int end;
  int length;  // of the row of scores
  int steps;

  int place(int i) const {
    const int at = first + i * 32;
#if LISTED
    return at < end ? list[at] : -1;
#else
    return at < end ? at : -1;
#endif
  }

  uint order(int i) const {
    const int at = place(i);
    return at >= 0 && at < length ? order_of(scores[at]) : HIDDEN;
  }
};

struct Orders {
#if KEPT
  uint of[KEPT];
#endif
};

inline uint order_at(thread const Row& row, thread const Orders& kept, int i) {
#if KEPT
  return kept.of[i];
#else
  return row.order(i);
#endif
}

// Threadgroup memory.
struct Counters {
  threadgroup atomic_uint* bins;  // (BINS)
  threadgroup uint* sums;  // (2, SIMDS)
  threadgroup uint* found;  // bin, what is counted before it, what is in it
};

struct Member {
  int lane;
  int simd;

  int index() const {
    return simd * 32 + lane;
  }
};

// The sums of the simdgroups before this one; ``all`` is that of all of them. Between barriers.
inline uint before_this(const threadgroup uint* sums, thread const Member& me, thread uint& all) {
  const uint mine = me.lane < SIMDS ? sums[me.lane] : 0u;
  all = simd_sum(mine);
  return simd_sum(me.lane < me.simd ? mine : 0u);
}

// Into ``found``: the bin of entry number ``wanted`` (from 1) of those that have been counted.
inline void find_bin(thread const Counters& counters, uint wanted, thread const Member& me) {
  uint own[OWN_BINS], sum = 0u;
  ATTNKIT_UNROLL
  for (int b = 0; b < OWN_BINS; b++) {
    own[b] = atomic_load_explicit(counters.bins + me.index() * OWN_BINS + b, memory_order_relaxed);
    sum += own[b];
  }
  const uint before = simd_prefix_exclusive_sum(sum);
  if (me.lane == 31) {
    counters.sums[me.simd] = before + sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint all;
  uint at = before + before_this(counters.sums, me, all);
  ATTNKIT_UNROLL
  for (int b = 0; b < OWN_BINS; b++) {
    if (at < wanted && wanted <= at + own[b]) {
      counters.found[0] = uint(me.index() * OWN_BINS + b);
      counters.found[1] = at;
      counters.found[2] = own[b];
    }
    at += own[b];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// What is chosen: orders below ``limit``, and the first ``quota`` that equal it.
struct Choice {
  uint limit;
  uint quota;
};

// Of a row with more than ``wanted`` entries.
inline Choice choose(
    thread const Row& row, thread const Orders& kept, thread const Counters& counters, uint wanted,
    thread const Member& me) {
  uint decided = 0u;  // the leading bits of the K-th order
  for (int pass = 0; pass < PASSES; pass++) {
    const int shift = max(0, 32 - BITS * (pass + 1));
    const int bits = 32 - BITS * pass - shift;
    ATTNKIT_UNROLL
    for (int b = 0; b < OWN_BINS; b++) {
      atomic_store_explicit(counters.bins + b * THREADS + me.index(), 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL_STEPS
    for (int i = 0; i < STEPS; i++) {
      const uint order = order_at(row, kept, i);
      // A shift by 32 bits is none.
      if (pass == 0 || order >> (32 - BITS * pass) == decided) {
        atomic_fetch_add_explicit(
            counters.bins + ((order >> shift) & ((1u << bits) - 1u)), 1u, memory_order_relaxed);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    find_bin(counters, wanted, me);
    const uint bin = counters.found[0], before = counters.found[1], inside = counters.found[2];
    wanted -= before;
    decided = (decided << bits) | bin;
    const uint last = (decided << shift) + ((1u << shift) - 1u);
    if (last == HIDDEN) {
      // Everything that counts is wanted, as far as this bin can tell apart; with the last pass it can.
      if (pass == PASSES - 1 || inside == wanted) {
        return Choice{HIDDEN, 0u};
      }
    } else if (inside == wanted) {
      return Choice{last + 1u, 0u};
    } else if (pass == PASSES - 1) {
      return Choice{last, wanted};
    }
  }
  return Choice{HIDDEN, 0u};
}

[[kernel, max_total_threads_per_threadgroup(32 * SIMDS)]] void topk_rows(
    const device TYPE* scores [[buffer(0)]],  // (rows, scored)
    const device int* k_len [[buffer(1)]],  // (rows)
    const device int* list [[buffer(2)]],  // (rows, entries)
    device int* out [[buffer(3)]],  // (rows, parts, topk)
    constant TopkShape& shape [[buffer(4)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint2 groups [[threadgroups_per_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup atomic_uint bins[BINS];
  threadgroup uint sums[2 * SIMDS];
  threadgroup uint found[3];
  const Counters counters = {bins, sums, found};
  const Member me = {int(lane), int(simd)};
  const int topk = int(shape.topk), part = int(shape.part);

  Row row;
  row.scores = scores + group.x * shape.row_step;
  row.list = list + group.x * shape.entries;
  row.length = int(shape.scored);
#if RAGGED
  row.length = clamp(k_len[group.x], 0, row.length);
#endif
  const int begin = int(group.y) * part;
  row.end = min(begin + part, LISTED ? int(shape.entries) : row.length);
  // What there is in registers belongs to lanes however long the row is; otherwise it is shared out evenly.
  row.steps = KEPT ? KEPT : (max(0, row.end - begin) + THREADS - 1) / THREADS;
  row.first = begin + int(simd) * row.steps * 32 + int(lane);
  out += (long(group.x) * groups.y + group.y) * topk;

  Orders kept;
#if KEPT
  ATTNKIT_UNROLL
  for (int i = 0; i < KEPT; i++) {
    kept.of[i] = row.order(i);
  }
#endif
  Choice choice = {HIDDEN, 0u};
  if (row.end - begin > topk) {
    choice = choose(row, kept, counters, uint(topk), me);
  }

  uint below = 0u, equal = 0u;
  UNROLL_STEPS
  for (int i = 0; i < STEPS; i++) {
    const uint order = order_at(row, kept, i);
    below += uint(order < choice.limit);
    equal += uint(choice.quota != 0u && order == choice.limit);
  }
  below = simd_sum(below);
  equal = simd_sum(equal);
  if (lane == 0) {
    sums[simd] = below;
    sums[SIMDS + simd] = equal;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint all_below, all_equal;
  uint at = before_this(sums, me, all_below);
  uint ties = before_this(sums + SIMDS, me, all_equal);
  at += min(ties, choice.quota);

  const uint lanes_before = (1u << lane) - 1u;
  UNROLL_STEPS
  for (int i = 0; i < STEPS; i++) {
    const uint order = order_at(row, kept, i);
    bool taken = order < choice.limit;
    if (choice.quota != 0u) {
      const bool tie = order == choice.limit;
      const uint same = uint(ulong(simd_ballot(tie)));
      taken = taken || (tie && ties + popcount(same & lanes_before) < choice.quota);
      ties += popcount(same);
    }
    const uint chosen = uint(ulong(simd_ballot(taken)));
    if (taken) {
      out[at + popcount(chosen & lanes_before)] = row.place(i);
    }
    at += popcount(chosen);
  }
  for (int k = int(all_below + min(all_equal, choice.quota)) + me.index(); k < topk; k += THREADS) {
    out[k] = -1;
  }
}
