#include "host.h"

#include <ATen/EmptyTensor.h>
#include <torch/csrc/utils/pybind.h>

#include <tuple>

namespace py = pybind11;

namespace attnkit {

HostPlan::HostPlan(const py::object& kernel, const std::vector<at::Tensor>& outputs, std::vector<size_t> tensors)
    : kernel_(kernel.ptr()), tensors_(std::move(tensors)) {
  const auto [function, state, count] = kernel.attr("ready").cast<std::tuple<uintptr_t, uintptr_t, size_t>>();
  function_ = reinterpret_cast<Ready>(function), state_ = reinterpret_cast<const void*>(state);
  for (const auto& made : outputs) outputs_.push_back({made.sizes().vec(), made.scalar_type()});
  TORCH_CHECK(count == tensors_.size() + outputs_.size(), "a kernel of csrc/cpu takes ", count, " tensors, its op has ",
              tensors_.size() + outputs_.size());
  Py_INCREF(kernel_);
}

HostPlan::~HostPlan() {
  py::gil_scoped_acquire python;
  Py_DECREF(kernel_);
}

bool HostPlan::run(const at::Tensor* const* inputs, Tensors& outputs) const {
  c10::SmallVector<const void*, 24> addresses;
  for (size_t i : tensors_) addresses.push_back(inputs[i] ? inputs[i]->unsafeGetTensorImpl()->data() : nullptr);
  for (const auto& [shape, dtype] : outputs_) {
    outputs.push_back(at::detail::empty_cpu(shape, dtype));
    addresses.push_back(outputs.back().unsafeGetTensorImpl()->mutable_data());
  }
  return function_(state_, addresses.data());
}

}  // namespace attnkit
