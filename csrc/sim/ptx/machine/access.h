// The lanes' accesses to memory, as ld, st, atom and red share them: where an address leads, whether it may, what it
// costs.
#pragma once
#include "front/decode.h"

namespace ptx {

// The state space that an instruction names (PTX ISA 5.1).
enum class Window : uint8_t { generic, global, shared, local, param, constant };

// .weak, or a strong access with its meaning for other threads (PTX ISA 8 "Memory Consistency Model").
struct Order {
  bool strong = false, acquire = false, release = false;
  uint8_t reach = 2;  // Reach: 0 cta, 1 cluster, 2 gpu, 3 sys
};

struct Access {  // an Op's `extra`
  Window window = Window::generic;
  Order order;
  unsigned address_bytes = 8;
  bool constant = false;  // .nc
};

// The host pointers of `bytes` at the addresses of the lanes in `mask`; checks alignment and bounds, tells the checker
// and counts. `atomic`: the checker hears of an atomic operation.
void reach(Context&, const Access&, const uint64_t* address, unsigned bytes, bool read, bool write, bool atomic,
           uint8_t** pointer);

// Takes a state space from the modifiers; `fallback` when none is named.
Window take_window(Modifiers&, Window fallback);
// .weak .relaxed .acquire .release .acq_rel .volatile .mmio with their scope.
Order take_order(Decoder&, Modifiers&);
// The address operand with its window; a symbol that a .param or .shared names is checked against it.
void set_address(Decoder&, Op&, const Operand& memory, Access&, Slot& slot);
// The record of an operation.
inline const Access& access_of(const Op& op) { return *static_cast<const Access*>(op.extra.get()); }

}  // namespace ptx
