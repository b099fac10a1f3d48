// wgmma (PTX ISA 9.7.15): products of a warpgroup with B in shared memory and D in registers.
//
// An operation executes when the last of the warpgroup's four warps arrives at it, and its results are in the registers
// at once. Programs must not look before wgmma.wait_group; the checker reports those that do (it watches op.list).
#include <array>

#include "async/async.h"
#include "tensor/fragments.h"
#include "tensor/narrow_sums.h"
#include "tensor/smem_matrix.h"

namespace ptx {

// Of a warp: the operations that its groups cover (only when checking). The first warp of a warpgroup also keeps the
// operation that the four are gathering for.
struct WgmmaState {
  std::vector<AsyncRef> open;
  std::deque<std::vector<AsyncRef>> committed;
  const Op* op = nullptr;
  unsigned arrived = 0;          // bit per warp
  uint64_t generation = 0;       // operations executed
  uint64_t a_descriptor = 0, b_descriptor = 0;
  AsyncRef last;
};

namespace {

constexpr unsigned kWarps = 4;

WgmmaState& wgmma_state(Warp& warp) {
  if (!warp.wgmma) warp.wgmma = std::make_shared<WgmmaState>();
  return *warp.wgmma;
}

struct Mma {
  unsigned n = 0, k = 0;
  Element a_type = Element::f16, b_type = Element::f16;
  Sum sum = Sum::f32;
  std::string name;                       // of the counter
  std::vector<Slot> d, a;                 // a: empty when A is in shared memory
  Slot a_descriptor = 0, b_descriptor = 0, scale_d = 0;
  bool scale_d_negated = false, negate_a = false, negate_b = false, a_mn_major = false, b_mn_major = false;
  bool saturate = false;
};

struct Scratch {
  std::vector<uint8_t> bytes;
  std::vector<float> floats, a, b, sums;
};

// A matrix in shared memory as floats, (mn, k) or (k, mn), into s.floats.
void read_operand(Context& c, uint64_t descriptor, unsigned mn, unsigned k, Element type, bool mn_major,
                  const AsyncRef& ref, Scratch& s) {
  const unsigned bytes = bytes_of(type, Packing::dense, 16) / 16;
  Ranges ranges;
  s.bytes.resize(static_cast<size_t>(mn) * k * bytes);
  read_smem_matrix(c, c.cta, wgmma_matrix(c, descriptor), {mn, k, bytes, mn_major}, s.bytes.data(),
                   c.check ? &ranges : nullptr);
  for (const auto& [at, n] : ranges) c.check->access(ref, Space::shared, &c.cta, at, n, false);
  s.floats.resize(static_cast<size_t>(mn) * k);
  decode_elements(type, Packing::dense, s.bytes.data(), mn * k, s.floats.data());
  c.count.tensor_shared_read += s.bytes.size();
}

bool is_narrow(Element type) { return type == Element::e4m3 || type == Element::e5m2; }

void negate(std::vector<float>& values) {
  for (float& x : values) x = -x;
}

void execute(Context& c, const Mma& r, const WgmmaState& group, const AsyncRef& ref) {
  static thread_local Scratch s;
  const unsigned line = r.k * bytes_of(r.a_type, Packing::dense, 16) / 16;
  Warp* warps[kWarps];
  for (unsigned w = 0; w < kWarps; w++) warps[w] = c.cta.warps[c.warp.id / kWarps * kWarps + w].get();
  s.b.resize(static_cast<size_t>(r.k) * r.n);
  read_operand(c, group.b_descriptor, r.n, r.k, r.b_type, r.b_mn_major, ref, s);
  place_columns(s.floats.data(), r.n, r.k, !r.b_mn_major, s.b.data(), r.n);
  s.a.resize(64 * r.k);
  if (r.a.empty()) {
    read_operand(c, group.a_descriptor, 64, r.k, r.a_type, r.a_mn_major, ref, s);
    if (!r.a_mn_major) s.a.swap(s.floats);
    else place_columns(s.floats.data(), r.k, 64, true, s.a.data(), r.k);
  } else {
    s.bytes.resize(64 * line);
    for (unsigned w = 0; w < kWarps; w++) collect_a(*warps[w], r.a, 16, line, s.bytes.data() + 16 * w * line);
    decode_elements(r.a_type, Packing::dense, s.bytes.data(), 64 * r.k, s.a.data());
  }
  if (r.negate_a) negate(s.a);
  if (r.negate_b) negate(s.b);
  s.sums.resize(64 * r.n);
  std::array<float*, 64> rows;
  for (unsigned i = 0; i < 64; i++) rows[i] = s.sums.data() + i * r.n;
  const bool accumulate = (c.warp.pred(r.scale_d) >> c.first() & 1) != static_cast<unsigned>(r.scale_d_negated);
  const bool narrow = is_narrow(r.a_type);
  if (narrow) {
    if (!accumulate) std::fill(s.sums.begin(), s.sums.end(), 0.0f);
    for (unsigned w = 0; accumulate && w < kWarps; w++) read_fragment(*warps[w], r.sum, r.d, rows[16 * w], 16, r.n);
    add_narrow(s.a.data(), r.a_type, s.b.data(), r.b_type, 64, r.n, rows.data(), r.sum == Sum::f32);
  } else {
    multiply({s.a.data(), r.k, 1}, s.b.data(), r.n, 64, r.n, r.k, rows.data(), false);
  }
  const std::vector<Slot>* before = accumulate && !narrow ? &r.d : nullptr;
  for (unsigned w = 0; w < kWarps; w++)
    add_fragment(*warps[w], r.sum, r.d, before, rows[16 * w], 16, r.n, r.saturate);
  c.count.flops[r.name] += 2ull * 64 * r.n * r.k;
}

Step run_mma(Context& c, const Op& op) {
  const Mma& r = record<Mma>(op);
  const unsigned first = c.warp.id / kWarps * kWarps;
  if (c.mask != kAll) c.fail("wgmma.mma_async needs all 32 lanes of the warp");
  if (first + kWarps > c.cta.warps.size()) c.fail("wgmma.mma_async needs a whole warpgroup of four warps");
  WgmmaState& group = wgmma_state(*c.cta.warps[first]);
  if (c.fragment.state == 0) {
    const uint64_t a = r.a.empty() ? c.warp.v64(r.a_descriptor).x[0] : 0, b = c.warp.v64(r.b_descriptor).x[0];
    if (group.arrived && (group.op != &op || group.a_descriptor != a || group.b_descriptor != b))
      c.fail("wgmma.mma_async: the warps of the warpgroup are at different operations or hold different descriptors "
             "(the first to arrive is at PTX line " + std::to_string(group.op->from->line) + ")");
    group.op = &op;
    group.a_descriptor = a;
    group.b_descriptor = b;
    group.arrived |= 1u << c.warp.id % kWarps;
    c.fragment.state = group.generation + 1;
    if (group.arrived == (1u << kWarps) - 1) {
      group.last = c.check ? c.check->issue_tensor(c, {nullptr, c.cta.warps[first].get()}) : nullptr;
      execute(c, r, group, group.last);
      group.arrived = 0;
      group.generation++;
    }
  }
  c.fragment.why = {"wgmma.mma_async: waiting for the other warps of the warpgroup, arrived: %#llx", {group.arrived}};
  if (group.generation < c.fragment.state) return Step::blocked;
  c.fragment.state = 0;
  if (c.check) wgmma_state(c.warp).open.push_back(group.last);
  return Step::next;
}

Step run_fence(Context& c, const Op&) {
  if (c.check) c.check->wgmma_fence(c);
  return Step::next;
}

Step run_commit(Context& c, const Op&) {
  if (!c.check) return Step::next;
  WgmmaState& unit = wgmma_state(c.warp);
  unit.committed.push_back(std::move(unit.open));
  unit.open.clear();
  return Step::next;
}

// op.target: how many groups may stay pending.
Step run_wait(Context& c, const Op& op) {
  if (!c.check) return Step::next;
  WgmmaState& unit = wgmma_state(c.warp);
  while (unit.committed.size() > op.target) {
    for (const AsyncRef& ref : unit.committed.front()) c.check->group_done(c, ref, kAll);
    unit.committed.pop_front();
  }
  return Step::next;
}

bool immediate(Decoder& d, size_t i, int64_t off, int64_t on) {
  const Operand& o = d.operand(i);
  const int64_t value = static_cast<int64_t>(o.bits);
  if (o.kind != Operand::imm || (value != off && value != on))
    d.fail("operand " + std::to_string(i + 1) + " has to be " + std::to_string(off) + " or " + std::to_string(on));
  return value == on;
}

Element element(Decoder& d, const std::string& name) {
  constexpr std::pair<const char*, Element> names[] = {{"f16", Element::f16},   {"bf16", Element::bf16},
                                                       {"tf32", Element::tf32}, {"e4m3", Element::e4m3},
                                                       {"e5m2", Element::e5m2}, {"s8", Element::s8},
                                                       {"u8", Element::u8}};
  for (const auto& [text, type] : names)
    if (name == text) return type;
  d.fail("operand type ." + name + " is not supported");
}

// .dtype.atype.btype, in this order; everything else has been consumed by name.
void take_types(Decoder& d, Modifiers& m, Mma& r) {
  std::vector<std::string> types;
  for (size_t i = 1; i < d.from.parts.size(); i++)
    if (m.take(d.from.parts[i].c_str())) types.push_back(d.from.parts[i]);
  if (types.size() != 3) d.fail("three types are expected: of D, of A and of B");
  r.a_type = element(d, types[1]);
  r.b_type = element(d, types[2]);
  const unsigned bits = bytes_of(r.a_type, Packing::dense, 16) / 2;
  const bool integer = r.a_type == Element::s8 || r.a_type == Element::u8;
  const bool b_integer = r.b_type == Element::s8 || r.b_type == Element::u8;
  if (bits != bytes_of(r.b_type, Packing::dense, 16) / 2 || integer != b_integer || (bits > 8 && types[1] != types[2]))
    d.fail("types ." + types[1] + " and ." + types[2] + " do not go together");
  if (r.k * bits != 256) d.fail("k" + std::to_string(r.k) + " does not go with ." + types[1]);
  r.sum = types[0] == "f32" ? Sum::f32 : types[0] == "f16" ? Sum::f16 : Sum::s32;
  const bool half_fits = r.a_type == Element::f16 || bits == 8;
  if ((types[0] != "f32" && types[0] != "f16" && types[0] != "s32") || (r.sum == Sum::s32) != integer ||
      (r.sum == Sum::f16 && !half_fits))
    d.fail("D of type ." + types[0] + " does not go with ." + types[1]);
  if (r.saturate && !integer) d.fail(".satfinite is for integers");
  r.name = "wgmma " + types[1];
}

void take_shape(Decoder& d, Modifiers& m, Mma& r) {
  const std::string shape = m.take_prefix("m64n");
  const size_t k = shape.find('k');
  if (k == std::string::npos) d.fail("a shape .m64nNkK is missing");
  r.n = static_cast<unsigned>(std::stoul(shape.substr(0, k)));
  r.k = static_cast<unsigned>(std::stoul(shape.substr(k + 1)));
  if (r.n < 8 || r.n > 256 || r.n % 8)
    d.fail("N is " + std::to_string(r.n) + ", accepted are multiples of 8 up to 256");
}

void decode_mma(Decoder& d, Op& op, Modifiers& m) {
  if (m.take("sp")) d.fail("wgmma.mma_async.sp is not supported");
  Mma r;
  take_shape(d, m, r);
  r.saturate = m.take("satfinite");
  take_types(d, m, r);
  const bool integer = r.sum == Sum::s32, half = r.a_type == Element::f16 || r.a_type == Element::bf16;
  if (integer && r.n > 32 && r.n % 16) d.fail("N above 32 has to be a multiple of 16 for integers");
  r.d = d.destinations(d.operand(0), 4);
  const size_t want = r.sum == Sum::f16 ? r.n / 4 : r.n / 2;
  if (r.d.size() != want)
    d.fail("D has " + std::to_string(r.d.size()) + " registers, expected " + std::to_string(want));
  const bool registers = d.operand(1).kind == Operand::vec;
  if (registers) {
    r.a = d.sources(d.operand(1), 4);
    if (r.a.size() != 4) d.fail("A has " + std::to_string(r.a.size()) + " registers, expected 4");
  } else {
    r.a_descriptor = d.source(d.operand(1), 8);
  }
  r.b_descriptor = d.source(d.operand(2), 8);
  r.scale_d = d.predicate(d.operand(3), r.scale_d_negated);
  size_t next = 4;
  if (!integer) {
    r.negate_a = immediate(d, next++, 1, -1);
    r.negate_b = immediate(d, next++, 1, -1);
  }
  if (half && !registers) r.a_mn_major = immediate(d, next++, 0, 1);
  if (half) r.b_mn_major = immediate(d, next++, 0, 1);
  d.count(next, next);
  op.list = r.d;
  op.list.insert(op.list.end(), r.a.begin(), r.a.end());
  op.run = run_mma;
  op.extra = std::make_shared<Mma>(std::move(r));
}

}  // namespace

void decode_wgmma(Decoder& d, Op& op) {
  Modifiers m(d.from);
  op.collective = true;
  m.take_one({"sync"});
  m.take_one({"aligned"});
  op.kind = Class::sync;
  if (m.take("mma_async")) {
    op.kind = Class::tensor;
    decode_mma(d, op, m);
  } else if (m.take("fence")) {
    d.count(0, 0);
    op.run = run_fence;
  } else if (m.take("commit_group")) {
    d.count(0, 0);
    op.run = run_commit;
  } else {
    m.take_one({"wait_group"});
    d.count(1, 1);
    if (d.operand(0).kind != Operand::imm) d.fail("wgmma.wait_group takes an integer constant");
    op.target = static_cast<uint32_t>(d.operand(0).bits);
    op.run = run_wait;
  }
  m.done();
}

}  // namespace ptx
