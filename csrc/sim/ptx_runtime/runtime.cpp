// The CUDA runtime that host code compiled by CuTeDSL finds when its kernels are simulated.
//
// Such code calls the runtime through some twenty wrappers that NVIDIA's libcute_dsl_runtime.so exports. Here are the
// same functions under names of the same length whose first letter is an S: torch_attnkit/sim/ptx/runtime.py writes
// these names into what it loads. So both runtimes can be in one process, and neither answers for the other.
// "Devices" are simulated, their memory is the host's; a launch goes to a Python function, with all that it needs.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace py = pybind11;

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kUnknown = 999;  // cudaError_t
constexpr uint32_t kFatbin = 0xba55ed50;
constexpr int kOptInSharedBytes = 227 << 10;  // of sm_90 and sm_100: CUDA C++ Programming Guide, compute capabilities

struct Dim3 {
  uint32_t x, y, z;
};
// cudaLaunchAttribute: an id, and 64 bytes that depend on it.
struct Attribute {
  int32_t id, padding;
  union {
    char bytes[64];
    Dim3 dims;
    int32_t number;
  } value;
};
static_assert(sizeof(Attribute) == 72, "layout of cudaLaunchAttribute");
// cudaLaunchConfig_t
struct Config {
  Dim3 grid, block;
  size_t dynamic_shared;
  void* stream;
  Attribute* attributes;
  uint32_t count;
};
enum AttributeId { kCooperative = 2, kClusterDimension = 4 };
// What changes when or how fast a kernel runs, and nothing that it computes: access policy window, synchronisation
// policy, cluster scheduling, programmatic serialisation, priority, memory domains, shared memory carveout.
constexpr int kNoEffect[] = {0, 1, 3, 5, 6, 8, 9, 10, 14};

struct Library;
struct Kernel {
  Library* library;
  std::string name;
};
struct Library {
  uint64_t id;
  std::string image;  // the fat binary
  std::vector<std::unique_ptr<Kernel>> kernels;
};

// All of this outlives the process' other parts: libraries unload what they loaded when the process ends, in any order.
// No Python runs under the lock: a thread that waits for the interpreter may hold it.
std::mutex& lock = *new std::mutex;
auto& libraries = *new std::map<void*, std::unique_ptr<Library>>;  // by handle
auto& kernels = *new std::map<void*, Kernel*>;
uint64_t next_id = 1;
py::object* on_launch = nullptr;
py::object* encode_tensor_map = nullptr;

// The last failure of this thread, for the host function that asks for words.
thread_local std::string failure_kind = "RuntimeError", failure;

int fail(const std::string& what) {
  failure_kind = "RuntimeError";
  failure = what;
  return kUnknown;
}

Kernel* kernel_of(void* handle) {
  std::lock_guard<std::mutex> hold(lock);
  auto found = kernels.find(handle);
  return found == kernels.end() ? nullptr : found->second;
}

uint64_t load(const void* code, void** handle) {
  const auto* bytes = static_cast<const uint8_t*>(code);
  uint32_t magic;
  uint16_t header;
  uint64_t size;
  std::memcpy(&magic, bytes, 4);
  std::memcpy(&header, bytes + 6, 2);
  std::memcpy(&size, bytes + 8, 8);
  if (magic != kFatbin) return 0;
  auto library = std::make_unique<Library>();
  library->image.assign(static_cast<const char*>(code), header + size);
  std::lock_guard<std::mutex> hold(lock);
  const uint64_t id = library->id = next_id++;
  *handle = library.get();
  libraries[*handle] = std::move(library);
  return id;
}

void unload(void* handle) {
  std::lock_guard<std::mutex> hold(lock);
  auto found = libraries.find(handle);
  if (found == libraries.end()) return;
  for (auto& kernel : found->second->kernels) kernels.erase(kernel.get());
  libraries.erase(found);
}

py::tuple three(Dim3 d) { return py::make_tuple(d.x, d.y, d.z); }

// Hands a launch to Python: (library, kernel, grid, block, cluster, shared bytes, cooperative, address of the
// parameters' addresses) -> None, or (kind of error, message).
int launch(const Config& config, const Kernel& kernel, void** arguments) {
  Dim3 cluster = {1, 1, 1};
  bool cooperative = false;
  for (uint32_t i = 0; i < config.count; i++) {
    const Attribute& a = config.attributes[i];
    bool known = a.id == kCooperative || a.id == kClusterDimension;
    for (int id : kNoEffect) known |= a.id == id;
    if (!known) return fail("launch attribute " + std::to_string(a.id) + " is not simulated");
    if (a.id == kClusterDimension) cluster = a.value.dims;
    if (a.id == kCooperative) cooperative = a.value.number != 0;
  }
  py::gil_scoped_acquire python;
  if (!on_launch) return fail("no simulator is loaded");
  try {
    const py::object answer =
        (*on_launch)(kernel.library->id, kernel.name, three(config.grid), three(config.block), three(cluster),
                     config.dynamic_shared, cooperative, reinterpret_cast<uint64_t>(arguments));
    if (answer.is_none()) return kSuccess;
    const auto words = answer.cast<std::pair<std::string, std::string>>();
    failure_kind = words.first;
    failure = words.second;
    return kUnknown;
  } catch (const std::exception& e) {
    return fail(e.what());
  }
}

template <typename T>
std::vector<uint64_t> numbers(const T* first, uint32_t count) {
  return std::vector<uint64_t>(first, first + count);
}

// TVMFFIErrorSetRaisedFromCStrParts, which the host function passes in.
using SetRaised = void (*)(const char* kind, const char** parts, int32_t count);
void raise(void* setter) {
  const char* parts[] = {failure.c_str()};
  reinterpret_cast<SetRaised>(setter)(failure_kind.c_str(), parts, 1);
}

}  // namespace

#define RUNTIME extern "C" __attribute__((visibility("default")))

RUNTIME int ScudaLibraryLoadData(void** library, const void* code, void*, void*, uint32_t, void*, void*, uint32_t) {
  return load(code, library) ? kSuccess : fail("device code in a form other than a fat binary");
}

RUNTIME int ScudaLibraryUnload(void* library) {
  unload(library);
  return kSuccess;
}

RUNTIME int ScudaLibraryGetKernel(void** kernel, void* library, const char* name) {
  std::lock_guard<std::mutex> hold(lock);
  auto found = libraries.find(library);
  if (found == libraries.end()) return fail("a kernel of a library that is not loaded");
  auto& mine = found->second->kernels;
  mine.push_back(std::make_unique<Kernel>(Kernel{found->second.get(), name}));
  *kernel = mine.back().get();
  kernels[*kernel] = mine.back().get();
  return kSuccess;
}

// The limits that these raise do not bind here: the simulator checks a launch against the hardware's.
RUNTIME int ScudaFuncSetAttribute(void*, int, int) { return kSuccess; }
RUNTIME int ScudaKernelSetAttributeForDevice(void*, int, int, int) { return kSuccess; }

RUNTIME int ScuKernelGetAttribute(int* value, int attribute, void*, int) {
  if (attribute != 1) return fail("kernel attribute " + std::to_string(attribute) + " is not simulated");
  *value = 0;  // static shared memory: CuTeDSL subtracts it from what a launch may ask for
  return kSuccess;
}

RUNTIME int ScudaGetDevice(int* device) {
  *device = 0;
  return kSuccess;
}

RUNTIME int ScudaSetDevice(int device) { return device == 0 ? kSuccess : kInvalidValue; }

RUNTIME int ScudaGetDeviceCount(int* count) {
  *count = 1;
  return kSuccess;
}

RUNTIME int ScudaDeviceGetAttribute(int* value, int attribute, int) {
  if (attribute != 97) return fail("device attribute " + std::to_string(attribute) + " is not simulated");
  *value = kOptInSharedBytes;
  return kSuccess;
}

RUNTIME int ScudaDeviceSynchronize() { return kSuccess; }
RUNTIME int ScudaStreamSynchronize(void*) { return kSuccess; }

RUNTIME int ScudaLaunchKernelEx(const Config* config, void* kernel, void** arguments) {
  const Kernel* found = kernel_of(kernel);
  return found ? launch(*config, *found, arguments) : fail("launch of a kernel that is not loaded");
}

// The arguments of cuTensorMapEncodeTiled, with its enumerations as numbers.
RUNTIME int ScuTensorMapEncodeTiled(void* map, int type, uint32_t rank, void* address, const uint64_t* sizes,
                                    const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave,
                                    int swizzle, int promotion, int fill) {
  py::gil_scoped_acquire python;
  if (!encode_tensor_map) return fail("no simulator is loaded");
  try {
    const auto bytes = (*encode_tensor_map)(type, reinterpret_cast<uint64_t>(address), numbers(sizes, rank),
                                            numbers(strides, rank - 1), numbers(box, rank), numbers(steps, rank),
                                            interleave, swizzle, promotion, fill)
                           .cast<std::string>();
    std::memcpy(map, bytes.data(), bytes.size());
    return kSuccess;
  } catch (const std::exception& e) {
    return fail(e.what());
  }
}

// A failed launch is kept where Python's caller finds it, so the process may go on to there.
RUNTIME void Suda_dialect_assert_success(int) {}
RUNTIME void Suda_dialect_print_on_error(int) {}

RUNTIME const char* Suda_dialect_get_error_name(int error) { return error ? failure.c_str() : "cudaSuccess"; }

RUNTIME int Suda_dialect_init_library_once(void** state, int (*init)(void**), int (*load_to_device)(void**, int), void*) {
  if (*state) return kSuccess;
  void* library = nullptr;
  int error = init(&library);
  if (!error && load_to_device) error = load_to_device(&library, 0);
  if (!error) *state = library;
  return error;
}

RUNTIME void Suda_dialect_unload_library_once(void** state) {
  if (state && *state) unload(*state);
}

RUNTIME void SuteDSLRT_TVMFFISetRaisedCudaError(void* setter, int) { raise(setter); }
RUNTIME void SuteDSLRT_TVMFFISetRaisedCudaLaunchError(void* setter, int) { raise(setter); }

PYBIND11_MODULE(_ptx_runtime, m) {
  m.doc() = "The CUDA runtime of simulated CuTeDSL kernels.";
  m.attr("symbols") = py::make_tuple(
      "_cudaLibraryLoadData", "_cudaLibraryUnload", "_cudaLibraryGetKernel", "_cudaFuncSetAttribute",
      "_cudaKernelSetAttributeForDevice", "_cuKernelGetAttribute", "_cudaGetDevice", "_cudaSetDevice",
      "_cudaGetDeviceCount", "_cudaDeviceGetAttribute", "_cudaDeviceSynchronize", "_cudaStreamSynchronize",
      "_cudaLaunchKernelEx", "_cuTensorMapEncodeTiled", "cuda_dialect_assert_success", "cuda_dialect_print_on_error",
      "cuda_dialect_get_error_name", "cuda_dialect_init_library_once", "cuda_dialect_unload_library_once",
      "CuteDSLRT_TVMFFISetRaisedCudaError", "CuteDSLRT_TVMFFISetRaisedCudaLaunchError");
  m.def("install", [](py::object launch, py::object encode) {
    on_launch = new py::object(std::move(launch));
    encode_tensor_map = new py::object(std::move(encode));
  });
  m.def("image", [](uint64_t id) {
    std::lock_guard<std::mutex> hold(lock);
    for (auto& [handle, library] : libraries)
      if (library->id == id) return py::bytes(library->image);
    throw py::key_error("no library " + std::to_string(id) + " is loaded");
  });
}
