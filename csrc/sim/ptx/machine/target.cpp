// CUDA programming guide, "Technical Specifications per Compute Capability"; PTX ISA, "Target ISA Notes" of each
// instruction, tried with ptxas 13.5. A target joins with its line in kTargets, alone on it: what a row of the table is
// seen with counts the lines of its own target (torch_attnkit/digest.py).
#include "machine/target.h"

#include <algorithm>

namespace ptx {

namespace {
enum Kind : unsigned {
  kFp8 = 1,        // conversions and products of E4M3 and E5M2
  kAsync = 2,      // bulk copies, transactions of mbarriers, clusters, launches ahead of time, sums of bf16 pairs
  kWgmma = 4,
  kPairs = 8,      // f32x2, maxima of three, loads of 32 bytes, gathers by TMA, clusterlaunchcontrol
  kTcgen05 = 16,   // and what else of a B200 no GPU of sm_120 has
  kFp4 = 32,       // conversions of E2M1 and UE8M0, ldmatrix of bytes
  kBlocks = 64,    // mma.sync with a kind and scales of blocks
  kRegisters = 128  // setmaxnreg
};
constexpr unsigned kHopper = kFp8 | kAsync, kBlackwell = kHopper | kPairs, kB200 = kTcgen05 | kFp4 | kRegisters,
                   kGeForce = kFp4 | kBlocks | kRegisters;
constexpr Limits kTargets[] = {
    {"sm_80", 163, 164, 2048, 0, 0},
    {"sm_86", 99, 100, 1536, 0, 0},
    {"sm_89", 99, 100, 1536, kFp8, 0},
    {"sm_90", 227, 228, 2048, kHopper, kWgmma | kRegisters},
    {"sm_100", 227, 228, 2048, kBlackwell, kB200},
    {"sm_103", 227, 228, 2048, kBlackwell, kB200},
    {"sm_120", 99, 100, 1536, kBlackwell, kGeForce},
    {"sm_121", 99, 100, 1536, kBlackwell, kGeForce},
};

// An opcode, a modifier that begins so ("": any, or none), the kind of instructions to which both belong.
struct Rule {
  const char *root, *modifier;
  unsigned kind;
};
constexpr Rule kRules[] = {
    {"wgmma", "", kWgmma},
    {"tcgen05", "", kTcgen05},
    {"redux", "f32", kTcgen05},
    {"setmaxnreg", "", kRegisters},
    {"griddepcontrol", "", kAsync},
    {"elect", "", kAsync},
    {"stmatrix", "", kAsync},
    {"mapa", "", kAsync},
    {"getctarank", "", kAsync},
    {"tensormap", "", kAsync},
    {"cp", "bulk", kAsync},
    {"cp", "reduce", kAsync},
    {"cp", "tile::gather4", kPairs},
    {"clusterlaunchcontrol", "", kPairs},
    {"mbarrier", "try_wait", kAsync},
    {"mbarrier", "expect_tx", kAsync},
    {"mbarrier", "complete_tx", kAsync},
    {"barrier", "cluster", kAsync},
    {"fence", "proxy", kAsync},
    {"fence", "mbarrier_init", kAsync},
    {"st", "async", kAsync},
    {"red", "async", kAsync},
    {"red", "v", kAsync},
    {"red", "bf16", kAsync},
    {"atom", "b128", kAsync},
    {"ld", "shared::cluster", kAsync},
    {"st", "shared::cluster", kAsync},
    {"atom", "shared::cluster", kAsync},
    {"ex2", "bf16", kAsync},
    {"tanh", "bf16", kAsync},
    {"add", "bf16", kAsync},
    {"sub", "bf16", kAsync},
    {"mul", "bf16", kAsync},
    {"add", "f32x2", kPairs},
    {"sub", "f32x2", kPairs},
    {"mul", "f32x2", kPairs},
    {"fma", "f32x2", kPairs},
    {"ld", "v8", kPairs},
    {"st", "v8", kPairs},
    {"cvt", "e4m3", kFp8},
    {"cvt", "e5m2", kFp8},
    {"cvt", "e2m1", kFp4},
    {"cvt", "e2m3", kFp4},
    {"cvt", "e3m2", kFp4},
    {"cvt", "ue8m0", kFp4},
    {"mma", "e4m3", kFp8},
    {"mma", "e5m2", kFp8},
    {"mma", "kind::", kBlocks},
    {"ldmatrix", "b8", kFp4},
    {"ldmatrix", "m16n16", kFp4},
    {"ldmatrix", "m8n16", kFp4},
};

std::string plain(const std::string& target) { return target.substr(0, target.find_last_of("0123456789") + 1); }

const Limits* found(const std::string& target) {
  const std::string wanted = plain(target);
  const auto at = std::find_if(std::begin(kTargets), std::end(kTargets),
                               [&](const Limits& one) { return wanted == one.target; });
  return at == std::end(kTargets) ? nullptr : at;
}

bool fits(const Rule& rule, const Statement& s) {
  const std::string modifier = rule.modifier;
  return s.parts[0] == rule.root &&
         (modifier.empty() || std::any_of(s.parts.begin() + 1, s.parts.end(), [&](const std::string& part) {
            return part.compare(0, modifier.size(), modifier) == 0;
          }));
}

// fmax of three: max.f32 d, a, b, c.
bool of_three(const Statement& s) {
  return (s.parts[0] == "max" || s.parts[0] == "min") && s.parts.back() == "f32" && s.operands.size() == 4;
}
}  // namespace

const Limits& limits_of(const std::string& target) {
  if (const Limits* limits = found(target)) return *limits;
  std::string known;
  for (const Limits& one : kTargets) known += (known.empty() ? "" : ", ") + std::string(one.target);
  throw Error("the limits of .target '" + target + "' are not known, accepted: " + known);
}

bool is_known(const Statement& s, const std::string& target) {
  const Limits* limits = found(target);
  if (limits == nullptr) return true;
  const unsigned known = limits->known | (plain(target) == target ? 0 : limits->own);
  const auto lacking = [&](unsigned kind) { return (known & kind) == 0; };
  return !(lacking(kPairs) && of_three(s)) &&
         std::none_of(std::begin(kRules), std::end(kRules),
                      [&](const Rule& rule) { return lacking(rule.kind) && fits(rule, s); });
}

bool has_clusters(const Limits& limits) { return (limits.known & kAsync) != 0; }

}  // namespace ptx
