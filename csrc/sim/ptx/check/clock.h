// Vector clocks of a checked run.
//
// An agent is whatever acts in an order of its own: a warp, the queue of its tcgen05.ld or tcgen05.st, the tensor pipe
// it feeds, or one of the asynchronous operations it has in flight. What an agent has done is counted by its clock;
// what anyone knows of others is a vector of such counts, one per agent of the cluster, and a snapshot per foreign
// cluster. The lanes of a warp share its clock, not their knowledge: an epoch says which lane, and of a warp a vector
// holds what is known of all of its lanes, and of single lanes only where that is more.
#pragma once
#include <array>

#include "check/check.h"

namespace ptx::checking {

// What can be known of an agent's past, from "it happened before" to narrower statements that need a fence of their
// own.
enum Knowledge : unsigned {
  kOrder,         // happened before
  kSharedProxy,   // and a proxy fence has made its writes to shared memory visible to the async proxy
  kGlobalProxy,   // the same for global memory
  kMapProxy,      // and for the reads of TMA descriptors
  kBarrierInit,   // its mbarrier.init are visible to the cluster and to the async proxy
  kTensorBefore,  // a tcgen05.fence::before_thread_sync came after its work in tensor memory
  kTensorFence,   // and a tcgen05.fence::after_thread_sync before ours
  kStarted,       // it has begun to run, which a relaxed arrival tells, too
  kKnowledge = 8
};
struct alignas(32) Seen {
  uint32_t at[kKnowledge] = {};
};
using Vector = std::vector<Seen>;

// An access in a shadow: who, when, by which instruction. 0: none.
//   bits 0-16 statement, 17-34 clock, 35-40 lanes, 41-59 agent, 60 async proxy, 61 strong (atomic or not weak), 62-63
//   for the shadow
using Epoch = uint64_t;
constexpr unsigned kClockShift = 17, kLaneShift = 35, kAgentShift = 41;
constexpr uint32_t kStatementMask = (1u << 17) - 1, kClockMask = (1u << 18) - 1, kAgentMask = (1u << 19) - 1;
constexpr Epoch kAsyncProxy = 1ull << 60, kStrong = 1ull << 61, kSilent = 1ull << 62,
                kTagged = 1ull << 63;  // kSilent: a write, in a race, of the bytes that were there
constexpr Epoch kLaneOne = 1ull << kLaneShift, kLaneBits = 63ull << kLaneShift;

// Which lanes of a warp an epoch is of. Below 32: that lane. kPairs + i, kQuads + i: the two or four lanes whose bytes
// or halves make up a word, each its own part of it.
enum Lanes : unsigned { kPairs = 32, kQuads = 48, kEach = 62, kWhole = 63 };
// kEach: every lane, all of the word (a read of one address). kWhole: the warp, in one collective operation; also what
// is no warp.

inline uint32_t agent_of(Epoch e) { return static_cast<uint32_t>(e >> kAgentShift) & kAgentMask; }
inline uint32_t clock_of(Epoch e) { return static_cast<uint32_t>(e >> kClockShift) & kClockMask; }
inline uint32_t statement_of(Epoch e) { return static_cast<uint32_t>(e) & kStatementMask; }
inline unsigned lanes_of(Epoch e) { return static_cast<unsigned>(e >> kLaneShift) & 63; }
inline Mask mask_of(unsigned lanes) {
  if (lanes < kPairs) return 1u << lanes;
  if (lanes < kQuads) return 3u << 2 * (lanes - kPairs);
  return lanes < kEach ? 15u << 4 * (lanes - kQuads) : kAll;
}
inline Epoch epoch(uint32_t agent, uint32_t clock, int statement, unsigned lanes = kWhole) {
  return static_cast<Epoch>(agent) << kAgentShift | static_cast<Epoch>(clock & kClockMask) << kClockShift |
         static_cast<Epoch>(lanes) << kLaneShift | (static_cast<uint32_t>(statement) & kStatementMask);
}
// Whether program order puts `earlier` before `now`, both of one warp.
inline bool same_lanes(Epoch earlier, Epoch now) {
  const unsigned was = lanes_of(earlier), is = lanes_of(now);
  return was == kWhole || was == is || (was < kEach && is < kEach && (mask_of(was) & mask_of(is)) != 0);
}

struct Agent {
  enum Kind : uint8_t { warp, load_queue, store_queue, pipe, operation } kind = warp;
  uint16_t id = 0;  // the warp in its CTA
  uint32_t cluster = 0, local = 0;
  uint32_t cta[3] = {};
  // A warp: the local number under which a clock counts one lane, where it knows more of it than of all; 0: none.
  std::shared_ptr<std::array<uint32_t, kLanes>> lanes;
};

struct Clock {
  uint32_t cluster = 0;
  Vector seen;                                                              // by Agent::local
  std::vector<std::pair<uint32_t, std::shared_ptr<const Vector>>> foreign;  // by cluster, ascending

  Seen& of(uint32_t local) {
    if (seen.size() <= local) seen.resize(local + 1);
    return seen[local];
  }
  const Vector* of_cluster(uint32_t cluster) const;
  bool knows(const Agent& a, Epoch e, Knowledge what = kOrder) const;
  // The same of all lanes of the agent, should it be a warp.
  bool knows_all(const Agent& a, Epoch e, Knowledge what = kOrder) const;
  void join(const Clock& other);                                         // all that the other knows
  void join(const Vector& other);                                        // of the same cluster
  void meet(uint32_t of_cluster, const std::shared_ptr<const Vector>&);  // a snapshot, of any cluster
  void raise(Knowledge what);  // all that has happened before is now known as `what`, too
};

}  // namespace ptx::checking
