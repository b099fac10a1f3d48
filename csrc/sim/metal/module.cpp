// torch_attnkit.sim._metal: compiled kernels in, launches and counters out.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstring>

#include "api.h"
#include "launch.h"

namespace py = pybind11;

namespace sim {

namespace {

template <class T>
void apply(int op, void* object, const void* value, void* old) {
  T x, v{};
  std::memcpy(&x, object, sizeof(T));
  if (value) std::memcpy(&v, value, sizeof(T));
  if (old) std::memcpy(old, &x, sizeof(T));
  switch (op) {
    case 0: return;
    case 1: case 2: x = v; break;
    case 3: x = T(x + v); break;
    case 4: x = T(x - v); break;
    case 5: x = x > v ? x : v; break;
    case 6: x = x < v ? x : v; break;
    default:
      if constexpr (std::is_integral_v<T>) x = op == 7 ? T(x | v) : op == 8 ? T(x & v) : T(x ^ v);
  }
  std::memcpy(object, &x, sizeof(T));
}

// One thread runs at a time, so that the plain operation is atomic.
void atomic(int op, int type, int space, void* object, const void* value, void* old, int site) {
  counters.atomics++;
  auto p = reinterpret_cast<uintptr_t>(object);
  if (op != 1) atomic_access(p, kTypeSize[type], false, space, site);
  if (op != 0) atomic_access(p, kTypeSize[type], true, space, site);
  switch (type) {
    case kF32: return apply<float>(op, object, value, old);
    case kI32: return apply<int32_t>(op, object, value, old);
    case kU32: return apply<uint32_t>(op, object, value, old);
    case kU64: return apply<uint64_t>(op, object, value, old);
    case kBool: return apply<uint8_t>(op, object, value, old);
    default: fail(site, "no atomic of this type");
  }
}

void trap(int kind, int site) {
  switch (kind) {
    case kTrapIndex: fail(site, "array index out of bounds");
    case kTrapTurns:
      fail(site, format("still running after %lld turns of loops in one threadgroup: an endless loop?",
                        (long long)options.turns));
    case kTrapDivision: fail(site, "division of an integer by zero");
    case kTrapOverflow: fail(site, "division of the smallest integer by -1");
    case kTrapUnset: fail(site, "simdgroup_store of a matrix that nobody has set");
    case kTrapAssert: fail(site, "an assertion does not hold");
    default: fail(site, format("undefined behaviour (kind %d)", kind));
  }
}

void work(int flops, int special, int integer, int conversions, int choices) {
  counters.flops += flops;
  counters.special += special;
  counters.integer += integer;
  counters.conversions += conversions;
  counters.choices += choices;
}

void* variable(int id) { return arena + variables[id].offset; }
unsigned lane() { return current->lane; }

// Rounded once from double: the same bits on every machine whose libm is good to a few units of double precision.
float math(int function, float x, float y) {
  double a = x, b = y;
  switch (function) {
    case 0: return float(std::exp(a));
    case 1: return float(std::exp2(a));
    case 2: return float(std::pow(10.0, a));
    case 3: return float(std::log(a));
    case 4: return float(std::log2(a));
    case 5: return float(std::log10(a));
    case 6: return float(std::sin(a));
    case 7: return float(std::cos(a));
    case 8: return float(std::tan(a));
    case 9: return float(std::asin(a));
    case 10: return float(std::acos(a));
    case 11: return float(std::atan(a));
    case 12: return float(std::sinh(a));
    case 13: return float(std::cosh(a));
    case 14: return float(std::tanh(a));
    case 15: return float(std::asinh(a));
    case 16: return float(std::acosh(a));
    case 17: return float(std::atanh(a));
    case 18: return float(1 / std::sqrt(a));
    case 19: return float(std::pow(a, b));
    case 20: return float(std::atan2(a, b));
    case 21: return std::fmod(x, y);
    case 22: return float(std::sin(a * 3.14159265358979323846));
    case 23: return float(std::cos(a * 3.14159265358979323846));
    default: return std::nanf("");
  }
}

}  // namespace

const Api api = {entry::simd, entry::barrier, entry::matrix, atomic, entry::access, entry::range, trap, work, variable,
                 lane, math, entry::within, entry::array, entry::array_access, entry::array_copy, entry::array_within,
                 entry::thread_access};

namespace {

struct Description {  // of one kernel parameter; include/msl_entry.h has the same layout
  int32_t kind, space, is_const, size, align, type, count;
};

class Kernel {
 public:
  explicit Kernel(const std::string& path) {
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) throw std::runtime_error(dlerror());
    auto** table = static_cast<const Api**>(dlsym(handle, "msl_api"));
    run_ = reinterpret_cast<Launcher>(dlsym(handle, "msl_run"));
    auto describe = reinterpret_cast<const Description* (*)()>(dlsym(handle, "msl_parameters"));
    auto count = reinterpret_cast<int (*)()>(dlsym(handle, "msl_parameter_count"));
    auto limit = reinterpret_cast<int (*)()>(dlsym(handle, "msl_thread_limit"));
    turns_ = static_cast<int64_t*>(dlsym(handle, "msl_turns"));
    if (!table || !turns_ || !run_ || !describe || !count || !limit)
      throw std::runtime_error(path + " is not a compiled kernel");
    parameters_ = describe(), parameter_count_ = count(), limit_ = limit();
    *table = &api;
    Dl_info info;
    dladdr(reinterpret_cast<void*>(run_), &info);
    image_ = info.dli_fbase;
  }

  py::list parameters() const {
    py::list out;
    for (int i = 0; i < parameter_count_; i++) {
      const Description& d = parameters_[i];
      out.append(py::make_tuple(d.kind, d.space, bool(d.is_const), d.size, d.align, d.type, d.count));
    }
    return out;
  }
  int thread_limit() const { return limit_; }

  Launcher run() const { return run_; }
  void* image() const { return image_; }
  int64_t* turns() const { return turns_; }

 private:
  Launcher run_;
  void* image_;
  int64_t* turns_;
  const Description* parameters_;
  int parameter_count_, limit_;
};

using SlotTuple = std::tuple<int, size_t, size_t, int, bool>;
using PointerTuple = std::pair<size_t, int>;
using RegionTuple =
    std::tuple<uintptr_t, size_t, size_t, bool, std::vector<SlotTuple>, std::vector<PointerTuple>, uintptr_t>;
using VariableTuple = std::tuple<std::string, size_t, size_t>;
using Three = std::array<uint32_t, 3>;

py::tuple run(const Kernel& kernel, Three grid, Three threads, const std::vector<RegionTuple>& regions,
              const std::vector<VariableTuple>& named, size_t threadgroup_bytes, const py::dict& how) {
  Launch l{};
  l.run = kernel.run();
  l.image = kernel.image();
  l.turns = kernel.turns();
  for (int d = 0; d < 3; d++) l.grid[d] = grid[d], l.group[d] = threads[d];
  for (auto& [host, bytes, residue, writable, bound, pointers, written] : regions) {
    HostRegion r{reinterpret_cast<char*>(host), bytes, residue, writable, {}, pointers,
                 reinterpret_cast<char*>(written)};
    for (auto& [index, offset, size, granule, to_write] : bound)
      r.slots.push_back({index, offset, size, granule, to_write});
    l.regions.push_back(std::move(r));
  }
  for (auto& [name, offset, size] : named) l.variables.push_back({name, offset, size});
  l.threadgroup_bytes = threadgroup_bytes;
  l.options.checked = how["checked"].cast<bool>();
  l.options.counting = how["counting"].cast<bool>();
  l.options.strict = how["strict"].cast<bool>();
  l.options.turns = how["turns"].cast<int64_t>();
  l.options.cache = how["cache"].cast<size_t>();
  l.options.lockstep = how["lockstep"].cast<bool>();
  Outcome o;
  {
    py::gil_scoped_release release;
    o = launch(l);
  }
  return py::make_tuple(o.ok, o.memory_fault, o.error);
}

py::dict last_counters() {
  py::dict d, traffic;
  d["switches"] = counters.switches;
  d["collectives"] = counters.collectives;
  d["divergent"] = counters.divergent;
  d["barriers"] = counters.barriers;
  d["simdgroup_barriers"] = counters.simdgroup_barriers;
  d["matrix"] = counters.matrix;
  d["atomics"] = counters.atomics;
  d["flops"] = counters.flops;
  d["special"] = counters.special;
  d["integer"] = counters.integer;
  d["conversions"] = counters.conversions;
  d["choices"] = counters.choices;
  d["threadgroup_read"] = counters.threadgroup_read;
  d["threadgroup_written"] = counters.threadgroup_written;
  d["memory_read"] = counters.memory_read;
  d["memory_written"] = counters.memory_written;
  for (auto& s : slots) traffic[py::int_(s.index)] = py::make_tuple(s.read, s.written);
  d["buffers"] = traffic;
  py::list sites;
  for (auto& s : site_stats())
    sites.append(py::make_tuple(s.site, s.space, bool(s.write), s.instructions, s.lanes, s.bytes, s.transactions,
                                s.ideal, s.worst));
  d["sites"] = sites;
  return d;
}

}  // namespace
}  // namespace sim

PYBIND11_MODULE(_metal, m) {
  m.doc() = "The machine behind torch_attnkit.sim.metal.";
  py::class_<sim::Kernel>(m, "Kernel")
      .def(py::init<const std::string&>())
      .def_property_readonly("parameters", &sim::Kernel::parameters)
      .def_property_readonly("thread_limit", &sim::Kernel::thread_limit);
  m.def("run", &sim::run);
  m.def("counters", &sim::last_counters);
}
