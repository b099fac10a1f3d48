// The tensor map codec for Python: what cuTensorMapEncodeTiled would write, and what a kernel was given.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "async/async.h"
#include "async/tensormap.h"

namespace ptx {

void bind_async(pybind11::module_&);

namespace {

namespace py = pybind11;

// CUtensorMapDataType and CUtensorMapSwizzle count differently from the hardware and from tensormap.replace.
constexpr Element kDataTypes[] = {
    Element::u8,  Element::u16,  Element::u32,     Element::s32,  Element::u64,      Element::s64,
    Element::f16, Element::f32,  Element::f64,     Element::bf16, Element::f32_ftz,  Element::tf32,
    Element::tf32_ftz, Element::b4x16, Element::b4x16_p64, Element::b6x16_p32};

py::bytes encode_map(unsigned data_type, uint64_t address, const std::vector<uint64_t>& sizes,
                     const std::vector<uint64_t>& strides, const std::vector<uint32_t>& box,
                     const std::vector<uint32_t>& steps, unsigned interleave, unsigned swizzle, unsigned promotion,
                     unsigned fill) {
  const size_t rank = sizes.size();
  if (rank < 1 || rank > 5 || strides.size() != rank - 1 || box.size() != rank || steps.size() != rank)
    throw Error("a tensor map of rank " + std::to_string(rank) + ": accepted are 1 to 5, with rank - 1 strides, rank "
                "box sizes and rank element strides");
  if (data_type > 15 || interleave > 2 || swizzle > 6 || promotion > 3 || fill > 1)
    throw Error("a tensor map with a number outside its enumeration");
  TensorMap t;
  t.base = address;
  t.rank = static_cast<unsigned>(rank);
  t.element = kDataTypes[data_type];
  t.interleave = interleave;
  t.swizzle = static_cast<Swizzle>(std::min(swizzle, 3u));
  t.atomicity = swizzle > 3 ? static_cast<Atomicity>(swizzle - 3) : Atomicity::b16;
  t.promotion = promotion;
  t.nan_fill = fill;
  for (size_t d = 0; d < rank; d++) {
    t.size[d] = sizes[d];
    t.box[d] = box[d];
    t.step[d] = steps[d];
    if (d) t.stride[d] = strides[d - 1];
  }
  const std::string why = why_invalid(t);
  if (!why.empty()) throw Error("the tensor map is invalid: " + why);
  uint8_t bytes[kTensorMapBytes];
  encode_tensor_map(t, bytes);
  return py::bytes(reinterpret_cast<const char*>(bytes), sizeof bytes);
}

py::dict decode_map(const std::string& bytes) {
  if (bytes.size() < 64) throw Error("a tensor map has 128 bytes, of which the first 64 are read");
  const TensorMap t = decode_tensor_map(reinterpret_cast<const uint8_t*>(bytes.data()));
  py::dict d;
  d["address"] = t.base;
  d["element"] = element_name(t.element);
  d["interleave"] = t.interleave;
  d["swizzle"] = swizzle_bytes(t.swizzle);
  d["atomicity"] = static_cast<unsigned>(t.atomicity);
  d["promotion"] = t.promotion;
  d["fill"] = t.nan_fill ? "nan" : "zero";
  d["sizes"] = std::vector<uint64_t>(t.size, t.size + t.rank);
  d["strides"] = std::vector<uint64_t>(t.stride + (t.rank ? 1 : 0), t.stride + t.rank);
  d["box"] = std::vector<uint32_t>(t.box, t.box + t.rank);
  d["steps"] = std::vector<uint32_t>(t.step, t.step + t.rank);
  d["invalid"] = why_invalid(t);
  return d;
}

}  // namespace

void bind_async(py::module_& m) {
  m.def("tensor_map_encode", &encode_map, py::arg("data_type"), py::arg("address"), py::arg("sizes"),
        py::arg("strides"), py::arg("box"), py::arg("steps"), py::arg("interleave") = 0, py::arg("swizzle") = 0,
        py::arg("promotion") = 0, py::arg("fill") = 0,
        "The 128 bytes of a tiled tensor map; the numbers are those of cuTensorMapEncodeTiled. Strides in bytes, of "
        "dimensions 1 and up. PtxError when a rule is broken.");
  m.def("tensor_map_decode", &decode_map, py::arg("bytes"),
        "The fields of a tensor map; 'invalid' says which rule it breaks, or is empty.");
}

}  // namespace ptx
