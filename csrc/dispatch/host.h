// What repeats a call on the CPU: outputs, and one function of csrc/cpu that takes nothing but addresses.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <utility>
#include <vector>

#include "../cpu/ready.h"
#include "plan.h"

namespace attnkit {

class HostPlan {
 public:
  // From a kernel and what a call returned (``ready`` of torch_attnkit/core/native.py); ``tensors`` are the arguments of
  // the op that are tensors, or None in the place of one.
  HostPlan(const pybind11::object& kernel, const std::vector<at::Tensor>& outputs, std::vector<size_t> tensors);
  ~HostPlan();
  HostPlan(const HostPlan&) = delete;

  // Fills ``outputs``. False: the kernel does not take the call, and Python must run it.
  bool run(const at::Tensor* const* inputs, Tensors& outputs) const;

 private:
  PyObject* kernel_;  // keeps what state_ points to
  Ready function_;
  const void* state_;
  std::vector<size_t> tensors_;
  std::vector<std::pair<std::vector<int64_t>, at::ScalarType>> outputs_;
};

}  // namespace attnkit
