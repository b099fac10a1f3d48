// Which unit decodes an opcode root.
#include "front/decode.h"

namespace ptx {

namespace {

bool floating(const std::string& part) {
  const Ty type = type_named(part);
  return type == Ty::f16 || type == Ty::bf16 || type == Ty::f32 || type == Ty::f64 || type == Ty::f16x2 ||
         type == Ty::bf16x2 || type == Ty::f32x2;
}

const std::map<std::string, Unit> kUnits = {
    {"add", decode_arithmetic}, {"sub", decode_arithmetic}, {"mul", decode_arithmetic}, {"mad", decode_arithmetic},
    {"div", decode_arithmetic}, {"min", decode_arithmetic}, {"max", decode_arithmetic}, {"neg", decode_arithmetic},
    {"abs", decode_arithmetic},
    {"rem", decode_integer},    {"and", decode_integer},    {"or", decode_integer},     {"xor", decode_integer},
    {"not", decode_integer},    {"cnot", decode_integer},   {"shl", decode_integer},    {"shr", decode_integer},
    {"shf", decode_integer},    {"bfe", decode_integer},    {"bfi", decode_integer},    {"bfind", decode_integer},
    {"brev", decode_integer},   {"clz", decode_integer},    {"popc", decode_integer},   {"prmt", decode_integer},
    {"lop3", decode_integer},   {"sad", decode_integer},    {"dp4a", decode_integer},   {"dp2a", decode_integer},
    {"fns", decode_integer},    {"szext", decode_integer},  {"bmsk", decode_integer},   {"mul24", decode_integer},
    {"mad24", decode_integer},  {"addc", decode_integer},   {"subc", decode_integer},   {"madc", decode_integer},
    {"fma", decode_float},      {"rcp", decode_float},      {"sqrt", decode_float},     {"rsqrt", decode_float},
    {"ex2", decode_float},      {"lg2", decode_float},      {"sin", decode_float},      {"cos", decode_float},
    {"tanh", decode_float},     {"copysign", decode_float}, {"testp", decode_float},
    {"set", decode_compare},    {"setp", decode_compare},   {"selp", decode_compare},   {"slct", decode_compare},
    {"cvt", decode_convert},    {"cvta", decode_convert},
    {"mov", decode_move},       {"mapa", decode_move},      {"isspacep", decode_move},  {"getctarank", decode_move},
    {"ld", decode_memory},      {"ldu", decode_memory},     {"st", decode_memory},      {"prefetch", decode_memory},
    {"prefetchu", decode_memory}, {"discard", decode_memory}, {"applypriority", decode_memory},
    {"createpolicy", decode_memory},
    {"atom", decode_atomic},    {"red", decode_atomic},
    {"shfl", decode_collective}, {"vote", decode_collective}, {"match", decode_collective},
    {"redux", decode_collective},
    {"elect", decode_collective}, {"activemask", decode_collective},
    {"bra", decode_control},    {"brx", decode_control},    {"ret", decode_control},    {"exit", decode_control},
    {"trap", decode_control},   {"call", decode_control},   {"nanosleep", decode_control}, {"pmevent", decode_control},
    {"brkpt", decode_control},  {"setmaxnreg", decode_control}, {"griddepcontrol", decode_control},
    {"bar", decode_barrier},    {"barrier", decode_barrier}, {"fence", decode_barrier}, {"membar", decode_barrier},
    {"mbarrier", decode_mbarrier}, {"cp", decode_copy},     {"tensormap", decode_copy}, {"multimem", decode_copy},
    {"clusterlaunchcontrol", decode_cancel},
    {"mma", decode_matrix},     {"ldmatrix", decode_matrix}, {"stmatrix", decode_matrix}, {"movmatrix", decode_matrix},
    {"wgmma", decode_wgmma},    {"tcgen05", decode_tcgen05},
};

}  // namespace

Unit unit_of(const std::string& root) {
  const auto found = kUnits.find(root);
  return found == kUnits.end() ? nullptr : found->second;
}

std::vector<std::string> opcode_roots() {
  std::vector<std::string> out;
  for (const auto& entry : kUnits) out.push_back(entry.first);
  return out;
}

void decode_arithmetic(Decoder& d, Op& op) {
  for (const std::string& part : d.from.parts)
    if (floating(part)) return decode_float(d, op);
  decode_integer(d, op);
}

}  // namespace ptx
