// What Python sees of it, as torch_attnkit.cpu._kernels. Tensors come as addresses, 0 for None: neither torch's headers
// nor its version matter, and a wheel carries it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <limits>
#include <optional>

#include "kernels.h"

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

}  // namespace

PYBIND11_MODULE(_kernels, m) {
  m.doc() = "Rows of the CPU in C++: csrc/cpu/kernels.h says what each takes.";
  m.def(
      "gated_rmsnorm",
      [](Address y, Address z, Address w, Address out, int64_t rows, int64_t N, float eps) {
        gated_rmsnorm(at(y), at(z), at(w), at<float>(out), rows, N, eps);
      },
      Without());
  m.def(
      "route_softmax",
      [](Address logits, int64_t step, int64_t R, int64_t E, int64_t K, bool over_all, bool renormalize, float scale,
         Address weights, Address indices) {
        return route_softmax(at(logits), step, R, E, K, over_all, renormalize, scale, at<float>(weights),
                             at<int32_t>(indices));
      },
      Without());
  m.def(
      "route_sqrt_softplus",
      [](Address logits, int64_t step, Address bias, int64_t R, int64_t E, int64_t K, bool renormalize, float scale,
         Address weights, Address indices) {
        return route_sqrt_softplus(at(logits), step, at(bias), R, E, K, renormalize, scale, at<float>(weights),
                                   at<int32_t>(indices));
      },
      Without());
  m.def(
      "route_hash",
      [](Address logits, int64_t step, Address ids, bool wide_ids, Address table, bool wide_table, int64_t table_step,
         int64_t R, int64_t E, int64_t V, int64_t K, bool renormalize, float scale, Address weights, Address indices) {
        return route_hash(at(logits), step, integers(ids, wide_ids), integers(table, wide_table), table_step, R, E, V, K,
                          renormalize, scale, at<float>(weights), at<int32_t>(indices));
      },
      Without());
  py::class_<Decode>(m, "Decode")
      .def(py::init([](std::array<int64_t, 6> sizes, int64_t window, float scale, float softcap,
                       std::array<int64_t, 2> q, std::array<int64_t, 3> k, std::array<int64_t, 3> v) {
             const auto [B, Hq, Hkv, S, D, Dv] = sizes;
             return Decode{B, Hq, Hkv, S, D, Dv, window, scale, softcap, {q[0], q[1]}, {k[0], k[1], k[2]}, {v[0], v[1], v[2]}};
           }),
           py::arg("sizes"), py::kw_only(), py::arg("window"), py::arg("scale"), py::arg("softcap"), py::arg("q"),
           py::arg("k"), py::arg("v"))
      .def(
          "__call__",
          [](const Decode& d, Address q, Address k, Address v, Address kv_len, Address kv_start, Address sink, Address out,
             Address lse) {
            return sdpa_decode(d, at(q), at(k), at(v), at<const int32_t>(kv_len), at<const int32_t>(kv_start), at(sink),
                               at<float>(out), at<float>(lse));
          },
          Without());
  py::class_<Sparse>(m, "Sparse")
      .def(py::init([](std::array<int64_t, 7> sizes, int64_t window, float scale, std::array<int64_t, 2> q,
                       std::array<int64_t, 2> near, std::array<int64_t, 2> far, int64_t chosen) {
             const auto [Tq, Hq, D, R, S, C, K] = sizes;
             return Sparse{Tq, Hq, D, R, S, C, K, window, scale, {q[0], q[1]}, {near[0], near[1]}, {far[0], far[1]}, chosen};
           }),
           py::arg("sizes"), py::kw_only(), py::arg("window"), py::arg("scale"), py::arg("q"), py::arg("near"),
           py::arg("far"), py::arg("chosen"))
      .def(
          "__call__",
          [](const Sparse& s, Address q, Address near, Address end, Address far, Address chosen, Address length,
             Address request_ids, Address sink, Address out, Address lse) {
            using Index = const int32_t;
            return sparse_fmha_with_swa(s, at(q), at(near), at<Index>(end), at(far), at<Index>(chosen), at<Index>(length),
                                        at<Index>(request_ids), at(sink), at<float>(out), at<float>(lse));
          },
          Without());
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
}
