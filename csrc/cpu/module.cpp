// What Python sees of it, as torch_attnkit.cpu._kernels. Tensors come as addresses, 0 for None: neither torch's headers
// nor its version matter, and a wheel carries it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <limits>
#include <optional>
#include <tuple>

#include "blocks.h"
#include "kernels.h"
#include "ready.h"

namespace py = pybind11;
using namespace attnkit;
using Address = uintptr_t;
using Without = py::call_guard<py::gil_scoped_release>;

namespace {

template <typename T = const float>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

Integers integers(Address address, bool wide) { return {at<const void>(address), wide}; }

// The steps of the codes and of the scales, from expert to expert and from row to row.
Matrices matrices(int64_t rows, int64_t columns, std::array<int64_t, 2> codes, std::array<int64_t, 2> scales) {
  return {nullptr, nullptr, codes[0], codes[1], scales[0], scales[1], nullptr, nullptr, rows, columns};
}

void place(Matrices& m, std::array<Address, 4> of) {
  m.codes = at<const uint8_t>(of[0]), m.scales = at<const uint8_t>(of[1]);
  m.global = at(of[2]), m.bias = at(of[3]);
}

// An op's tensors, as ready.h has them.
struct Tensors {
  const void* const* addresses;
  template <typename T = float>
  const T* in(int i) const { return static_cast<const T*>(addresses[i]); }
  template <typename T = float>
  T* out(int i) const { return static_cast<T*>(const_cast<void*>(addresses[i])); }
};

template <typename Kernel>
constexpr size_t kTensors = 0;
template <>
constexpr size_t kTensors<Norm> = 4;  // y, z, w, out
template <>
constexpr size_t kTensors<SoftmaxRouter> = 3;  // logits, weights, indices
template <>
constexpr size_t kTensors<SqrtSoftplusRouter> = 4;  // logits, bias, weights, indices
template <>
constexpr size_t kTensors<HashRouter> = 5;  // logits, ids, table, weights, indices
template <>
constexpr size_t kTensors<Decode> = 11;  // q, k, v, kv_len, sink, kv_start, three scales of E4M3, out, lse
template <>
constexpr size_t kTensors<Sparse> = 14;  // q, near, end, far, chosen, length, request_ids, sink, what pages and
                                         // codes have: three, out, lse, row_sum

bool run(const Norm& n, Tensors t) { return gated_rmsnorm(n, t.in(0), t.in(1), t.in(2), t.out(3)), true; }
bool run(const SoftmaxRouter& r, Tensors t) { return route_softmax(r, t.in(0), t.out(1), t.out<int32_t>(2)); }
bool run(const SqrtSoftplusRouter& r, Tensors t) {
  return route_sqrt_softplus(r, t.in(0), t.in(1), t.out(2), t.out<int32_t>(3));
}
bool run(const HashRouter& r, Tensors t) {
  return route_hash(r, t.in(0), t.in<void>(1), t.in<void>(2), t.out(3), t.out<int32_t>(4));
}
bool run(const Decode& d, Tensors t) {
  return sdpa_decode(d, t.in(0), t.in(1), t.in(2), t.in<int32_t>(3), t.in<int32_t>(5), t.in(4), t.out(9), t.out(10));
}
bool run(const Sparse& s, Tensors t) {
  return sparse_fmha_with_swa(s, t.in(0), t.in(1), t.in<int32_t>(2), t.in(3), t.in<int32_t>(4), t.in<int32_t>(5),
                              t.in<int32_t>(6), t.in(7), t.out(11), t.out(12));
}

template <typename Kernel>
bool ready(const void* kernel, const void* const* tensors) {
  return run(*static_cast<const Kernel*>(kernel), {tensors});
}

// Called with the addresses of a call. ``ready`` tells csrc/dispatch whom to call with them, and with how many.
template <typename Kernel>
py::class_<Kernel> kernel(py::module_& m, const char* name) {
  return py::class_<Kernel>(m, name)
      .def("__call__",
           [](const Kernel& k, const py::args& given) {
             const void* addresses[kTensors<Kernel>];
             if (given.size() != kTensors<Kernel>) throw py::type_error("a kernel takes an address of each tensor");
             for (size_t i = 0; i < kTensors<Kernel>; i++) addresses[i] = at<const void>(given[i].cast<Address>());
             py::gil_scoped_release without;
             return run(k, {addresses});
           })
      .def_property_readonly("ready", [](const Kernel& k) {
        return std::tuple(reinterpret_cast<Address>(Ready(&ready<Kernel>)), reinterpret_cast<Address>(&k), kTensors<Kernel>);
      });
}

}  // namespace

PYBIND11_MODULE(_kernels, m) {
  m.doc() = "Rows of the CPU in C++: csrc/cpu/kernels.h says what each takes.";
  kernel<Norm>(m, "Norm").def(
      py::init([](int64_t rows, int64_t N, float eps) { return Norm{rows, N, eps}; }), py::arg("rows"), py::arg("N"),
      py::kw_only(), py::arg("eps"));
  kernel<SoftmaxRouter>(m, "SoftmaxRouter")
      .def(py::init([](std::array<int64_t, 3> sizes, int64_t step, bool over_all, bool renormalize, float route_scale) {
             const auto [R, E, K] = sizes;
             return SoftmaxRouter{R, E, K, step, over_all, renormalize, route_scale};
           }),
           py::arg("sizes"), py::kw_only(), py::arg("step"), py::arg("over_all"), py::arg("renormalize"),
           py::arg("route_scale"));
  kernel<SqrtSoftplusRouter>(m, "SqrtSoftplusRouter")
      .def(py::init([](std::array<int64_t, 3> sizes, int64_t step, bool renormalize, float route_scale) {
             const auto [R, E, K] = sizes;
             return SqrtSoftplusRouter{R, E, K, step, renormalize, route_scale};
           }),
           py::arg("sizes"), py::kw_only(), py::arg("step"), py::arg("renormalize"), py::arg("route_scale"));
  kernel<HashRouter>(m, "HashRouter")
      .def(py::init([](std::array<int64_t, 4> sizes, std::array<int64_t, 2> steps, std::array<bool, 2> wide,
                       bool renormalize, float route_scale) {
             const auto [R, E, V, K] = sizes;
             return HashRouter{R, E, V, K, steps[0], steps[1], wide[0], wide[1], renormalize, route_scale};
           }),
           py::arg("sizes"), py::kw_only(), py::arg("steps"), py::arg("wide"), py::arg("renormalize"),
           py::arg("route_scale"));
  kernel<Decode>(m, "Decode")
      .def(py::init([](std::array<int64_t, 6> sizes, int64_t window, float scale, float softcap,
                       std::array<int64_t, 2> q, std::array<int64_t, 3> k, std::array<int64_t, 3> v) {
             const auto [B, Hq, Hkv, S, D, Dv] = sizes;
             return Decode{B, Hq, Hkv, S, D, Dv, window, scale, softcap, {q[0], q[1]}, {k[0], k[1], k[2]}, {v[0], v[1], v[2]}};
           }),
           py::arg("sizes"), py::kw_only(), py::arg("window"), py::arg("scale"), py::arg("softcap"), py::arg("q"),
           py::arg("k"), py::arg("v"));
  kernel<Sparse>(m, "Sparse")
      .def(py::init([](std::array<int64_t, 7> sizes, int64_t window, float scale, std::array<int64_t, 2> q,
                       std::array<int64_t, 2> near, std::array<int64_t, 2> far, int64_t chosen) {
             const auto [Tq, Hq, D, R, S, C, K] = sizes;
             return Sparse{Tq, Hq, D, R, S, C, K, window, scale, {q[0], q[1]}, {near[0], near[1]}, {far[0], far[1]}, chosen};
           }),
           py::arg("sizes"), py::kw_only(), py::arg("window"), py::arg("scale"), py::arg("q"), py::arg("near"),
           py::arg("far"), py::arg("chosen"));
  py::class_<Matrices>(m, "Matrices")
      .def(py::init(&matrices), py::arg("rows"), py::arg("columns"), py::kw_only(), py::arg("codes"), py::arg("scales"));
  py::class_<Experts>(m, "Experts")
      .def(py::init([](Matrices up, Matrices down, Address scale_of, int64_t block, float most_global, bool gptoss,
                       bool interleaved, float alpha, std::optional<float> limit, int rounding) {
             return Experts{up, down, at(scale_of), block, most_global, gptoss, interleaved, alpha,
                            limit.value_or(std::numeric_limits<float>::infinity()), Rounding(rounding)};
           }),
           py::arg("up"), py::arg("down"), py::kw_only(), py::arg("scale_of"), py::arg("block"), py::arg("most_global"),
           py::arg("gptoss"), py::arg("interleaved"), py::arg("alpha"), py::arg("limit"), py::arg("rounding"))
      .def(
          "__call__",
          [](Experts experts, std::array<Address, 4> up, std::array<Address, 4> down, Address x, Address weights,
             Address indices, bool wide, Address out, int64_t T, int64_t K, int64_t E, int threads) {
            place(experts.up, up), place(experts.down, down);
            return fp4_moe(experts, at(x), at(weights), integers(indices, wide), at<float>(out), T, K, E, threads);
          },
          Without());
  m.attr("blocks_run_here") = blocks_run_here();
  py::class_<Blocks>(m, "Blocks")
      .def(py::init([](std::array<int64_t, 4> sizes, int number, float scale, bool causal, bool among, int64_t window,
                       int64_t sink_tokens, std::array<int64_t, 2> q, std::array<int64_t, 2> k,
                       std::array<int64_t, 2> v, std::array<int64_t, 4> pages) {
             const auto [Hq, Hkv, D, Dv] = sizes;
             const auto [page, count, k_page, v_page] = pages;
             return Blocks{Hq, Hkv, D, Dv, Number(number), scale, causal, among, window, sink_tokens, {q[0], q[1]},
                           {k[0], k[1]}, {v[0], v[1]}, page, count, k_page, v_page};
           }),
           py::arg("sizes"), py::kw_only(), py::arg("number"), py::arg("scale"), py::arg("causal"), py::arg("among"),
           py::arg("window"), py::arg("sink_tokens"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("pages"))
      // Of each sequence: addresses of q, k, v, out, lse and its row of the table, then T, S, start and end.
      .def(
          "__call__",
          [](const Blocks& b, const std::vector<std::array<int64_t, 10>>& given, Address sink, int threads) {
            std::vector<Sequence> sequences;
            for (const auto& s : given)
              sequences.push_back({at<const void>(s[0]), at<const void>(s[1]), at<const void>(s[2]), at<void>(s[3]),
                                   at<float>(s[4]), at<const int32_t>(s[5]), s[6], s[7], s[8], s[9]});
            return attention(b, sequences, at(sink), threads);
          },
          Without());
}
