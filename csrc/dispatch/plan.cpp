#include "plan.h"

#include <ATen/DLConvertor.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <map>
#include <optional>
#include <shared_mutex>
#include <utility>

namespace py = pybind11;

namespace attnkit {

Functions functions;

namespace {

constexpr int64_t kPiece = 512;  // scratch begins where torch's allocations on a GPU do

// Both outlive the interpreter: whoever is last may still launch.
std::shared_mutex& rooms_lock = *new std::shared_mutex;
auto& rooms = *new std::map<std::pair<int, void*>, std::shared_ptr<const Room>>;

std::shared_ptr<const Room> room_of(int device, void* stream) {
  std::shared_lock<std::shared_mutex> read(rooms_lock);
  const auto found = rooms.find({device, stream});
  return found == rooms.end() ? nullptr : found->second;
}

[[noreturn]] void raise_error() {
  TVMFFIObjectHandle error = nullptr;
  functions.take_error(&error);
  const auto* cell = reinterpret_cast<TVMFFIErrorCell*>(static_cast<TVMFFIObject*>(error) + 1);
  const std::string kind(cell->kind.data, cell->kind.size), message(cell->message.data, cell->message.size);
  functions.release(error);
  TORCH_CHECK_VALUE(kind != "ValueError", message);
  TORCH_CHECK_TYPE(kind != "TypeError", message);
  TORCH_CHECK(false, kind == "RuntimeError" ? message : kind + ": " + message);
}

bool capturing(void* stream) {
  int status = 0;  // a stream that is not captured
  if (stream && functions.is_capturing)  // the legacy stream cannot be
    TORCH_CHECK(functions.is_capturing(stream, &status) == 0, "cuStreamIsCapturing failed");
  return status != 0;
}

}  // namespace

void offer_room(int device, uintptr_t stream, Room room) {
  std::unique_lock<std::shared_mutex> write(rooms_lock);
  auto& held = rooms[{device, reinterpret_cast<void*>(stream)}];
  if (held) {
    if (held->parts.numel() > room.parts.numel()) room.parts = held->parts;
    if (held->counters.numel() > room.counters.numel()) room.counters = held->counters;
  }
  held = std::make_shared<const Room>(std::move(room));
}

Plan::Plan(const py::object& recipe) : device_(recipe.attr("device").cast<c10::Device>()) {
  ffi_device_ = recipe.attr("ffi_device").cast<int>();
  needs_room_ = recipe.attr("needs_room").cast<bool>();
  for (const auto& made : recipe.attr("outputs").cast<std::vector<at::Tensor>>()) {
    outputs_.push_back({made.sizes().vec(), made.scalar_type()});
    allocator_ = made.storage().allocator();
  }
  for (const auto& made : recipe.attr("scratch").cast<std::vector<at::Tensor>>()) {
    scratch_.push_back(scratch_bytes_);
    scratch_bytes_ += (int64_t(made.storage().nbytes()) + kPiece - 1) / kPiece * kPiece;
    allocator_ = made.storage().allocator();
  }
  for (const auto& step : recipe.attr("launches")) {
    const auto [function, arguments] = step.cast<std::pair<uintptr_t, py::tuple>>();
    launches_.push_back({reinterpret_cast<TVMFFIObject*>(function), list(arguments), int(arguments.size())});
  }
  const py::object around = recipe.attr("around");
  if (!around.is_none()) around_ = around.ptr(), Py_INCREF(around_);
}

Plan::~Plan() {
  if (!around_) return;
  py::gil_scoped_acquire python;
  Py_DECREF(around_);
}

TVMFFIAny* Plan::list(const py::tuple& values) {
  auto& made = lists_.emplace_back();
  made.reserve(values.size());
  for (const auto& value : values) made.push_back(any(value));
  return made.data();
}

TVMFFIAny Plan::any(const py::handle& value) {
  TVMFFIAny made{};
  if (value.is_none()) {
    made.type_index = kTVMFFINone;
  } else if (py::isinstance<py::bool_>(value)) {
    made.type_index = kTVMFFIBool, made.v_int64 = value.cast<bool>();
  } else if (py::isinstance<py::int_>(value)) {
    made.type_index = kTVMFFIInt, made.v_int64 = value.cast<int64_t>();
  } else if (py::isinstance<py::float_>(value)) {
    made.type_index = kTVMFFIFloat, made.v_float64 = value.cast<double>();
  } else if (py::isinstance<py::tuple>(value)) {
    const auto values = py::reinterpret_borrow<py::tuple>(value);
    Array& array = arrays_.emplace_back();
    array = {};
    array.header.combined_ref_count = uint64_t{1} << 32 | 1;
    array.header.type_index = kTVMFFIArray;
    array.cell.data = list(values);
    array.cell.size = array.cell.capacity = int64_t(values.size());
    made.type_index = kTVMFFIArray, made.v_obj = &array.header;
  } else if (py::isinstance<Place>(value)) {
    return tensor(value.cast<const Place&>());
  } else {
    throw py::type_error("an argument of a launch is " + py::str(py::type::of(value)).cast<std::string>());
  }
  return made;
}

TVMFFIAny Plan::tensor(const Place& p) {
  DLTensor& t = tensors_.emplace_back();
  auto& shape = dims_.emplace_back(p.tensor.sizes().vec());
  auto& strides = dims_.emplace_back(p.tensor.strides().vec());
  t = {};
  t.device = {static_cast<DLDeviceType>(ffi_device_), device_.has_index() ? device_.index() : 0};
  t.ndim = int32_t(shape.size()), t.shape = shape.data(), t.strides = strides.data();
  t.dtype = at::getDLDataType(p.tensor);
  if (p.source == kConstant) {
    constants_.push_back(p.tensor);
    t.data = p.tensor.unsafeGetTensorImpl()->mutable_data();
  } else if (p.tensor.numel()) {  // of nothing the address is null, as torch says it
    patches_.push_back({&t, p.source, p.index, p.offset});
  }
  TVMFFIAny made{};
  made.type_index = kTVMFFIDLTensorPtr, made.v_ptr = &t;
  return made;
}

void* Plan::stream() const {
  void* found = nullptr;
  if (device_.is_cuda())
    TORCH_CHECK(functions.current_stream(device_.index(), &found) == 0, "torch has no stream of ", device_);
  return found;
}

at::Tensor Plan::make(const std::vector<int64_t>& shape, at::ScalarType dtype) const {
  const c10::DispatchKeySet keys(device_.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  return at::detail::empty_generic(shape, allocator_, keys, dtype, std::nullopt);
}

// A simulated launch takes the interpreter while it has this plan: who waits for the plan may not have it.
std::unique_lock<std::mutex> Plan::alone() {
  std::unique_lock<std::mutex> held(lock_, std::try_to_lock);
  if (!held.owns_lock()) {
    std::optional<py::gil_scoped_release> without;
    if (PyGILState_Check()) without.emplace();
    held.lock();
  }
  return held;
}

Ran Plan::run(const at::Tensor* const* inputs, Tensors& outputs) {
  std::optional<c10::DeviceGuard> guard;
  if (device_.is_cuda()) guard.emplace(device_);
  void* const current = stream();
  std::shared_ptr<const Room> room;
  if (needs_room_) {
    if (capturing(current)) return Ran::kCapturing;
    const auto held = alone();
    if (std::find(proven_.begin(), proven_.end(), current) == proven_.end()) return Ran::kNewStream;
    room = room_of(device_.index(), current);
  }
  for (const Output& o : outputs_) outputs.push_back(make(o.shape, o.dtype));
  at::Tensor scratch;
  if (scratch_bytes_) scratch = make({scratch_bytes_}, at::kByte);
  const auto held = alone();
  place(inputs, outputs, scratch, room ? *room : Room{});
  if (around_)
    launch_inside(inputs, outputs, scratch, room ? *room : Room{});
  else
    launch(current);
  return Ran::kYes;
}

void Plan::prove() {
  if (!needs_room_) return;
  void* const current = stream();
  const auto held = alone();
  if (room_of(device_.index(), current) && std::find(proven_.begin(), proven_.end(), current) == proven_.end())
    proven_.push_back(current);
}

void Plan::place(const at::Tensor* const* inputs, const Tensors& outputs, const at::Tensor& scratch,
                 const Room& room) {
  const auto begin = [](const at::Tensor& t) { return static_cast<char*>(t.unsafeGetTensorImpl()->mutable_data()); };
  for (const Patch& p : patches_) {
    char* base = nullptr;
    switch (p.source) {
      case kInput: base = const_cast<char*>(static_cast<const char*>(inputs[p.index]->unsafeGetTensorImpl()->data())); break;
      case kOutput: base = begin(outputs[p.index]); break;
      case kScratch: base = begin(scratch) + scratch_[p.index]; break;
      case kParts: base = begin(room.parts); break;
      case kCounters: base = begin(room.counters); break;
      case kConstant: break;
    }
    p.tensor->data = base + p.offset;
  }
}

void Plan::launch(void* stream) {
  TVMFFIStreamHandle before = nullptr;
  const int device = device_.has_index() ? device_.index() : 0;
  functions.set_stream(ffi_device_, device, stream, &before);
  int error = 0;
  for (const Launch& l : launches_) {
    TVMFFIAny result{};
    const auto* cell = reinterpret_cast<const TVMFFIFunctionCell*>(l.function + 1);
    error = cell->safe_call(l.function, l.arguments, l.count, &result);
    if (error) break;
  }
  if (before != stream) functions.set_stream(ffi_device_, device, before, nullptr);
  if (error) raise_error();
}

void Plan::launch_inside(const at::Tensor* const* inputs, const Tensors& outputs,
                         const at::Tensor& scratch, const Room& room) {
  py::gil_scoped_acquire python;
  py::list visible;
  for (const Patch& p : patches_)
    if (p.source == kInput) visible.append(*inputs[p.index]);
  for (const auto& t : outputs) visible.append(t);
  for (const auto& t : constants_) visible.append(t);
  for (const auto& t : {scratch, room.parts, room.counters})
    if (t.defined()) visible.append(t);
  const py::handle around(around_);
  around(visible, py::cpp_function([this] { launch(nullptr); }));
}

}  // namespace attnkit
