// From Python to torch's dispatcher in one step: packets that read the arguments of a call themselves.
#pragma once

#include <pybind11/pybind11.h>

namespace attnkit {

// What torch.ops.<space>.<op> may be instead of ``original``: a packet of a subclass of torch's OpOverloadPacket, whose
// calls C++ reads where they are plain, and leaves to the base class where they are not. None: it reads no such schema.
pybind11::object quick_packet(const pybind11::object& original);

}  // namespace attnkit
