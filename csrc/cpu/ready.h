// What csrc/dispatch calls without Python: a kernel for all calls of a signature, which lack nothing but addresses.
#pragma once

#include <cstdint>

namespace attnkit {

// Addresses of an op's tensors in the order of its schema, null for None, then those of its outputs. False: not taken.
using Ready = bool (*)(const void* kernel, const void* const* tensors);

}  // namespace attnkit
