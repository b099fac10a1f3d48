// Setting a launch up: memory that the kernel may touch, and clusters with their CTAs, warps and first register values.
#include <algorithm>
#include <thread>

#include "check/check.h"
#include "front/decode.h"
#include "machine/schedule.h"
#include "machine/target.h"

namespace ptx {

namespace {

constexpr uint64_t kParamAlign = 64;  // of a TMA descriptor
constexpr uint8_t kPoison = 0xff;     // NaN in every format that has one

uint64_t symbol_value(const Launch& launch, const Preset& p, uint32_t rank) {
  const Program& program = *launch.program;
  switch (home_of(program, p.name)) {
    // An address of one's own carries the rank of the CTA: kernels clear its bits to reach the first CTA of a pair.
    case Home::shared: return (program.symbols.at(p.name) | rank << kRankShift) + p.bits;
    case Home::param:
      for (const Param& param : program.function->params)
        if (param.name == p.name) return launch.param_base + param.offset + p.bits;
      return 0;
    default: return program.symbols.at(p.name) + p.bits;
  }
}

void fill(const Launch& launch, Warp& w, const Preset& p) {
  for (unsigned l = 0; l < kLanes; l++) {
    uint64_t value = p.bits;
    if (p.kind == Preset::special) value = special_value(p.name, launch, w, l);
    if (p.kind == Preset::symbol) value = symbol_value(launch, p, w.cta->rank);
    if (p.bytes == 8) w.v64(p.slot).x[l] = value;
    else w.v32(p.slot).x[l] = static_cast<uint32_t>(value);
  }
  if (p.kind == Preset::predicate) w.pred(p.slot) = p.bits != 0 ? kAll : 0;
}

std::unique_ptr<Warp> make_warp(const Launch& launch, Cta& cta, uint32_t id) {
  auto w = std::make_unique<Warp>();
  const uint32_t threads = launch.block[0] * launch.block[1] * launch.block[2];
  w->cta = &cta;
  w->id = id;
  w->registers = registers_at_launch(threads);
  w->live = threads - id * kLanes >= kLanes ? kAll : (1u << (threads - id * kLanes)) - 1;
  w->file.resize(launch.program->slots);
  w->local.assign(kLanes * launch.program->local_bytes, launch.options.poison ? kPoison : 0);
  w->fragments.reserve(2 * kLanes);  // never more than lanes: handlers keep references while they split
  Fragment all;
  all.lanes = w->live;
  w->fragments.push_back(all);
  return w;
}

std::unique_ptr<Cta> make_cta(Launch& launch, Cluster& cluster, uint32_t rank, const uint32_t* index) {
  auto cta = std::make_unique<Cta>();
  cta->cluster = &cluster;
  cta->rank = rank;
  std::copy(index, index + 3, cta->index);
  cta->shared_bytes = launch.program->dynamic_base + launch.dynamic_shared;
  cta->shared_storage.assign(cta->shared_bytes + 2048, launch.options.poison ? kPoison : 0);
  const uint64_t base = reinterpret_cast<uint64_t>(cta->shared_storage.data());
  cta->shared = cta->shared_storage.data() + ((base + 1023) / 1024 * 1024 - base);
  const uint32_t threads = launch.block[0] * launch.block[1] * launch.block[2];
  for (uint32_t i = 0; i * kLanes < threads; i++) cta->warps.push_back(make_warp(launch, *cta, i));
  return cta;
}

void add_range(Launch& launch, uint64_t begin, uint64_t bytes, bool writable, const std::string& name) {
  if (bytes != 0) launch.ranges.push_back(Range{begin, begin + bytes, writable, name});
}

// Parameters and module variables join what the host registered.
void register_memory(Launch& launch) {
  const Program& p = *launch.program;
  add_range(launch, launch.param_base, p.function->param_bytes, false, "the kernel's parameters");
  for (const auto* variables : {&p.module->globals, &p.module->constants})
    for (const auto& [name, v] : *variables)
      add_range(launch, p.symbols.at(name), std::max<uint64_t>(v.size, v.initial.size()),
                variables == &p.module->globals, name);
  std::sort(launch.ranges.begin(), launch.ranges.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < launch.ranges.size(); i++)
    if (launch.ranges[i].begin < launch.ranges[i - 1].end)
      throw Error("memory ranges '" + launch.ranges[i - 1].name + "' and '" + launch.ranges[i].name + "' overlap");
}

void check_shape(const Launch& launch) {
  const Function& f = *launch.program->function;
  const uint64_t threads = 1ull * launch.block[0] * launch.block[1] * launch.block[2];
  auto refuse = [&](const std::string& what) { throw Error("kernel " + f.name + ": " + what); };
  if (threads == 0 || threads > 1024)
    refuse("a block of " + std::to_string(threads) + " threads; 1 to 1024 are possible");
  uint64_t required = 1, most = 1;
  for (int i = 0; i < 3; i++) {
    required *= f.reqntid[i];
    most *= f.maxntid[i];
    if (f.reqntid[0] != 0 && f.reqntid[i] != launch.block[i])
      refuse(".reqntid is " + std::to_string(f.reqntid[0]) + ", " + std::to_string(f.reqntid[1]) + ", " +
             std::to_string(f.reqntid[2]) + ", the block is " + std::to_string(launch.block[0]) + ", " +
             std::to_string(launch.block[1]) + ", " + std::to_string(launch.block[2]));
    if (launch.cluster[i] == 0 || launch.grid[i] % launch.cluster[i] != 0)
      refuse("a grid of " + std::to_string(launch.grid[i]) + " CTAs along axis " + std::to_string(i) +
             " is no multiple of the cluster's " + std::to_string(launch.cluster[i]));
  }
  if (most != 0 && threads > most)
    refuse(".maxntid allows " + std::to_string(most) + " threads, the block has " + std::to_string(threads));
  if (launch.params.size() < f.param_bytes)
    refuse("parameters of " + std::to_string(launch.params.size()) + " bytes, " + std::to_string(f.param_bytes) +
           " are needed");
  const Limits& limits = limits_of(launch.program->module->target);
  if (launch.cluster[0] * launch.cluster[1] * launch.cluster[2] > 1 && !has_clusters(limits))
    refuse(std::string("a cluster of CTAs; there are none on ") + limits.target);
  // Its addresses begin behind the driver's.
  if (launch.program->dynamic_base + launch.dynamic_shared > (limits.shared << 10) + kSharedBase)
    refuse(std::to_string(launch.program->static_shared) + " + " + std::to_string(launch.dynamic_shared) +
           " bytes of shared memory; a CTA has at most " + std::to_string(limits.shared) + " KB on " + limits.target);
}

}  // namespace

std::unique_ptr<Cluster> make_cluster(Launch& launch, uint32_t index) {
  auto cluster = std::make_unique<Cluster>();
  cluster->launch = &launch;
  cluster->index = index;
  cluster->random = launch.options.seed * 0x9e3779b97f4a7c15ull + index;
  const uint32_t* size = launch.cluster;
  const uint32_t across = launch.grid[0] / size[0], down = launch.grid[1] / size[1];
  const uint32_t first[3] = {index % across * size[0], index / across % down * size[1],
                             index / (across * down) * size[2]};
  for (uint32_t rank = 0; rank < size[0] * size[1] * size[2]; rank++) {
    const uint32_t at[3] = {first[0] + rank % size[0], first[1] + rank / size[0] % size[1],
                            first[2] + rank / (size[0] * size[1])};
    cluster->ctas.push_back(make_cta(launch, *cluster, rank, at));
  }
  for (const auto& cta : cluster->ctas) {  // %cluster_nctarank looks at all CTAs
    for (const auto& w : cta->warps)
      for (const Preset& p : launch.program->presets) fill(launch, *w, p);
    if (launch.checker != nullptr) launch.checker->begin(*cta);
  }
  return cluster;
}

void Launch::run() {
  check_shape(*this);
  params.resize(params.size() + kParamAlign);
  const uint64_t base = reinterpret_cast<uint64_t>(params.data());
  param_base = (base + kParamAlign - 1) / kParamAlign * kParamAlign;
  std::memmove(reinterpret_cast<void*>(param_base), params.data(), params.size() - kParamAlign);
  explicit_cluster = explicit_cluster || cluster[0] * cluster[1] * cluster[2] > 1;
  register_memory(*this);
  const uint32_t clusters = grid[0] / cluster[0] * (grid[1] / cluster[1]) * (grid[2] / cluster[2]);
  for (uint32_t i = 0; i < clusters; i++) waiting.push_back(i);
  if (options.check) checker = std::make_unique<Checker>(*this);
  unsigned threads = options.threads != 0 ? options.threads : std::thread::hardware_concurrency();
  if (options.check) threads = 1;  // the checker's clocks are not shared between threads
  run_workers(*this, std::max(1u, std::min(threads, clusters)));
}

}  // namespace ptx
