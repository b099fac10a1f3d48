// The product of a tcgen05.mma: operands become float panels, tensor memory rows take the sums.
//
// Which lanes hold D is drawn in the ISA (9.7.16.10.5 "Data Path Layout Organization"); the lines below say it in words
// and agree with the tensor memory layouts that CuTe publishes for the same instructions.
//   layout A (M 256, pair) and D (M 128): row r of the CTA's rows in lane r, all N columns.
//   layout F (M 64): row r in lane 32 * (r / 16) + r % 16, plus 16 when D's address says so.
//   layout B (M 128, pair) and E (M 64, .ws): rows in lanes 0-63 for the first half of N, in 64-127 for the second.
//   layout G (M 32, .ws): rows in 32 lanes for each quarter of N.
#include <algorithm>

#include "tensor/tcgen05_mma.h"

namespace ptx {
namespace {

// A part of D: the rows of the CTA by the columns from `first` on, `count` of them, lanes from `lane` on.
struct Part {
  unsigned lane, first, count;
};

struct Scratch {
  std::vector<uint8_t> bytes;
  std::vector<float> floats, a, b, scaled_b, sums;
  std::vector<float*> rows;
};

struct Product {
  const Context& c;
  const MmaJob& job;
  const AsyncRef& ref;
  std::vector<Cta*> ctas;
  Scratch& s;
  unsigned rows;                    // of A and D in one CTA
  bool sparse_lanes;                // layout F
  std::vector<Part> parts;

  void run();
  void read_b();
  void read_a(Cta&, const Part&);
  void accumulate(Cta&, unsigned index);
  void combine(Cta&, const Part&);
  void report_d(Cta&, unsigned index) const;
  unsigned lane_of(const Part& p, unsigned row) const {
    return p.lane + (sparse_lanes ? row / 16 * 32 + row % 16 : row);
  }
  bool disabled(unsigned index, unsigned lane) const { return job.disable[4 * index + lane / 32] >> lane % 32 & 1; }
};

Packing smem_packing(MmaKind kind) {
  return kind == MmaKind::mxf4 || kind == MmaKind::mxf4nvf4 ? Packing::dense : Packing::padded;
}

// Bytes that an element takes in an operand's line; 0 for two to a byte.
unsigned container(Element e, Packing packing) { return bytes_of(e, packing, 16) / 16; }

// The matrix behind a descriptor as floats, (mn, k) or (k, mn), into s.floats.
void read_operand(Product& p, Cta& cta, uint64_t descriptor, unsigned mn, Element type, bool mn_major, bool negate) {
  const SmemMatrix m = tcgen05_matrix(p.c, descriptor);
  const unsigned k = p.job.k;
  const Packing packing = smem_packing(p.job.mma->kind);
  // Table 54: transposed 32-bit operands have 32-byte atomicity, and nothing else has.
  const bool needs_32 = mn_major && type == Element::tf32;
  if (needs_32 != (m.swizzle == SmemSwizzle::b128_32))
    p.c.fail("tcgen05.mma: 128-byte swizzling with 32-byte atomicity is for transposed tf32 operands, which need it");
  const unsigned bytes = container(type, packing);
  SmemExtent extent{mn, bytes ? k : k / 2, bytes ? bytes : 1, mn_major};
  Ranges ranges;
  p.s.bytes.resize(static_cast<size_t>(mn) * 32);
  read_smem_matrix(p.c, cta, m, extent, p.s.bytes.data(), p.c.check ? &ranges : nullptr);
  if (p.c.check)
    for (const auto& [at, n] : ranges) p.c.check->access(p.ref, Space::shared, &cta, at, n, false);
  p.s.floats.resize(static_cast<size_t>(mn) * k);
  decode_elements(type, packing, p.s.bytes.data(), mn * k, p.s.floats.data());
  if (negate)
    for (float& x : p.s.floats) x = -x;
}

void Product::read_b() {
  const unsigned n = job.n / static_cast<unsigned>(ctas.size());   // each CTA of a pair holds half of B
  s.b.resize(static_cast<size_t>(job.k) * job.n);
  for (size_t i = 0; i < ctas.size(); i++) {
    read_operand(*this, *ctas[i], job.b_descriptor, n, job.b_type, job.b_mn_major, job.negate_b);
    place_columns(s.floats.data(), n, job.k, !job.b_mn_major, s.b.data() + i * n, job.n);
  }
}

// A as (rows, k), for one part of D: out of tensor memory every part reads the lanes that it writes.
void Product::read_a(Cta& cta, const Part& part) {
  s.a.resize(static_cast<size_t>(rows) * job.k);
  if (!job.mma->tensor_a) {
    read_operand(*this, cta, job.a_descriptor, rows, job.a_type, job.a_mn_major, job.negate_a);
    if (!job.a_mn_major) s.a.swap(s.floats);
    else place_columns(s.floats.data(), job.k, rows, true, s.a.data(), job.k);
    return;
  }
  // 9.7.16.10.4: tensor memory has dense 16-bit, 8-bit and (mxf4) 4-bit elements, 6- and 4-bit ones in bytes otherwise.
  const Packing packing = smem_packing(job.mma->kind) == Packing::dense ? Packing::dense : Packing::container;
  const unsigned columns = 8;   // 32 bytes, whatever the kind
  const unsigned first = lane_of(part, 0), last = lane_of(part, rows - 1);
  check_tensor(c, cta, first, last - first + 1, job.a.column, columns, "tcgen05.mma A");
  for (unsigned r = 0; r < rows; r++) {
    const unsigned lane = lane_of(part, r);
    if (c.check && (r == 0 || (sparse_lanes && r % 16 == 0)))
      c.check->tensor(ref, cta, lane, sparse_lanes ? 16 : rows, job.a.column, columns, false);
    const auto* bytes = reinterpret_cast<const uint8_t*>(tensor_row(cta, lane) + job.a.column);
    decode_elements(job.a_type, packing, bytes, job.k, s.a.data() + static_cast<size_t>(r) * job.k);
  }
  if (job.negate_a)
    for (float& x : s.a) x = -x;
}

// 9.7.16.10.7 "Block Scaling": factor i of row (column) x of an operand is byte `id + i` of the word in lane x % 32,
// column x / 32 of the factors, in the 32 lanes that work on it.
float factor(const MmaJob& job, Cta& cta, TensorPlace at, unsigned quarter, unsigned x, unsigned i, unsigned id) {
  const uint32_t word = tensor_row(cta, 32 * quarter + x % 32)[at.column + x / 32];
  const uint32_t code = word >> 8 * (id + i) & 0xff;
  return job.ue8m0 ? decode_ue8m0(code) : decode_ue4m3(code);
}

void check_factors(Product& p, Cta& cta, TensorPlace at, unsigned count, const char* what) {
  const unsigned columns = (count + 31) / 32;
  if (at.lane != 0) p.c.fail(std::string(what) + ": lane " + std::to_string(at.lane) + ", has to be 0");
  check_tensor(p.c, cta, 0, kTmemLanes, at.column, columns, what);
  if (p.c.check) p.c.check->tensor(p.ref, cta, 0, kTmemLanes, at.column, columns, false);
}

// Scales A and B of one part; s.a in place, B into s.scaled_b.
void scale_part(Product& p, Cta& cta, const Part& part) {
  const MmaJob& job = p.job;
  const unsigned k = job.k, block = job.mma->block, factors = k / block;
  check_factors(p, cta, job.scale_a, p.rows, "tcgen05.mma scale-A");
  check_factors(p, cta, job.scale_b, part.count, "tcgen05.mma scale-B");
  for (unsigned r = 0; r < p.rows; r++)
    for (unsigned i = 0; i < factors; i++) {
      const float by = factor(job, cta, job.scale_a, p.lane_of(part, r) / 32, r, i, job.scale_a_id);
      float* row = p.s.a.data() + static_cast<size_t>(r) * k + i * block;
      for (unsigned step = 0; step < block; step++) row[step] *= by;
    }
  const unsigned low = p.lane_of(part, 0) / 32, high = p.lane_of(part, p.rows - 1) / 32;
  std::vector<float> by(part.count);
  for (unsigned i = 0; i < factors; i++) {
    for (unsigned n = 0; n < part.count; n++) {
      by[n] = factor(job, cta, job.scale_b, low, n, i, job.scale_b_id);
      for (unsigned quarter = low + 1; quarter <= high; quarter++) {
        const float other = factor(job, cta, job.scale_b, quarter, n, i, job.scale_b_id);
        if (as_bits(other) != as_bits(by[n]))
          p.c.fail("tcgen05.mma scale-B: the factors of column " + std::to_string(part.first + n) +
                   " differ between lanes 32 * " + std::to_string(low) + " and 32 * " + std::to_string(quarter) +
                   "; they have to be the same in every 32 lanes");
      }
    }
    for (unsigned step = i * block; step < (i + 1) * block; step++) {
      const float* from = p.s.b.data() + static_cast<size_t>(step) * job.n + part.first;
      float* to = p.s.scaled_b.data() + static_cast<size_t>(step) * job.n + part.first;
      for (unsigned n = 0; n < part.count; n++) to[n] = from[n] * by[n];
    }
  }
}

// Where the sums do not go to D directly: f16 and s32 accumulators.
void Product::combine(Cta& cta, const Part& part) {
  const float down = std::ldexp(1.f, -static_cast<int>(job.mma->scale_d));
  for (unsigned r = 0; r < rows; r++) {
    const unsigned lane = lane_of(part, r);
    uint32_t* d = tensor_row(cta, lane) + job.d.column;
    const float* sum = s.sums.data() + static_cast<size_t>(r) * part.count;
    if (s.rows[r] == nullptr) continue;
    for (unsigned n = 0; n < part.count; n++) {
      if (job.d_type == MmaJob::D::s32) {
        d[n] = add_s32(job.accumulate ? d[n] : 0, sum[n], job.saturate);
      } else {   // 9.7.16.10.4.1: one f16 to a word, in its lower half
        const float before = job.accumulate ? f32_of_f16(d[n] & 0xffff) * down : 0;
        d[n] = f16_of_f32(sum[n] + before);
      }
    }
  }
}

void Product::report_d(Cta& cta, unsigned index) const {
  bool any_disabled = false;
  for (unsigned i = 0; i < 4; i++) any_disabled |= job.disable[4 * index + i] != 0;
  const unsigned step = any_disabled ? 1 : sparse_lanes ? 16 : rows;
  for (const Part& part : parts)
    for (unsigned r = 0; r < rows; r += step) {
      const unsigned lane = lane_of(part, r);
      if (any_disabled && disabled(index, lane)) continue;
      if (job.accumulate) c.check->tensor(ref, cta, lane, step, job.d.column, part.count, false);
      c.check->tensor(ref, cta, lane, step, job.d.column, part.count, true);
    }
}

void Product::accumulate(Cta& cta, unsigned index) {
  for (const Part& part : parts)
    check_tensor(c, cta, part.lane, lane_of(part, rows - 1) - part.lane + 1, job.d.column, part.count, "tcgen05.mma D");
  if (c.check) report_d(cta, index);
  const bool direct = job.d_type == MmaJob::D::f32;
  const float down = std::ldexp(1.f, -static_cast<int>(job.mma->scale_d));
  std::vector<float> nowhere(job.n);   // the row of a disabled lane
  for (const Part& part : parts) {
    if (job.mma->tensor_a || job.mma->block || &part == &parts[0]) read_a(cta, part);
    const float* b = s.b.data();
    if (job.mma->block) {
      s.scaled_b.resize(s.b.size());
      scale_part(*this, cta, part);
      b = s.scaled_b.data();
    }
    s.rows.assign(rows, nullptr);
    s.sums.resize(static_cast<size_t>(rows) * part.count);
    for (unsigned r = 0; r < rows; r++) {
      uint32_t* d = tensor_row(cta, lane_of(part, r)) + job.d.column;
      const bool off = disabled(index, lane_of(part, r));
      if (!direct) s.rows[r] = s.sums.data() + static_cast<size_t>(r) * part.count;
      else s.rows[r] = off ? nowhere.data() : reinterpret_cast<float*>(d);
      if (direct && job.accumulate && job.mma->scale_d && !off)
        for (unsigned n = 0; n < part.count; n++) d[n] = as_bits(as_float(d[n]) * down);
    }
    multiply({s.a.data(), job.k, 1}, b + part.first, job.n, rows, part.count, job.k, s.rows.data(),
             direct && job.accumulate);
    if (direct) continue;
    for (unsigned r = 0; r < rows; r++)
      if (disabled(index, lane_of(part, r))) s.rows[r] = nullptr;
    combine(cta, part);
  }
}

void Product::run() {
  const Mma& mma = *job.mma;
  rows = job.m / static_cast<unsigned>(ctas.size());
  sparse_lanes = rows == 64 && !mma.pair && !mma.stationary;
  const unsigned split = sparse_lanes ? 1 : kTmemLanes / rows;
  if (job.d.lane != 0 && !(sparse_lanes && job.d.lane == 16))
    c.fail("tcgen05.mma D: lane " + std::to_string(job.d.lane) + ", accepted " + (sparse_lanes ? "0 and 16" : "0"));
  if (mma.tensor_a && job.a.lane != job.d.lane)
    c.fail("tcgen05.mma: A is at lane " + std::to_string(job.a.lane) + " and D at lane " + std::to_string(job.d.lane) +
           "; they have to be the same");
  if (mma.tensor_a && mma.stationary && rows < kTmemLanes)
    c.fail("tcgen05.mma.ws: A in tensor memory with M below 128 is not supported");
  for (unsigned i = 0; i < split; i++)
    parts.push_back({job.d.lane + i * rows, i * (job.n / split), job.n / split});
  read_b();
  for (size_t i = 0; i < ctas.size(); i++) accumulate(*ctas[i], static_cast<unsigned>(i));
}

}  // namespace

void run_product(const Context& c, const std::vector<Cta*>& ctas, const MmaJob& job, const AsyncRef& ref) {
  static thread_local Scratch scratch;   // grows to the largest operation, then stays
  Product p{c, job, ref, ctas, scratch, 0, false, {}};
  p.run();
}

}  // namespace ptx
