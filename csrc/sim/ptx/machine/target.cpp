// CUDA programming guide, "Technical Specifications per Compute Capability". A target joins with its line here.
#include "machine/target.h"

#include "front/ir.h"

namespace ptx {

namespace {
constexpr Limits kTargets[] = {{"sm_90", 227, 228, 2048}, {"sm_100", 227, 228, 2048}, {"sm_103", 227, 228, 2048}};
}  // namespace

const Limits& limits_of(const std::string& target) {
  // sm_100a and sm_100f are sm_100 with instructions of their own.
  const std::string plain = target.substr(0, target.find_last_of("0123456789") + 1);
  std::string known;
  for (const Limits& one : kTargets) {
    if (plain == one.target) return one;
    known += (known.empty() ? "" : ", ") + std::string(one.target);
  }
  throw Error("the limits of .target '" + target + "' are not known, accepted: " + known);
}

}  // namespace ptx
