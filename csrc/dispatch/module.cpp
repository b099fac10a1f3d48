// What Python sees of it: torch_attnkit/core/native.py loads this, torch_attnkit.cuda.repeat.py makes plans for it.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>

#include "call.h"
#include "op.h"

namespace py = pybind11;
using namespace attnkit;

namespace {

// Kernels stay registered until the process ends, and may be called while it does.
auto& ops = *new std::map<std::pair<std::string, std::string>, std::shared_ptr<Op>>;  // by full name and device
auto& libraries = *new std::map<std::pair<std::string, c10::DispatchKey>, std::unique_ptr<torch::Library>>;

void implement(const std::string& space, const std::string& name, const std::string& key, const std::shared_ptr<Op>& op) {
  const auto dispatch_key = c10::parseDispatchKey(key);
  auto& library = libraries[{space, dispatch_key}];
  if (!library)
    library = std::make_unique<torch::Library>(torch::Library::IMPL, space, dispatch_key, __FILE__, __LINE__);
  const bool autograd = key.rfind("Autograd", 0) == 0;
  library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(op, autograd)));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "Eager calls that Python has planned, run by C++.";
  py::enum_<Source>(m, "Source")
      .value("INPUT", kInput)
      .value("OUTPUT", kOutput)
      .value("SCRATCH", kScratch)
      .value("PARTS", kParts)
      .value("COUNTERS", kCounters)
      .value("CONSTANT", kConstant);
  py::class_<Place>(m, "Place")
      .def(py::init<Source, int, int64_t, at::Tensor>(), py::arg("source"), py::arg("index"), py::arg("offset"),
           py::arg("tensor"))
      .def_readonly("source", &Place::source)
      .def_readonly("index", &Place::index)
      .def_readonly("offset", &Place::offset);
  m.def(
      "register",
      [](const std::string& space, const std::string& name, const std::string& device, uint64_t plain, bool host,
         size_t most, py::object direct, py::object general, py::object missed, py::object setting, py::object room) {
        const std::string full = space + "::" + name;
        const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(full.c_str(), "");
        auto op = std::make_shared<Op>(handle.schema(), plain, host, most, Answers{direct, general, missed, setting, room});
        new std::shared_ptr<Op>(op);  // its Python objects are never released: the interpreter may be gone
        implement(space, name, device, op);
        implement(space, name, "Autograd" + device, op);
        ops[{full, device}] = op;
      },
      "Register the kernels of an op for a device, CUDA or CPU, and for the device's Autograd key.");
  m.def(
      "use",
      [](uintptr_t set_stream, uintptr_t take_error, uintptr_t release, uintptr_t current_stream,
         uintptr_t is_capturing) {
        functions.set_stream = reinterpret_cast<decltype(functions.set_stream)>(set_stream);
        functions.take_error = reinterpret_cast<decltype(functions.take_error)>(take_error);
        functions.release = reinterpret_cast<decltype(functions.release)>(release);
        functions.current_stream = reinterpret_cast<decltype(functions.current_stream)>(current_stream);
        functions.is_capturing = reinterpret_cast<decltype(functions.is_capturing)>(is_capturing);
      },
      "The addresses of the functions that launches need; 0 for those of a GPU where there is none.");
  m.def("offer_room", [](int device, uintptr_t stream, at::Tensor parts, at::Tensor counters) {
    offer_room(device, stream, {std::move(parts), std::move(counters)});
  });
  using Name = const std::string&;
  m.def("clear", [](Name full, Name device) { ops.at({full, device})->clear(); }, "Forget an op's plans.");
  m.def("size", [](Name full, Name device) { return ops.at({full, device})->size(); }, "How many signatures are known.");
  m.def("repeated", [](Name full, Name device) { return ops.at({full, device})->repeated(); },
        "Calls that needed no Python.");
  m.def("ask_for_setting", [] { asks_for_setting = true; }, "From now on settings are looked up, call by call.");
  m.def("quick_packet", &quick_packet, "A packet in the place of torch's, whose plain calls C++ reads; or None.");
  m.def("switch_off", [](bool off) { switched_off += off ? 1 : -1; }, "Python runs every call until as many are on.");
}
