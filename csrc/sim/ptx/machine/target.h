// What a multiprocessor of each target has, and which instructions it knows.
#pragma once
#include <string>

#include "front/ir.h"

namespace ptx {

// Sizes in KB. A CTA may have `shared`; the driver keeps one more KB for each that is resident.
struct Limits {
  const char* target;                        // of .target: sm_90 stands for sm_90a as well
  unsigned shared, shared_of_processor, threads_of_processor;
  unsigned known, own;                       // kinds of instructions; `own` under sm_90a or sm_100f, not under sm_90
};
const Limits& limits_of(const std::string& target);  // Error when it is not known

// Whether ptxas knows an instruction for the target. A .target without limits has all.
bool is_known(const Statement& s, const std::string& target);
bool has_clusters(const Limits& limits);

}  // namespace ptx
