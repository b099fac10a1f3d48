// torch_attnkit.sim._ptx: modules, kernels, launches.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "check/check.h"
#include "front/decode.h"
#include "machine/target.h"

namespace py = pybind11;

namespace ptx {

void bind_async(pybind11::module_&);  // async/tensormap_bind.cpp

namespace {

struct PyModule {
  std::shared_ptr<const Module> module;
};
struct Result {
  Launch launch;
  std::shared_ptr<Program> program;
  std::vector<std::string> reports;
};

const char* const kClasses[] = {"integer", "floating", "special_function", "convert",
                                "move",    "memory",   "shared",           "tensor",
                                "copy",    "sync",     "control"};

std::vector<std::string> kernels(const PyModule& m) {
  std::vector<std::string> out;
  for (const auto& f : m.module->functions)
    if (f->entry) out.push_back(f->name);
  return out;
}

// One call of `launch`, gathered from keywords.
struct Arguments {
  std::vector<uint32_t> grid, block, cluster;
  uint32_t dynamic_shared;
  std::string params;
  std::vector<std::tuple<uint64_t, uint64_t, bool, std::string>> ranges;
  Options options;
};

void three(const std::vector<uint32_t>& from, uint32_t* to, const char* what) {
  if (from.empty() || from.size() > 3) throw Error(std::string(what) + ": one to three sizes are expected");
  for (size_t i = 0; i < 3; i++) to[i] = i < from.size() ? from[i] : 1;
}

std::unique_ptr<Result> launch(std::shared_ptr<Program> program, const Arguments& a) {
  auto r = std::make_unique<Result>();
  Launch& l = r->launch;
  r->program = program;
  l.program = program.get();
  three(a.grid, l.grid, "grid");
  three(a.block, l.block, "block");
  three(a.cluster, l.cluster, "cluster");
  l.dynamic_shared = a.dynamic_shared;
  l.params.assign(a.params.begin(), a.params.end());
  for (const auto& [begin, end, writable, name] : a.ranges)
    if (end > begin) l.ranges.push_back(Range{begin, end, writable, name});
  l.options = a.options;
  py::gil_scoped_release unlocked;
  l.run();
  if (l.checker != nullptr) r->reports = l.checker->reports();
  return r;
}

py::dict counters(const Result& r) {
  const Counters& c = r.launch.counters;
  py::dict out, by_class, by_opcode;
  uint64_t total = 0;
  std::map<std::string, uint64_t> classes, opcodes;
  for (size_t i = 0; i < c.executed.size(); i++) {
    total += c.executed[i];
    const Op& op = r.program->ops[i];
    classes[kClasses[static_cast<int>(op.kind)]] += c.executed[i];
    // The family alone would not tell a product from a load of tensor memory.
    const auto& parts = op.from->parts;
    opcodes[parts[0] == "tcgen05" ? parts[0] + "." + parts[1] : parts[0]] += c.executed[i];
  }
  for (const auto& [name, n] : classes) by_class[name.c_str()] = n;
  for (const auto& [name, n] : opcodes) by_opcode[name.c_str()] = n;
  out["instructions"] = total;
  out["executed"] = c.executed;
  out["by_class"] = by_class;
  out["by_opcode"] = by_opcode;
  out["by_warp"] = c.by_warp;
  out["flops"] = c.flops;
  out["global_read"] = c.global_read;
  out["global_written"] = c.global_written;
  out["global_sectors"] = c.global_sectors;
  out["shared_read"] = c.shared_read;
  out["shared_written"] = c.shared_written;
  out["shared_accesses"] = c.shared_accesses;
  out["shared_wavefronts"] = c.shared_wavefronts;
  out["shared_least_wavefronts"] = c.shared_least_wavefronts;
  out["tma_read"] = c.tma_read;
  out["tma_written"] = c.tma_written;
  out["tma_transactions"] = c.tma_transactions;
  out["cp_async"] = c.cp_async;
  out["tmem_read"] = c.tmem_read;
  out["tmem_written"] = c.tmem_written;
  return out;
}

py::list parameters(const Program& p) {
  py::list out;
  for (const Param& q : p.function->params) out.append(py::make_tuple(q.name, q.offset, q.size, q.align));
  return out;
}

py::list statements(const Program& p) {
  py::list out;
  for (const Statement& s : p.function->body) {
    const auto file = p.module->files.find(s.file);
    out.append(py::make_tuple(s.line, s.text, file == p.module->files.end() ? "" : file->second, s.source_line));
  }
  return out;
}

py::tuple sizes(const uint32_t* three) { return py::make_tuple(three[0], three[1], three[2]); }

}  // namespace

PYBIND11_MODULE(_ptx, m) {
  m.doc() = "PTX on the CPU: parse, decode, launch";
  bind_async(m);
  static py::exception<Error> error(m, "PtxError", PyExc_RuntimeError);
  static py::exception<Deadlock> deadlock(m, "PtxDeadlock", error.ptr());
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const Deadlock& e) { PyErr_SetString(deadlock.ptr(), e.what()); } catch (const Error& e) {
      PyErr_SetString(error.ptr(), e.what());
    }
  });

  py::class_<PyModule>(m, "Module")
      .def(py::init([](const std::string& text) { return PyModule{std::shared_ptr<const Module>(parse(text))}; }),
           py::arg("text"))
      .def_property_readonly("kernels", &kernels)
      .def_property_readonly("target", [](const PyModule& s) { return s.module->target; })
      .def(
          "kernel", [](const PyModule& s, const std::string& name) { return decode(s.module, name); }, py::arg("name"));

  py::class_<Program, std::shared_ptr<Program>>(m, "Kernel")
      .def_property_readonly("name", [](const Program& p) { return p.function->name; })
      .def_property_readonly("params", &parameters)
      .def_property_readonly("param_bytes", [](const Program& p) { return p.function->param_bytes; })
      .def_property_readonly("static_shared", [](const Program& p) { return p.static_shared; })
      .def_property_readonly("reqntid", [](const Program& p) { return sizes(p.function->reqntid); })
      .def_property_readonly("reqnctapercluster", [](const Program& p) { return sizes(p.function->reqnctapercluster); })
      .def_property_readonly("statements", &statements)
      .def(
          "launch",
          [](std::shared_ptr<Program> p, std::vector<uint32_t> grid, std::vector<uint32_t> block,
             std::vector<uint32_t> cluster, uint32_t dynamic_shared, py::bytes params,
             std::vector<std::tuple<uint64_t, uint64_t, bool, std::string>> ranges, bool check, uint64_t seed,
             bool poison, unsigned threads, uint64_t limit, std::vector<int> removed, unsigned processors,
             std::vector<std::string> waive, std::vector<std::string> strict) {
            Options o{check,      poison,     seed, threads, limit, processors, std::move(removed),
                      std::move(waive), std::move(strict)};
            return launch(p, Arguments{grid, block, cluster, dynamic_shared, std::string(params), ranges, o});
          },
          py::kw_only(), py::arg("grid"), py::arg("block"), py::arg("cluster") = std::vector<uint32_t>{1, 1, 1},
          py::arg("dynamic_shared") = 0, py::arg("params") = py::bytes(), py::arg("ranges") = py::list(),
          py::arg("check") = false, py::arg("seed") = 0, py::arg("poison") = true, py::arg("threads") = 0,
          py::arg("limit") = 0, py::arg("removed") = std::vector<int>{}, py::arg("processors") = 148,
          py::arg("waive") = std::vector<std::string>{}, py::arg("strict") = std::vector<std::string>{});

  py::class_<Result>(m, "Result")
      .def_property_readonly("counters", &counters)
      .def_property_readonly("printed", [](const Result& r) { return r.launch.printed; })
      .def_readonly("reports", &Result::reports);
  py::class_<Limits>(m, "Limits")
      .def_property_readonly("shared", [](const Limits& l) { return l.shared << 10; }, "Bytes that a CTA may have.")
      .def_property_readonly("shared_of_processor", [](const Limits& l) { return l.shared_of_processor << 10; })
      .def_readonly("threads_of_processor", &Limits::threads_of_processor);
  m.def("limits", &limits_of, py::arg("target"), "What a multiprocessor of a PTX target has.");
  m.def("finding_names", &finding_names, "What a checked run can find, by the names that `waive` takes.");
  m.def("opcode_roots", &opcode_roots, "Every opcode root of the table.");
}

}  // namespace ptx
