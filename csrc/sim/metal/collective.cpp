// Operations that the lanes of a simdgroup perform together. The last lane to arrive computes them for all.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "half.h"
#include "machine.h"

namespace sim {

const char* const kOpNames[] = {
    "simd_sum", "simd_product", "simd_max", "simd_min", "simd_and", "simd_or", "simd_xor", "simd_broadcast",
    "simd_shuffle", "simd_shuffle_down", "simd_shuffle_up", "simd_shuffle_xor", "simd_shuffle_and_fill_down",
    "simd_shuffle_and_fill_up", "simd_prefix_inclusive_sum", "simd_prefix_exclusive_sum", "simd_all", "simd_any",
    "simd_ballot", "simdgroup_barrier", "simdgroup matrix multiplication", "simd_shuffle_rotate_down",
    "simd_shuffle_rotate_up", "simd_broadcast_first", "simd_is_first", "simd_prefix_inclusive_product",
    "simd_prefix_exclusive_product", "simd_active_threads_mask", "quad_shuffle", "simdgroup_load or simdgroup_store"};

std::string op_name(int op) {
  if (op < kQuads) return kOpNames[op];
  std::string name = kOpNames[op - kQuads];  // simd_sum: quad_sum
  return "quad" + name.substr(name.find('_'));
}

namespace {

bool on(uint32_t mask, int lane) { return mask >> lane & 1; }

// The type in which elements of T are combined: half and bfloat as float, rounded after every step.
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, Half> || std::is_same_v<T, Bfloat>, float, T>;

template <class T>
T combine(int op, T a, T b) {
  using W = Wide<T>;
  W x = W(a), y = W(b);
  switch (op) {
    case kSum: case kInclusiveSum: case kExclusiveSum: return T(W(x + y));
    case kProduct: case kInclusiveProduct: case kExclusiveProduct: return T(W(x * y));
    case kMax: return x != x ? b : y != y ? a : x > y ? a : b;
    default: return x != x ? b : y != y ? a : x < y ? a : b;
  }
}

template <class T>
void reduce(Fiber* lanes, uint32_t mask, int op, int count) {
  for (int k = 0; k < count; k++) {
    T value[kLanes];
    uint32_t have = mask;
    for (int i = 0; i < kLanes; i++)
      if (on(mask, i)) value[i] = static_cast<const T*>(lanes[i].post.in)[k];
    for (int step = 1; step < kLanes; step *= 2)  // a tree, as adders across lanes are
      for (int i = 0; i + step < kLanes; i += 2 * step) {
        if (!on(have, i + step)) continue;
        value[i] = on(have, i) ? combine(op, value[i], value[i + step]) : value[i + step];
        have |= 1u << i;
      }
    for (int i = 0; i < kLanes; i++)
      if (on(mask, i)) static_cast<T*>(lanes[i].post.out)[k] = value[0];
  }
}

template <class T>
void scan(Fiber* lanes, uint32_t mask, int op, int count) {
  bool inclusive = op == kInclusiveSum || op == kInclusiveProduct;
  for (int k = 0; k < count; k++) {
    using W = Wide<T>;
    T total = T(W(op == kInclusiveSum || op == kExclusiveSum ? 0 : 1));
    for (int i = 0; i < kLanes; i++) {
      if (!on(mask, i)) continue;
      T next = combine(op, total, static_cast<const T*>(lanes[i].post.in)[k]);
      static_cast<T*>(lanes[i].post.out)[k] = inclusive ? next : total;
      total = next;
    }
  }
}

template <template <class> class F>
void by_type(Fiber* lanes, uint32_t mask, const Post& p) {
  switch (p.type) {
    case kF32: return F<float>::run(lanes, mask, p.op, p.count);
    case kF16: return F<Half>::run(lanes, mask, p.op, p.count);
    case kBF16: return F<Bfloat>::run(lanes, mask, p.op, p.count);
    case kI32: return F<int32_t>::run(lanes, mask, p.op, p.count);
    case kU32: return F<uint32_t>::run(lanes, mask, p.op, p.count);
    case kI16: return F<int16_t>::run(lanes, mask, p.op, p.count);
    case kU16: return F<uint16_t>::run(lanes, mask, p.op, p.count);
    case kI8: return F<int8_t>::run(lanes, mask, p.op, p.count);
    case kU8: return F<uint8_t>::run(lanes, mask, p.op, p.count);
    default: fail(p.site, format("%s has no overload for this type", op_name(p.op).c_str()));
  }
}
template <class T>
struct Reduce {
  static void run(Fiber* f, uint32_t m, int op, int n) { reduce<T>(f, m, op, n); }
};
template <class T>
struct Scan {
  static void run(Fiber* f, uint32_t m, int op, int n) { scan<T>(f, m, op, n); }
};

void bitwise(Fiber* lanes, uint32_t mask, const Post& p) {
  size_t bytes = size_t(kTypeSize[p.type]) * p.count;
  unsigned char total[64];
  std::memset(total, p.op == kAnd ? 0xff : 0, sizeof total);
  for (int i = 0; i < kLanes; i++) {
    if (!on(mask, i)) continue;
    auto* in = static_cast<const unsigned char*>(lanes[i].post.in);
    for (size_t b = 0; b < bytes; b++)
      total[b] = p.op == kAnd ? total[b] & in[b] : p.op == kOr ? total[b] | in[b] : total[b] ^ in[b];
  }
  for (int i = 0; i < kLanes; i++)
    if (on(mask, i)) std::memcpy(lanes[i].post.out, total, bytes);
}

void vote(Fiber* lanes, uint32_t mask, const Post& p) {
  uint32_t yes = 0;
  for (int i = 0; i < kLanes; i++)
    if (on(mask, i) && *static_cast<const bool*>(lanes[i].post.in)) yes |= 1u << i;
  for (int i = 0; i < kLanes; i++) {
    if (!on(mask, i)) continue;
    void* out = lanes[i].post.out;
    switch (p.op) {
      case kAll: *static_cast<bool*>(out) = yes == mask; break;
      case kAny: *static_cast<bool*>(out) = yes != 0; break;
      case kIsFirst: *static_cast<bool*>(out) = i == __builtin_ctz(mask); break;
      case kActiveMask: *static_cast<uint64_t*>(out) = mask; break;
      default: *static_cast<uint64_t*>(out) = yes;
    }
  }
}

void shuffle(Fiber* lanes, uint32_t mask, const Post& p) {
  constexpr int kMaxBytes = 128;
  size_t bytes = size_t(p.count);
  if (bytes > kMaxBytes) fail(p.site, format("%s of %zu bytes", op_name(p.op).c_str(), bytes));
  char value[kLanes][kMaxBytes];
  for (int i = 0; i < kLanes; i++)
    if (on(mask, i)) std::memcpy(value[i], lanes[i].post.in, bytes);
  for (int i = 0; i < kLanes; i++) {
    if (!on(mask, i)) continue;
    Fiber* me = lanes + i;
    int by = int(me->post.arg), from = i;
    bool drifts = p.op == kShuffleDown || p.op == kShuffleUp;
    switch (p.op) {
      case kBroadcast:
        if (me->post.arg != p.arg)
          fail_as(me, p.site,
                  format("simd_broadcast with lane %d here and lane %u elsewhere in the simdgroup", by, p.arg));
        from = by;
        break;
      case kShuffle: case kQuadShuffle: from = by; break;
      case kShuffleDown: case kFillDown: from = i + by; break;
      case kShuffleUp: case kFillUp: from = i - by; break;
      case kShuffleXor: from = i ^ by; break;
      case kRotateDown: from = (i + by) & 31; break;
      case kRotateUp: from = (i - by) & 31; break;
      default: from = __builtin_ctz(mask);
    }
    if ((p.op == kFillDown && from > 31) || (p.op == kFillUp && from < 0)) {
      Fiber* other = lanes + (from & 31);
      if (!on(mask, from & 31))
        fail_as(me, p.site,
                  format("%s takes the filling value of lane %d, which is not active", op_name(p.op).c_str(), from & 31));
      std::memcpy(me->post.out, other->post.fill, bytes);
    } else if (from >= 0 && from < kLanes && on(mask, from)) {
      std::memcpy(me->post.out, value[from], bytes);
    } else if (drifts) {
      std::memset(me->post.out, 0xff, bytes);  // unspecified in Metal: NaN, so that a use of it shows
    } else if (from < 0 || from >= kLanes) {
      fail_as(me, p.site, format("%s: lane %d reads lane %d, outside the simdgroup", op_name(p.op).c_str(), i, from));
    } else {
      fail_as(me, p.site, format("%s: lane %d reads lane %d, which is not active (active lanes: 0x%08x)",
                                 op_name(p.op).c_str(), i, from, mask));
    }
  }
}

int matrix_row(int lane) { return (lane / 4 & 4) + lane / 2 % 4; }
int matrix_column(int lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }

float element(const void* p, int type, int i) {
  if (type == kF32) return static_cast<const float*>(p)[i];
  return type == kF16 ? float(static_cast<const Half*>(p)[i]) : float(static_cast<const Bfloat*>(p)[i]);
}

// Whether an element still holds what msl_unset of include/msl_simd.h gives.
bool unset(const void* p, int type, int i) {
  if (type == kF32) return float_to_bits(static_cast<const float*>(p)[i]) == 0x7fe5a5a5;
  return static_cast<const uint16_t*>(p)[i] == (type == kF16 ? 0x7f5a : 0x7fe5);
}

void matrix(Fiber* lanes, uint32_t mask, const Post& p) {
  if (mask != 0xffffffffu)
    fail(p.site, format("%s needs all 32 lanes, active are 0x%08x", op_name(p.op).c_str(), mask));
  float m[4][8][8];
  for (int k = 1; k < 4; k++)
    for (int lane = 0; lane < kLanes; lane++)
      for (int e = 0; e < 2; e++) {
        if (unset(lanes[lane].post.matrix[k], p.types[k], e))
          fail_as(lanes + lane, p.site, format("%s of a matrix that nobody has set: operand %d", op_name(p.op).c_str(), k));
        m[k][matrix_row(lane)][matrix_column(lane) + e] = element(lanes[lane].post.matrix[k], p.types[k], e);
      }
  for (int r = 0; r < 8; r++)
    for (int c = 0; c < 8; c++) {
      float sum = m[3][r][c];
      for (int k = 0; k < 8; k++) sum = std::fma(m[1][r][k], m[2][k][c], sum);
      m[0][r][c] = sum;
    }
  for (int lane = 0; lane < kLanes; lane++)
    for (int e = 0; e < 2; e++) {
      float v = m[0][matrix_row(lane)][matrix_column(lane) + e];
      void* d = lanes[lane].post.matrix[0];
      if (p.types[0] == kF32) static_cast<float*>(d)[e] = v;
      else if (p.types[0] == kF16) static_cast<Half*>(d)[e] = Half(v);
      else static_cast<Bfloat*>(d)[e] = Bfloat(v);
    }
  counters.matrix++;
}

void evaluate_lanes(int simdgroup, Fiber* lanes, uint32_t mask, const Post& p) {
  switch (p.op) {
    case kSum: case kProduct: case kMax: case kMin: return by_type<Reduce>(lanes, mask, p);
    case kInclusiveSum: case kExclusiveSum: case kInclusiveProduct: case kExclusiveProduct:
      return by_type<Scan>(lanes, mask, p);
    case kAnd: case kOr: case kXor: return bitwise(lanes, mask, p);
    case kAll: case kAny: case kBallot: case kIsFirst: case kActiveMask: return vote(lanes, mask, p);
    case kMatrix: return matrix(lanes, mask, p);
    case kSimdgroupBarrier: {
      counters.collectives--;
      counters.simdgroup_barriers++;
      now++;
      for (int k = 0; k < 2; k++)
        if (p.arg >> k & 1) simdgroups[simdgroup].fenced[k] = now;
      return;
    }
    default: return shuffle(lanes, mask, p);
  }
}

// Where a pointer points to, in words.
std::string place(const void* p) {
  auto address = reinterpret_cast<uintptr_t>(p), begin = reinterpret_cast<uintptr_t>(arena);
  if (address - begin < arena_size) return format("byte %zu of threadgroup memory", size_t(address - begin));
  std::string near = describe_address(address);
  return near.empty() ? "another address" : near;
}

}  // namespace

void evaluate(int simdgroup, uint32_t mask) {
  Fiber* lanes = fibers + simdgroup * kLanes;
  const Post& p = lanes[__builtin_ctz(mask)].post;
  if (p.op == kMatrixMemory) {  // here only to see that all lanes have come: each moves its own part
    if (mask != 0xffffffffu)
      fail(p.site, format("%s needs all 32 lanes, active are 0x%08x", op_name(p.op).c_str(), mask));
    for (int i = 1; i < kLanes; i++) {
      const Post& mine = lanes[i].post;
      if (mine.in != p.in)
        fail_as(lanes + i, p.site,
                format("%s of one matrix at different places: lane %d has %s, lane 0 %s", op_name(p.op).c_str(), i,
                       place(mine.in).c_str(), place(p.in).c_str()));
      if (mine.arg != p.arg)
        fail_as(lanes + i, p.site,
                format("%s of one matrix with different strides: %u in lane %d, %u in lane 0, or transposed in one",
                       op_name(p.op).c_str(), mine.arg >> 1, i, p.arg >> 1));
    }
    return;
  }
  if (options.counting) log_flush(simdgroup);
  counters.collectives++;
  if (options.lockstep) simdgroups[simdgroup].fenced[1] = ++now;
  if (p.op < kQuads) return evaluate_lanes(simdgroup, lanes, mask, p);
  for (int quad = 0; quad < kLanes; quad += 4) {
    uint32_t mine = mask & 15u << quad;
    if (!mine) continue;
    for (int i = quad; i < quad + 4; i++)
      if (on(mine, i)) lanes[i].post.op &= kQuads - 1;
    evaluate_lanes(simdgroup, lanes, mine, lanes[__builtin_ctz(mine)].post);
  }
}

}  // namespace sim
