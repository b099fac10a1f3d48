// What a multiprocessor of each target has.
#pragma once
#include <string>

namespace ptx {

// Sizes in KB. A CTA may have `shared`; the driver keeps one more KB for each that is resident.
struct Limits {
  const char* target;                        // of .target: sm_90 stands for sm_90a as well
  unsigned shared, shared_of_processor, threads_of_processor;
};
const Limits& limits_of(const std::string& target);  // Error when it is not known

}  // namespace ptx
