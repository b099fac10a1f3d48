// tcgen05.ld, ld.red, st and wait (PTX ISA 9.7.16.8). The fragment layouts are figures in the ISA; they are taken from
// CuTe's published copy traits of the same instructions (SM100_TMEM_LOAD_*: thread and value to bit of the block).
#include <algorithm>

#include "tensor/tcgen05.h"
#include "units/formats.h"

namespace ptx {
namespace {

enum class Fold : uint8_t { none, f32, s32, u32 };

struct Transfer {
  Address place;
  unsigned lanes = 32;              // lanes of tensor memory that a block has: 32 or 16
  unsigned columns = 0;             // columns of a block
  unsigned split = 0;               // 16x32bx2: column of the second block from the first
  bool halves = false;              // 16x32bx2
  bool packed = false;              // two 16-bit cells to a register
  std::vector<uint32_t> cells;      // (32, registers): lane * 512 + column of thread t, register j, from the first cell
  std::vector<Slot> registers;
  Fold fold = Fold::none;
  bool maximum = false, absolute = false, nan = false;
  Slot folded = 0;
};

// Lane and column (32-bit cells, before packing) of register j in thread t.
uint32_t cell_of(const std::string& shape, unsigned t, unsigned j) {
  unsigned lane = t, column = j;
  if (shape == "16x64b") lane = t / 4 + t % 2 * 8, column = t / 2 % 2 + 2 * j;
  if (shape == "16x128b") lane = t / 4 + j % 2 * 8, column = t % 4 + j / 2 * 4;
  if (shape == "16x256b") lane = t / 4 + j / 2 % 2 * 8, column = t % 4 * 2 + j % 2 + j / 4 * 8;
  if (shape == "16x32bx2") lane = t % 16;
  return lane * kTmemColumns + column;
}

// The first cell of a warp's block. PTX ISA 9.7.16.8.1 "Access restrictions": warp i of a warpgroup reaches lanes 32 i
// to 32 i + 31 and no other. NVIDIA's examples, which run on the hardware, give lane 0 from all four warps: the upper
// bits of the lane seem to come from the warp. So lane 0 is the first of the warp's own; with another foreign lane only
// a checked run goes on, in the warp's own quarter, and reports it.
TensorPlace own_place(Context& c, const Transfer& r, const char* what) {
  TensorPlace p = tensor_place(uniform_address(c, r.place, what));
  const unsigned quarter = c.warp.id % 4;
  const bool foreign = p.lane / 32 != quarter && p.lane / 32 != 0;
  if (p.lane >= kTmemLanes || (foreign && c.check == nullptr))
    c.fail(std::string(what) + ": lane " + std::to_string(p.lane) + " is not among those of this warp, " +
           std::to_string(32 * quarter) + " .. " + std::to_string(32 * quarter + 31) +
           " (PTX ISA 9.7.16.8.1: \"a lane of the Tensor Memory can be accessed by a single warp in the warpgroup\")");
  if (foreign) c.check->foreign_lanes(c, p.lane, p.column);
  if (p.lane % 32 % r.lanes)
    c.fail(std::string(what) + ": lane " + std::to_string(p.lane) + " has to be a multiple of " +
           std::to_string(r.lanes));
  p.lane = 32 * quarter + p.lane % 32;
  check_tensor(c, c.cta, p.lane, r.lanes, p.column, r.columns, what);
  if (r.halves) check_tensor(c, c.cta, p.lane, r.lanes, p.column + r.split, r.columns, what);
  return p;
}

float fold_f32(const Transfer& r, float a, float b) {
  if (r.nan && (a != a || b != b)) return as_float(0x7fffffffu);
  if (a != a) return b;
  if (b != b) return a;
  const bool greater = a > b || (a == b && !std::signbit(a));
  return greater == r.maximum ? a : b;
}

uint32_t fold_values(const Transfer& r, uint32_t a, uint32_t b) {
  if (r.fold == Fold::f32) return as_bits(fold_f32(r, as_float(a), as_float(b)));
  const bool less = r.fold == Fold::u32 ? a < b : static_cast<int32_t>(a) < static_cast<int32_t>(b);
  return less == r.maximum ? b : a;
}

Step run_load(Context& c, const Op& op) {
  const Transfer& r = record<Transfer>(op);
  const TensorPlace p = own_place(c, r, "tcgen05.ld");
  if (c.check) {
    c.check->tensor(c, c.cta, p.lane, r.lanes, p.column, r.columns, false);
    if (r.halves) c.check->tensor(c, c.cta, p.lane, r.lanes, p.column + r.split, r.columns, false);
  }
  const uint32_t* from = tensor_row(c.cta, p.lane) + p.column;
  const size_t n = r.registers.size();
  for (unsigned t = 0; t < kLanes; t++) {
    const uint32_t* cells = r.cells.data() + t * n;
    for (size_t j = 0; j < n; j++) {
      const uint32_t* at = from + cells[j];
      c.warp.v32(r.registers[j]).x[t] = r.packed ? (at[0] & 0xffff) | at[1] << 16 : at[0];
    }
  }
  c.count.tmem_read += 4 * kLanes * n * (r.packed ? 2 : 1);
  if (r.fold == Fold::none) return Step::next;
  for (unsigned t = 0; t < kLanes; t++) {
    uint32_t sum = 0;
    for (size_t j = 0; j < n; j++) {
      uint32_t value = c.warp.v32(r.registers[j]).x[t];
      if (r.absolute) value &= 0x7fffffffu;
      sum = j ? fold_values(r, sum, value) : value;
    }
    c.warp.v32(r.folded).x[t] = sum;
  }
  return Step::next;
}

void store(Cta& cta, const Transfer& r, TensorPlace p, const std::vector<uint32_t>& values) {
  uint32_t* to = tensor_row(cta, p.lane) + p.column;
  for (size_t i = 0; i < values.size(); i++) {
    uint32_t* at = to + r.cells[i];
    if (r.packed) at[0] = values[i] & 0xffff, at[1] = values[i] >> 16;
    else at[0] = values[i];
  }
}

// The values leave the registers at once; the cells are written on completion, at wait::st at the latest.
Step run_store(Context& c, const Op& op) {
  const Transfer& r = record<Transfer>(op);
  const TensorPlace p = own_place(c, r, "tcgen05.st");
  const size_t n = r.registers.size();
  std::vector<uint32_t> values(kLanes * n);
  for (size_t j = 0; j < n; j++) {
    const V32& v = c.warp.v32(r.registers[j]);
    for (unsigned t = 0; t < kLanes; t++) values[t * n + j] = v.x[t];
  }
  c.count.tmem_written += 4 * values.size() * (r.packed ? 2 : 1);
  if (!tracking(c)) {
    store(c.cta, r, p, values);
    return Step::next;
  }
  Checker* check = c.check;
  const AsyncRef ref = check ? check->issue(c, Checker::kWarp) : nullptr;
  c.warp.tensor_stores++;
  c.cluster.submit(0, [&r, p, check, ref, warp = &c.warp, values = std::move(values)] {
    Cta& cta = *warp->cta;
    if (check) {
      check->tensor(ref, cta, p.lane, r.lanes, p.column, r.columns, true);
      if (r.halves) check->tensor(ref, cta, p.lane, r.lanes, p.column + r.split, r.columns, true);
    }
    store(cta, r, p, values);
    warp->tensor_stores--;
  });
  return Step::next;
}

Step run_wait_loaded(Context& c, const Op&) {
  if (c.check) c.check->tensor_loaded(c);
  return Step::next;
}

Step run_wait_stored(Context& c, const Op&) {
  c.fragment.why = {"tcgen05.wait::st: %llu stores of this warp are not complete", {c.warp.tensor_stores}};
  if (c.warp.tensor_stores) return Step::blocked;
  if (c.check) c.check->tensor_stored(c);
  return Step::next;
}

void decode_fold(Decoder& d, Modifiers& m, Transfer& r) {
  r.maximum = m.take_one({"min", "max"}) == "max";
  r.absolute = m.take("abs");
  r.nan = m.take("NaN");
  const std::string type = m.take_one({"f32", "u32", "s32"});
  r.fold = type == "f32" ? Fold::f32 : type == "u32" ? Fold::u32 : Fold::s32;
  if (r.fold != Fold::f32 && (r.absolute || r.nan)) d.fail(".abs and .NaN are for .f32");
  r.folded = d.destination(d.operand(1), 4);
}

// Operands: ld r{, redval}, [taddr]{, split}; st [taddr]{, split}, r.
void decode_transfer(Decoder& d, Op& op, Modifiers& m, bool load) {
  Transfer r;
  const bool reduce = load && m.take("red");
  const std::string shape = m.take_one({"32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"});
  const std::string times = m.take_one({"x1", "x2", "x4", "x8", "x16", "x32", "x64", "x128"});
  r.packed = m.take(load ? "pack::16b" : "unpack::16b");
  r.halves = shape == "16x32bx2";
  r.lanes = shape == "32x32b" ? 32 : 16;
  const unsigned count = static_cast<unsigned>(std::stoul(times.substr(1)));
  const unsigned n = count * (shape == "16x128b" ? 2 : shape == "16x256b" ? 4 : 1);
  if (n > 128) d.fail("." + times + " is too many for ." + shape + ": 128 registers at most");
  // ptxas knows it under sm_103a and sm_103f.
  if (reduce && d.program.module->target.compare(0, 6, "sm_100") == 0)
    d.fail("'tcgen05.ld.red' is not supported on .target '" + d.program.module->target + "'");
  if (reduce && (count < 2 || (shape != "32x32b" && !r.halves) || r.packed))
    d.fail("tcgen05.ld.red takes .32x32b or .16x32bx2, .x2 or more");
  const size_t operands = 2 + (r.halves ? 1 : 0) + (reduce ? 1 : 0);
  d.count(operands, operands);
  const size_t address = load ? operands - 1 - (r.halves ? 1 : 0) : 0;
  r.place = tensor_operand(d, d.operand(address));
  const Operand& vector = d.operand(load ? 0 : operands - 1);
  r.registers = load ? d.destinations(vector, 4) : d.sources(vector, 4);
  if (r.registers.size() != n)
    d.fail(std::to_string(r.registers.size()) + " registers, ." + shape + "." + times + " has " + std::to_string(n));
  if (r.halves) {
    const Operand& split = d.operand(load ? operands - 1 : 1);
    if (split.kind != Operand::imm) d.fail("immHalfSplitoff has to be an immediate");
    r.split = static_cast<unsigned>(split.bits);
  }
  if (reduce) decode_fold(d, m, r);
  else m.take_one({"b32"});
  for (unsigned t = 0; t < kLanes; t++)
    for (unsigned j = 0; j < n; j++) {
      const uint32_t cell = cell_of(shape, t, j), column = cell % kTmemColumns * (r.packed ? 2 : 1);
      r.columns = std::max(r.columns, column + (r.packed ? 2 : 1));
      r.cells.push_back(cell / kTmemColumns * kTmemColumns + column + (r.halves && t >= 16 ? r.split : 0));
    }
  op.list = r.registers;
  if (reduce) op.list.push_back(r.folded);
  op.run = load ? run_load : run_store;
  op.extra = std::make_shared<Transfer>(std::move(r));
}

}  // namespace

void decode_tensor_load(Decoder& d, Op& op, Modifiers& m) {
  op.collective = true;
  op.kind = Class::memory;
  m.take_one({"sync"});
  m.take_one({"aligned"});
  if (m.take("ld")) return decode_transfer(d, op, m, true);
  if (m.take("st")) return decode_transfer(d, op, m, false);
  op.kind = Class::sync;
  d.count(0, 0);
  op.run = m.take_one({"wait::ld", "wait::st"}) == "wait::ld" ? run_wait_loaded : run_wait_stored;
}

}  // namespace ptx
