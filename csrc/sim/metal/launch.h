// One dispatch: guarded copies of the buffers, threadgroups one after another, and what can stop them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "machine.h"

namespace sim {

struct BoundSlot {
  int index;
  size_t offset, bytes;  // inside its region
  int granule;
  bool writable;
};

// Host memory that one or more slots (overlapping tensors) are bound to. `pointers` are the places in it that take the
// device address of another slot; `written` as in Span.
struct HostRegion {
  char* host;
  size_t bytes;
  size_t residue;  // of the device address modulo 16
  bool writable;
  std::vector<BoundSlot> slots;
  std::vector<std::pair<size_t, int>> pointers;
  char* written;
};

struct Launch {
  Launcher run;
  void* image;
  int64_t* turns;  // that are left to the running threadgroup
  uint32_t grid[3], group[3];
  std::vector<HostRegion> regions;
  std::vector<ThreadgroupVariable> variables;
  size_t threadgroup_bytes;
  Options options;
};

struct Outcome {
  bool ok = true;
  bool memory_fault = false;  // a checked launch can say more about it
  std::string error;
};

// Nothing is written to host memory unless the launch succeeds.
Outcome launch(Launch& l);

}  // namespace sim
