// Cooperative threads: one per Metal thread, each on a stack of its own with a guard page below it.
#pragma once
#include <cstddef>

namespace sim {

// Saves the registers that a call must keep, stores the stack pointer in *save and continues on the stack `to`.
extern "C" void attnkit_metal_switch(void** save, void* to);

// The first stack pointer of a fiber that starts in `entry`, which must never return.
void* fiber_start(char* stack_top, void (*entry)());

}  // namespace sim
