// Arrivals on mbarriers by other units' asynchronous operations.
#pragma once
#include "check/check.h"

namespace ptx {

// An arrival with `count` by the operation `by` (null when nothing is checked) on the mbarrier at `offset` of `owner`:
// fails unless it is valid and expects that many, and completes its phase when due. `issuer`: for the error text.
void mbarrier_arrive(const Context& issuer, Cta& owner, uint32_t offset, uint32_t count, const AsyncRef& by);

}  // namespace ptx
