// The stated model of memory traffic. Accesses of a simdgroup's lanes count as one instruction if they come from the
// same place in the source and are each lane's k-th execution of it since the lanes last met. Device memory moves in
// lines of 64 bytes; threadgroup memory has 32 banks of 4 bytes, and lanes that want different words of one bank wait.
//
// Between the GPU and memory lies one cache of Options::cache bytes: lines of 128 bytes, the least recently used
// leaves, empty when a launch begins. Threadgroups pass through it one after another, as they are simulated. A line
// that is written needs not be read first, and goes to memory once, when it leaves or when the launch ends.
#include <algorithm>
#include <list>
#include <map>
#include <unordered_map>

#include "machine.h"

namespace sim {
namespace {

constexpr uintptr_t kLine = 64, kBanks = 32, kCacheLine = 128;

struct Logged {
  uintptr_t p;
  unsigned size;
  int site, key;  // key: site, space and direction
};
struct CacheLine {
  uintptr_t number;
  bool dirty;
};
std::list<CacheLine> cache;  // the most recently used first
std::unordered_map<uintptr_t, std::list<CacheLine>::iterator> cached;

std::vector<Logged> logs[kMaxThreads];
std::map<int, SiteStat> stats;
size_t pending;

void count(SiteStat& s, const std::vector<const Logged*>& lanes, uintptr_t unit) {
  std::vector<uintptr_t> touched;
  uint64_t bytes = 0;
  for (auto* a : lanes) {
    bytes += a->size;
    for (uintptr_t u = a->p / unit; u <= (a->p + a->size - 1) / unit; u++) touched.push_back(u);
  }
  std::sort(touched.begin(), touched.end());
  touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
  uint32_t most = uint32_t(touched.size());
  uint64_t ideal = (bytes + unit - 1) / unit;
  if (unit != kLine) {
    uint32_t banks[kBanks] = {};
    most = 0;
    for (auto word : touched) most = std::max(most, ++banks[word % kBanks]);
    ideal = (touched.size() + kBanks - 1) / kBanks;
  } else {
    ideal = std::min<uint64_t>(ideal, touched.size());  // lanes may read the same bytes
  }
  s.instructions++;
  s.lanes += lanes.size();
  s.bytes += bytes;
  s.transactions += most;
  s.ideal += ideal;
  s.worst = std::max(s.worst, most);
}

}  // namespace

void log_access(uintptr_t p, unsigned size, bool write, int space, int site) {
  logs[current->thread].push_back({p, size, site, site << 4 | space << 1 | int(write)});
  pending++;
}

void log_flush(int simdgroup) {
  if (!pending) return;
  std::map<int, std::vector<std::vector<const Logged*>>> by_key;
  std::map<int, size_t> occurrence;
  for (int lane = 0; lane < kLanes; lane++) {
    auto& log = logs[simdgroup * kLanes + lane];
    occurrence.clear();
    for (auto& a : log) {
      size_t k = occurrence[a.key]++;
      auto& rows = by_key[a.key];
      if (rows.size() <= k) rows.resize(k + 1);
      rows[k].push_back(&a);
    }
    pending -= log.size();
  }
  for (auto& [key, rows] : by_key) {
    auto found = stats.find(key);
    if (found == stats.end()) {
      SiteStat fresh;
      fresh.site = key >> 4, fresh.space = key >> 1 & 7, fresh.write = key & 1;
      found = stats.emplace(key, fresh).first;
    }
    for (auto& lanes : rows) count(found->second, lanes, found->second.space == kThreadgroup ? 4 : kLine);
  }
  for (int lane = 0; lane < kLanes; lane++) logs[simdgroup * kLanes + lane].clear();
}

void cache_access(uintptr_t p, size_t size, bool write) {
  for (uintptr_t n = p / kCacheLine; n <= (p + size - 1) / kCacheLine; n++) {
    if (cache.empty() || cache.front().number != n) {
      auto found = cached.find(n);
      if (found != cached.end()) {
        cache.splice(cache.begin(), cache, found->second);
      } else {
        cache.push_front({n, false});
        cached[n] = cache.begin();
        if (!write) counters.memory_read += kCacheLine;
        if (cache.size() > std::max<size_t>(options.cache / kCacheLine, 1)) {
          counters.memory_written += cache.back().dirty ? kCacheLine : 0;
          cached.erase(cache.back().number);
          cache.pop_back();
        }
      }
    }
    cache.front().dirty |= write;
  }
}

void cache_drain() {
  for (auto& line : cache) counters.memory_written += line.dirty ? kCacheLine : 0;
  cache.clear();
  cached.clear();
}

void log_reset() {
  cache.clear();
  cached.clear();
  stats.clear();
  pending = 0;
  for (auto& log : logs) log.clear();
}

std::vector<SiteStat> site_stats() {
  std::vector<SiteStat> out;
  for (auto& [key, s] : stats) out.push_back(s);
  return out;
}

}  // namespace sim
