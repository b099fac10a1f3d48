// tcgen05.cp and tcgen05.shift (PTX ISA 9.7.16.9): tensor memory filled from shared memory, and moved by a lane.
#include "tensor/matmul.h"
#include "tensor/smem_matrix.h"
#include "tensor/tcgen05.h"

namespace ptx {
namespace {

// The rows of a copy: row r of the source goes to lane + target(r) of the destination, and to `repeat` more places.
struct Copy {
  bool pair = false;
  Address to;
  Slot descriptor = 0;
  unsigned rows = 0, bytes = 0;   // bytes of a row, in both memories
  unsigned apart = 1;             // 4x256b: source rows and lanes lie 32 apart
  enum Spread : uint8_t { once, warpx4, warps_02_13, warps_01_23 } spread = once;
  unsigned bits = 8;              // 4 or 6: elements are unpacked to bytes on the way
};

// 9.7.16.9.1 "Optional Decompression": 16 packed elements in 8 or 12 bytes, then padding, become 16 bytes. 4-bit ones
// land in bits 2-5 (where kind::mxf8f6f4 reads e2m1), 6-bit ones in bits 0-5.
void unpack(unsigned bits, uint8_t chunk[16]) {
  uint8_t out[16];
  unpack_sixteen(bits, chunk, out);
  for (unsigned i = 0; i < 16; i++) chunk[i] = static_cast<uint8_t>(bits == 4 ? out[i] << 2 : out[i]);
}

// The lanes that source row r goes to, from the first lane of the destination.
unsigned targets(const Copy& r, unsigned row, unsigned lanes[4]) {
  switch (r.spread) {
    case Copy::warpx4:
      for (unsigned i = 0; i < 4; i++) lanes[i] = row + 32 * i;
      return 4;
    case Copy::warps_02_13: lanes[0] = row, lanes[1] = row + 64; return 2;
    case Copy::warps_01_23: lanes[0] = row % 32 + row / 32 * 64, lanes[1] = lanes[0] + 32; return 2;
    default: lanes[0] = row * r.apart; return 1;
  }
}

void copy_block(const Context& c, Cta& cta, const Copy& r, uint64_t descriptor, TensorPlace to, const AsyncRef& ref) {
  SmemMatrix m = tcgen05_matrix(c, descriptor);
  std::vector<uint8_t> block(static_cast<size_t>(r.rows) * r.bytes);
  Ranges ranges;
  Ranges* touched = c.check ? &ranges : nullptr;
  if (r.apart == 1) {
    read_smem_matrix(c, cta, m, {r.rows, r.bytes, 1, false}, block.data(), touched);
  } else {
    for (unsigned row = 0; row < r.rows; row++) {   // rows 0, 32, 64, 96 of the matrix: every fourth group of 8
      SmemMatrix at = m;
      at.start += row * r.apart / 8 * m.stride;
      read_smem_matrix(c, cta, at, {1, r.bytes, 1, false}, block.data() + row * r.bytes, touched);
    }
  }
  if (r.bits != 8)
    for (size_t i = 0; i < block.size(); i += 16) unpack(r.bits, block.data() + i);
  const unsigned columns = r.bytes / 4, span = r.spread != Copy::once || r.apart != 1 ? kTmemLanes : r.rows;
  const unsigned lanes_needed = r.apart != 1 ? (r.rows - 1) * r.apart + 1 : span;
  check_tensor(c, cta, to.lane, lanes_needed, to.column, columns, "tcgen05.cp");
  if (c.check) {
    for (const auto& [at, bytes] : ranges) c.check->access(ref, Space::shared, &cta, at, bytes, false);
    if (r.apart == 1) c.check->tensor(ref, cta, to.lane, span, to.column, columns, true);
    else
      for (unsigned row = 0; row < r.rows; row++)
        c.check->tensor(ref, cta, to.lane + row * r.apart, 1, to.column, columns, true);
  }
  for (unsigned row = 0; row < r.rows; row++) {
    unsigned lanes[4];
    const unsigned n = targets(r, row, lanes);
    for (unsigned i = 0; i < n; i++)
      std::memcpy(tensor_row(cta, to.lane + lanes[i]) + to.column, block.data() + row * r.bytes, r.bytes);
  }
}

Step run_copy(Context& c, const Op& op) {
  const Copy& r = record<Copy>(op);
  uint64_t at[kLanes];
  r.to.lanes(c, at);
  const std::vector<Cta*> ctas = tensor_group(c, r.pair);
  auto issued = std::make_shared<const Issued>(c);
  for (unsigned l = 0; l < kLanes; l++) {
    if (!(c.mask >> l & 1)) continue;
    const TensorPlace to = tensor_place(static_cast<uint32_t>(at[l]));
    const uint64_t descriptor = c.warp.v64(r.descriptor).x[l];
    const AsyncRef ref = c.check ? c.check->issue_tensor(c, tensor_pipe(c, r.pair), l) : nullptr;
    const uint64_t bytes = static_cast<uint64_t>(r.rows) * r.bytes * ctas.size();
    c.count.tensor_shared_read += bytes;
    c.count.tmem_written += bytes * (r.spread == Copy::warpx4 ? 4 : r.spread == Copy::once ? 1 : 2);
    c.cluster.submit(tensor_order(c, r.pair), [=, &r] {
      for (Cta* cta : ctas) copy_block(issued->c, *cta, r, descriptor, to, ref);
    });
  }
  return Step::next;
}

struct Shift {
  bool pair;
  Address at;
};

// 31x256b: of the 32 lanes of a warp, each but the last takes the 32 bytes of the lane after it.
Step run_shift(Context& c, const Op& op) {
  const Shift& r = record<Shift>(op);
  const std::vector<Cta*> ctas = tensor_group(c, r.pair);
  uint64_t at[kLanes];
  r.at.lanes(c, at);
  auto issued = std::make_shared<const Issued>(c);
  for (unsigned l = 0; l < kLanes; l++) {
    if (!(c.mask >> l & 1)) continue;
    const TensorPlace p = tensor_place(static_cast<uint32_t>(at[l]));
    if (p.lane % 32) c.fail("tcgen05.shift: lane " + std::to_string(p.lane) + " has to be a multiple of 32");
    const AsyncRef ref = c.check ? c.check->issue_tensor(c, tensor_pipe(c, r.pair), l) : nullptr;
    c.count.tmem_read += 31 * 32 * ctas.size();
    c.count.tmem_written += 31 * 32 * ctas.size();
    c.cluster.submit(tensor_order(c, r.pair), [=] {
      for (Cta* cta : ctas) {
        check_tensor(issued->c, *cta, p.lane, 32, p.column, 8, "tcgen05.shift");
        if (issued->c.check) {
          issued->c.check->tensor(ref, *cta, p.lane + 1, 31, p.column, 8, false);
          issued->c.check->tensor(ref, *cta, p.lane, 31, p.column, 8, true);
        }
        for (unsigned lane = p.lane; lane < p.lane + 31; lane++)
          std::memcpy(tensor_row(*cta, lane) + p.column, tensor_row(*cta, lane + 1) + p.column, 32);
      }
    });
  }
  return Step::next;
}

}  // namespace

void decode_tensor_copy(Decoder& d, Op& op, Modifiers& m) {
  if (m.take("shift")) {
    m.take_one({"down"});
    const bool pair = take_pair(d, m);
    d.count(1, 1);
    op.run = run_shift;
    op.extra = std::make_shared<Shift>(Shift{pair, tensor_operand(d, d.operand(0))});
    return;
  }
  m.take("cp");
  Copy r;
  r.pair = take_pair(d, m);
  const std::string shape = m.take_one({"128x256b", "4x256b", "128x128b", "64x128b", "32x128b"});
  const size_t x = shape.find('x');
  r.rows = static_cast<unsigned>(std::stoul(shape.substr(0, x)));
  r.bytes = static_cast<unsigned>(std::stoul(shape.substr(x + 1))) / 8;
  if (r.rows == 4) r.apart = 32;
  if (r.rows == 32) r.spread = (m.take_one({"warpx4"}), Copy::warpx4);
  if (r.rows == 64)
    r.spread = m.take_one({"warpx2::02_13", "warpx2::01_23"}) == "warpx2::02_13" ? Copy::warps_02_13
                                                                                 : Copy::warps_01_23;
  if (m.take("b8x16")) r.bits = m.take_one({"b6x16_p32", "b4x16_p64"}) == "b6x16_p32" ? 6 : 4;
  d.count(2, 2);
  r.to = tensor_operand(d, d.operand(0));
  r.descriptor = d.source(d.operand(1), 8);
  op.run = run_copy;
  op.extra = std::make_shared<Copy>(r);
}

}  // namespace ptx
