// What Python planned for one signature, as C++ repeats it: outputs, memory of the call's own, launches.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <deque>
#include <memory>
#include <mutex>
#include <vector>

namespace attnkit {

// Functions of libraries that Python has loaded: TVM-FFI's, torch's for CUDA, and the driver's. Those of a GPU are null
// where there is none.
struct Functions {
  decltype(&TVMFFIEnvSetStream) set_stream = nullptr;
  decltype(&TVMFFIErrorMoveFromRaised) take_error = nullptr;
  decltype(&TVMFFIObjectDecRef) release = nullptr;
  int (*current_stream)(int32_t device, void** stream) = nullptr;  // aoti_torch_get_current_cuda_stream
  int (*is_capturing)(void* stream, int* status) = nullptr;        // cuStreamIsCapturing
};
extern Functions functions;

enum Source : int { kInput, kOutput, kScratch, kParts, kCounters, kConstant };

// A tensor among the arguments of a launch: where its memory comes from, and how many bytes behind the beginning it
// starts. Its sizes, strides and dtype follow from the signature.
struct Place {
  Source source;
  int index;  // of inputs the argument of the op, of outputs and scratch which of them
  int64_t offset;
  at::Tensor tensor;
};

// The memory in which the blocks of launches on one stream meet (torch_attnkit/cuda/workspace.py).
struct Room {
  at::Tensor parts, counters;
};

using Tensors = c10::SmallVector<at::Tensor, 4>;
enum class Ran { kYes, kRefused, kCapturing, kNewStream };

class Plan {
 public:
  // From a Recipe of torch_attnkit.cuda.repeat.py. Raises TypeError for an argument that no launch here can have.
  explicit Plan(const pybind11::object& recipe);
  ~Plan();
  Plan(const Plan&) = delete;

  // Fills ``outputs``. Anything but kYes: nothing was launched, and Python must run the call.
  Ran run(const at::Tensor* const* inputs, Tensors& outputs);

  // Python has run the call on the current stream of this device: from now on there is room for it there.
  void prove();

 private:
  struct Output {
    std::vector<int64_t> shape;
    at::ScalarType dtype;
  };
  struct Patch {
    DLTensor* tensor;
    Source source;
    int index;
    int64_t offset;
  };
  struct Launch {
    TVMFFIObject* function;
    TVMFFIAny* arguments;
    int count;
  };
  // A TVM-FFI array as compiled functions read it: the cell behind the header. Nobody counts references.
  struct Array {
    TVMFFIObject header;
    TVMFFISeqCell cell;
  };

  TVMFFIAny* list(const pybind11::tuple& values);
  TVMFFIAny any(const pybind11::handle& value);
  TVMFFIAny tensor(const Place& place);
  void* stream() const;
  at::Tensor make(const std::vector<int64_t>& shape, at::ScalarType dtype) const;
  std::unique_lock<std::mutex> alone();
  void place(const at::Tensor* const* inputs, const Tensors& outputs, const at::Tensor& scratch,
             const Room& room);
  void launch(void* stream);
  void launch_inside(const at::Tensor* const* inputs, const Tensors& outputs, const at::Tensor& scratch,
                     const Room& room);

  c10::Device device_;
  int ffi_device_;  // a DLDeviceType: simulated kernels take CPU tensors for a GPU's
  c10::Allocator* allocator_ = nullptr;
  std::vector<Output> outputs_;
  std::vector<int64_t> scratch_;  // where each piece begins
  int64_t scratch_bytes_ = 0;
  bool needs_room_;
  std::vector<Launch> launches_;
  std::vector<at::Tensor> constants_;
  PyObject* around_ = nullptr;  // what a simulator wants around a launch

  // Argument lists with everything in place but addresses, which the lock guards. Their places never move.
  std::deque<std::vector<TVMFFIAny>> lists_;
  std::deque<Array> arrays_;
  std::deque<DLTensor> tensors_;
  std::deque<std::vector<int64_t>> dims_;
  std::vector<Patch> patches_;
  std::vector<void*> proven_;  // streams on which there is room
  std::mutex lock_;
};

// Tells which room there is on a stream, after Python has run a call there. Larger parts or counters replace smaller.
void offer_room(int device, uintptr_t stream, Room room);

}  // namespace attnkit
