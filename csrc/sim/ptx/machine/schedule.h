// Between setting a launch up (launch.cpp) and running its clusters (schedule.cpp).
#pragma once
#include "machine/machine.h"

namespace ptx {

// What the OS threads of a launch know of one another.
struct Shared {
  std::atomic<bool> stop{false};
  std::atomic<uint32_t> resident{0};  // clusters started and not finished
  std::atomic<uint64_t> executed{0};  // warp instructions
};

std::unique_ptr<Cluster> make_cluster(Launch&, uint32_t index);
void run_workers(Launch&, unsigned threads);

}  // namespace ptx
