// One op behind torch's dispatcher: a boxed kernel that looks its calls up and repeats what Python has planned.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <atomic>
#include <memory>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "host.h"
#include "key.h"
#include "plan.h"

namespace attnkit {

extern std::atomic<int> switched_off;      // while more than 0, Python runs every call
extern std::atomic<bool> asks_for_setting;  // false until something in this process was set

// What Python has to say about an op; these functions take its arguments by position.
struct Answers {
  pybind11::object direct;   // runs a call by Python's own plan
  pybind11::object general;  // runs a call of the Autograd key that is not plain
  pybind11::object missed;   // runs a call and returns (result, what a plan is made of | None: not yet | False: never)
  pybind11::object setting;  // None, or a function: the simulated arch that CPU tensors belong to now, a str or None
  pybind11::object room;     // offers the room of a device's current stream
};

// Shared by an op's kernels; lives as long as the process.
class Op {
 public:
  // ``host``: calls of csrc/cpu are repeated, for which addresses decide nothing, and nothing that is simulated. Else
  // launches are, on a GPU or, in tests, on a simulated one.
  Op(const c10::FunctionSchema& schema, uint64_t plain, bool host, size_t most, Answers answers);

  void call(c10::DispatchKeySet keys, torch::jit::Stack* stack, bool autograd);
  void clear();
  size_t size();
  uint64_t repeated() const { return repeated_; }

 private:
  struct Entry {
    std::vector<uint64_t> key;
    std::unique_ptr<Plan> plan;  // neither: Python runs such calls
    std::unique_ptr<HostPlan> host;
  };
  using Given = c10::SmallVector<const at::Tensor*, 24>;  // by argument; null where there is no tensor

  bool put(const torch::jit::Stack& stack, Given& given, Key& key) const;
  bool put_setting(Key& key) const;
  bool overlap(const Given& given) const;
  std::shared_ptr<Entry> find(const Key& key, uint64_t hash);
  void keep(const Key& key, uint64_t hash, std::shared_ptr<Entry> entry);
  void miss(const Key& key, uint64_t hash, torch::jit::Stack* stack);
  pybind11::tuple arguments(const torch::jit::Stack& stack) const;
  void answer(torch::jit::Stack* stack, const pybind11::object& result) const;
  void python(const pybind11::object& function, torch::jit::Stack* stack) const;

  const size_t count_;                // of arguments
  const size_t returns_;              // of results
  std::vector<size_t> mutated_;       // arguments that are written to
  std::vector<size_t> tensors_;       // arguments that are tensors
  std::vector<bool> dtypes_;          // arguments that are dtypes, which IValues hold as numbers
  const uint64_t plain_;              // the key set of a call with nothing between Autograd and the backend
  const bool host_;
  const size_t most_;                 // entries
  const Answers answers_;
  std::atomic<uint64_t> repeated_{0};  // calls that needed no Python
  std::unordered_map<uint64_t, std::shared_ptr<Entry>> entries_;
  std::shared_mutex lock_;
};

// Its registration for one dispatch key.
class Kernel : public c10::OperatorKernel {
 public:
  Kernel(std::shared_ptr<Op> op, bool autograd) : op_(std::move(op)), autograd_(autograd) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    op_->call(keys, stack, autograd_);
  }

 private:
  std::shared_ptr<Op> op_;
  bool autograd_;
};

}  // namespace attnkit
