// Addresses, special registers, and how an error says where it happened.
#include "machine/machine.h"

#include <algorithm>
#include <cstdio>

#include "front/decode.h"

namespace ptx {

namespace {

std::string hex(uint64_t v) {
  char out[32];
  snprintf(out, sizeof out, "0x%llx", static_cast<unsigned long long>(v));
  return out;
}

uint32_t at(const uint32_t* three, char axis) { return three[axis - 'x']; }

}  // namespace

std::string Context::quote(const Op& of) const {
  const Statement& s = *of.from;
  const Module& m = *launch.program->module;
  const std::string text = "line " + std::to_string(s.line) + " '" + s.text + "'";
  const auto file = m.files.find(s.file);
  return file == m.files.end() ? text : text + " (" + file->second + ":" + std::to_string(s.source_line) + ")";
}

void Context::fail(const std::string& what) const {
  const std::string at = "CTA (" + std::to_string(cta.index[0]) + ", " + std::to_string(cta.index[1]) + ", " +
                         std::to_string(cta.index[2]) + ") warp " + std::to_string(warp.id) + " lanes " + hex(mask);
  throw Error("kernel " + launch.program->function->name + ", " + quote(*op) + ", " + at + ": " + what);
}

// The last range that begins at or below the address; null when there is none.
static const Range* range_below(const std::vector<Range>& ranges, uint64_t address) {
  static thread_local size_t last = 0;  // most accesses stay in the range of the one before
  if (last >= ranges.size() || address < ranges[last].begin || address >= ranges[last].end) {
    const auto above =
        std::upper_bound(ranges.begin(), ranges.end(), address, [](uint64_t a, const Range& r) { return a < r.begin; });
    last = above == ranges.begin() ? 0 : static_cast<size_t>(above - ranges.begin()) - 1;
  }
  return ranges.empty() ? nullptr : &ranges[last];
}

bool Launch::inside_one_range(uint64_t begin, uint64_t end, bool write) const {
  const Range* r = range_below(ranges, begin);
  return r != nullptr && begin >= r->begin && end <= r->end && begin < end && (r->writable || !write);
}

uint8_t* Launch::global(const Context& c, uint64_t address, uint64_t bytes, bool write) const {
  const Range* r = range_below(ranges, address);
  if (r != nullptr && address >= r->begin && address + bytes <= r->end && address + bytes >= address) {
    if (write && !r->writable)
      c.fail("writes " + std::to_string(bytes) + " bytes at " + hex(address) + " in '" + r->name +
             "', which is read-only");
    return reinterpret_cast<uint8_t*>(address);
  }
  std::string nearest = "nothing is registered";
  uint64_t least = ~0ull;
  for (const Range& n : ranges) {
    const uint64_t distance = address < n.begin ? n.begin - address : address >= n.end ? address - n.end : 0;
    if (distance >= least) continue;
    least = distance;
    nearest = "the nearest memory is '" + n.name + "' " + hex(n.begin) + ".." + hex(n.end) +
              (distance != 0 || address < n.begin ? ", " + std::to_string(distance) + " bytes away"
                                                  : ", which ends inside the access");
  }
  c.fail((write ? "writes " : "reads ") + std::to_string(bytes) + " bytes at global address " + hex(address) + "; " +
         nearest);
}

bool Launch::take_waiting(uint32_t& index) {
  std::lock_guard<std::mutex> lock(waiting_lock);
  if (waiting.empty()) return false;
  index = waiting.front();
  waiting.pop_front();
  return true;
}

Place place_generic(const Context& c, uint64_t address) {
  Place p{Place::global, nullptr, 0, address};
  if (address >> 56 == kGenericShared >> 56) {
    p.space = Place::shared;
    p.cta = &shared_owner(c, static_cast<uint32_t>(address));
    p.offset = static_cast<uint32_t>(address) & kOffsetMask;
  } else if (address >> 57 == kGenericLocal >> 57) {
    p.space = Place::local;
    p.offset = static_cast<uint32_t>(address);
  }
  return p;
}

Cta& shared_owner(const Context& c, uint32_t address) {
  const uint32_t rank = address >> kRankShift;
  if (rank >= c.cluster.ctas.size())
    c.fail("shared address " + hex(address) + " names CTA " + std::to_string(rank) + " of a cluster of " +
           std::to_string(c.cluster.ctas.size()));
  return *c.cluster.ctas[rank];
}

uint8_t* shared_bytes(const Context& c, uint32_t address, uint32_t bytes, uint32_t align) {
  Cta& owner = shared_owner(c, address);
  const uint32_t offset = address & kOffsetMask;
  if (offset % align != 0) c.fail("shared address " + hex(address) + " is not a multiple of " + std::to_string(align));
  if (offset < kSharedBase || offset + bytes > owner.shared_bytes)
    c.fail(std::to_string(bytes) + " bytes at shared offset " + hex(offset) + "; CTA " + std::to_string(owner.rank) +
           " has " + hex(kSharedBase) + ".." + hex(owner.shared_bytes));
  return owner.shared + offset;
}

namespace {

using Value = uint64_t (*)(const Launch&, const Warp&, unsigned lane, char axis);

uint32_t thread_of(const Warp& w, unsigned lane) { return w.id * kLanes + lane; }

uint64_t tid(const Launch& l, const Warp& w, unsigned lane, char axis) {
  const uint32_t t = thread_of(w, lane);
  return axis == 'x' ? t % l.block[0] : axis == 'y' ? t / l.block[0] % l.block[1] : t / (l.block[0] * l.block[1]);
}

uint64_t shared_size(const Launch& l) { return l.program->static_shared + l.dynamic_shared; }

uint32_t linear(const uint32_t* index, const uint32_t* size) {
  return index[0] + size[0] * (index[1] + size[1] * index[2]);
}

// PTX ISA 10 "Special Registers"; the ones with .x .y .z.
const std::map<std::string, Value> kVectors = {
    {"%tid", tid},
    {"%ntid", [](const Launch& l, const Warp&, unsigned, char a) -> uint64_t { return at(l.block, a); }},
    {"%ctaid", [](const Launch&, const Warp& w, unsigned, char a) -> uint64_t { return at(w.cta->index, a); }},
    {"%nctaid", [](const Launch& l, const Warp&, unsigned, char a) -> uint64_t { return at(l.grid, a); }},
    {"%clusterid",
     [](const Launch& l, const Warp& w, unsigned, char a) -> uint64_t {
       return at(w.cta->index, a) / at(l.cluster, a);
     }},
    {"%nclusterid",
     [](const Launch& l, const Warp&, unsigned, char a) -> uint64_t { return at(l.grid, a) / at(l.cluster, a); }},
    {"%cluster_ctaid",
     [](const Launch& l, const Warp& w, unsigned, char a) -> uint64_t {
       return at(w.cta->index, a) % at(l.cluster, a);
     }},
    {"%cluster_nctaid", [](const Launch& l, const Warp&, unsigned, char a) -> uint64_t { return at(l.cluster, a); }},
};

const std::map<std::string, Value> kScalars = {
    {"%laneid", [](const Launch&, const Warp&, unsigned lane, char) -> uint64_t { return lane; }},
    {"%warpid", [](const Launch&, const Warp& w, unsigned, char) -> uint64_t { return w.id; }},
    {"%nwarpid", [](const Launch&, const Warp& w, unsigned, char) -> uint64_t { return w.cta->warps.size(); }},
    {"%smid",
     [](const Launch& l, const Warp& w, unsigned, char) -> uint64_t {
       return linear(w.cta->index, l.grid) % l.options.processors;
     }},
    {"%nsmid", [](const Launch& l, const Warp&, unsigned, char) -> uint64_t { return l.options.processors; }},
    {"%gridid", [](const Launch&, const Warp&, unsigned, char) -> uint64_t { return 0; }},
    {"%cluster_ctarank", [](const Launch&, const Warp& w, unsigned, char) -> uint64_t { return w.cta->rank; }},
    {"%cluster_nctarank",
     [](const Launch&, const Warp& w, unsigned, char) -> uint64_t { return w.cta->cluster->ctas.size(); }},
    {"%lanemask_eq", [](const Launch&, const Warp&, unsigned lane, char) -> uint64_t { return 1u << lane; }},
    {"%lanemask_le", [](const Launch&, const Warp&, unsigned lane, char) -> uint64_t { return kAll >> (31 - lane); }},
    {"%lanemask_lt", [](const Launch&, const Warp&, unsigned lane, char) -> uint64_t { return (1u << lane) - 1; }},
    {"%lanemask_ge", [](const Launch&, const Warp&, unsigned lane, char) -> uint64_t { return kAll << lane; }},
    {"%lanemask_gt",
     [](const Launch&, const Warp&, unsigned lane, char) -> uint64_t { return ~(kAll >> (31 - lane)); }},
    {"%dynamic_smem_size", [](const Launch& l, const Warp&, unsigned, char) -> uint64_t { return l.dynamic_shared; }},
    {"%total_smem_size", [](const Launch& l, const Warp&, unsigned, char) -> uint64_t { return shared_size(l); }},
    {"%aggr_smem_size",
     [](const Launch& l, const Warp&, unsigned, char) -> uint64_t { return shared_size(l) + kSharedBase; }},
    {"%reserved_smem_offset_begin", [](const Launch&, const Warp&, unsigned, char) -> uint64_t { return 0; }},
    {"%reserved_smem_offset_end", [](const Launch&, const Warp&, unsigned, char) -> uint64_t { return kSharedBase; }},
    {"%reserved_smem_offset_cap", [](const Launch&, const Warp&, unsigned, char) -> uint64_t { return kSharedBase; }},
};

bool split_axis(const std::string& name, std::string& base, char& axis) {
  if (name.size() < 3 || name[name.size() - 2] != '.') return false;
  base = name.substr(0, name.size() - 2);
  axis = name.back();
  return axis >= 'x' && axis <= 'z';
}

}  // namespace

bool special_known(const std::string& name) {
  std::string base;
  char axis = 'x';
  return kScalars.count(name) || name == "%is_explicit_cluster" ||
         (split_axis(name, base, axis) && kVectors.count(base));
}

uint64_t special_value(const std::string& name, const Launch& l, const Warp& w, unsigned lane) {
  if (name == "%is_explicit_cluster") return l.explicit_cluster;
  std::string base;
  char axis = 'x';
  if (split_axis(name, base, axis)) return kVectors.at(base)(l, w, lane, axis);
  return kScalars.at(name)(l, w, lane, axis);
}

void Counters::add(const Counters& o) {
  if (executed.size() < o.executed.size()) executed.resize(o.executed.size());
  for (size_t i = 0; i < o.executed.size(); i++) executed[i] += o.executed[i];
  if (by_warp.size() < o.by_warp.size()) by_warp.resize(o.by_warp.size());
  for (size_t i = 0; i < o.by_warp.size(); i++) by_warp[i] += o.by_warp[i];
  for (auto field :
       {&Counters::global_read, &Counters::global_written, &Counters::shared_read, &Counters::shared_written,
        &Counters::tma_read, &Counters::tma_written, &Counters::tma_transactions, &Counters::cp_async,
        &Counters::tmem_read, &Counters::tmem_written, &Counters::tensor_shared_read, &Counters::shared_wavefronts,
        &Counters::shared_accesses, &Counters::shared_least_wavefronts, &Counters::global_sectors})
    this->*field += o.*field;
  for (const auto& [kind, n] : o.flops) flops[kind] += n;
}

uint64_t Cluster::next_random() {
  random += 0x9e3779b97f4a7c15ull;
  uint64_t z = random;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

}  // namespace ptx
