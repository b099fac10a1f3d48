// ldmatrix, stmatrix and movmatrix (PTX ISA 9.7.14.5.15 to 17), and the dispatch of mma.
#include <array>

#include "async/async.h"
#include "tensor/matmul.h"
#include "tensor/mma.h"

namespace ptx {
namespace {

constexpr unsigned kRow = 16;   // bytes of a matrix row in shared memory, whatever its elements

// The byte of the rows' block (32, 16) that byte e of register i in thread t holds. Row r of it is at lane r's address.
using Place = uint16_t (*)(unsigned t, unsigned i, unsigned e);

uint16_t plain(unsigned t, unsigned i, unsigned e) {
  return static_cast<uint16_t>((8 * i + t / 4) * kRow + t % 4 * 4 + e);
}
// 16-bit elements, transposed: rows become the elements of a register.
uint16_t transposed(unsigned t, unsigned i, unsigned e) {
  return static_cast<uint16_t>((8 * i + t % 4 * 2 + e / 2) * kRow + t / 4 * 2 + e % 2);
}
// 8-bit elements of stmatrix.m16n8.trans: a thread has its part of an accumulator of mma.m16n8, (g, 2q), (g, 2q + 1)
// and the same of row g + 8, and columns become rows (CuTe: SM100_U8x4_STSM_T).
uint16_t transposed_bytes(unsigned t, unsigned i, unsigned e) {
  return static_cast<uint16_t>((8 * i + t % 4 * 2 + e % 2) * kRow + t / 4 + e / 2 * 8);
}
// 8-bit elements of ldmatrix.m16n16.trans: two registers to a matrix (CuTe: SM100_U8x8_LDSM_T).
uint16_t transposed_square(unsigned t, unsigned i, unsigned e) {
  return static_cast<uint16_t>((16 * (i / 2) + t % 4 * 4 + i % 2 * 2 + e % 2) * kRow + t / 4 + e / 2 * 8);
}

struct Matrices {
  Address address;
  unsigned rows = 0;            // of all matrices: lanes that give an address
  unsigned bits = 8;            // 4 or 6: packed elements become bytes
  std::vector<Slot> registers;
  std::vector<uint16_t> places; // (registers, 32 threads, 4 bytes)
};

// The rows' places, checked; tells the checker and counts the wavefronts: eight rows at a time, a bank holds 4 bytes.
void find_rows(Context& c, const Matrices& r, const char* what, bool write, std::array<uint8_t*, kLanes>& rows) {
  uint64_t at[kLanes], offsets[kLanes] = {};
  r.address.lanes(c, at);
  for (unsigned l = 0; l < r.rows; l++) {
    const SharedPlace place = shared_place(c, at[l], r.address.generic, kRow, kRow, true, what);
    offsets[l] = place.offset;
    rows[l] = place.bytes();
  }
  const Mask lanes = r.rows == kLanes ? kAll : (1u << r.rows) - 1;
  if (c.check && write) c.check->lanes(c, Space::shared, &c.cta, offsets, lanes, kRow, true);
  if (c.check && !write) c.check->gather(c, c.cta, offsets, r.rows, kRow);
  (write ? c.count.shared_written : c.count.shared_read) += r.rows * kRow;
  c.count.shared_accesses++;
  c.count.shared_least_wavefronts += r.rows / 8;
  for (unsigned first = 0; first < r.rows; first += 8) {
    unsigned of_bank[8] = {}, most = 0;
    for (unsigned l = first; l < first + 8; l++) {
      bool seen = false;
      for (unsigned k = first; k < l; k++) seen |= offsets[k] == offsets[l];
      if (!seen) most = std::max(most, ++of_bank[offsets[l] / kRow % 8]);
    }
    c.count.shared_wavefronts += most;
  }
}

Step run_load(Context& c, const Op& op) {
  const Matrices& r = record<Matrices>(op);
  std::array<uint8_t*, kLanes> rows{};
  find_rows(c, r, "ldmatrix", false, rows);
  uint8_t block[kLanes * kRow];
  for (unsigned l = 0; l < r.rows; l++) {
    if (r.bits == 8) std::memcpy(block + l * kRow, rows[l], kRow);
    else unpack_sixteen(r.bits, rows[l], block + l * kRow);   // CUTLASS: 4-bit elements come in the low bits of a byte
  }
  const uint16_t* place = r.places.data();
  for (Slot s : r.registers) {
    V32& v = c.warp.v32(s);
    for (unsigned t = 0; t < kLanes; t++, place += 4)
      v.x[t] = block[place[0]] | block[place[1]] << 8 | block[place[2]] << 16 | uint32_t{block[place[3]]} << 24;
  }
  return Step::next;
}

Step run_store(Context& c, const Op& op) {
  const Matrices& r = record<Matrices>(op);
  std::array<uint8_t*, kLanes> rows{};
  find_rows(c, r, "stmatrix", true, rows);
  uint8_t block[kLanes * kRow];
  const uint16_t* place = r.places.data();
  for (Slot s : r.registers) {
    const V32& v = c.warp.v32(s);
    for (unsigned t = 0; t < kLanes; t++)
      for (unsigned e = 0; e < 4; e++, place++) block[*place] = static_cast<uint8_t>(v.x[t] >> 8 * e);
  }
  for (unsigned l = 0; l < r.rows; l++) std::memcpy(rows[l], block + l * kRow, kRow);
  return Step::next;
}

Step run_move(Context& c, const Op& op) {
  const V32 from = c.warp.v32(op.s[0]);
  V32& to = c.warp.v32(op.d[0]);
  const auto element = [&](unsigned row, unsigned column) {
    return from.x[4 * row + column / 2] >> column % 2 * 16 & 0xffff;
  };
  for (unsigned t = 0; t < kLanes; t++) to.x[t] = element(t % 4 * 2, t / 4) | element(t % 4 * 2 + 1, t / 4) << 16;
  return Step::next;
}

// ldmatrix r, [p] and stmatrix [p], r.
void decode_rows(Decoder& d, Op& op, Modifiers& m, bool load) {
  Matrices r;
  const std::string shape = load ? m.take_one({"m8n8", "m16n16", "m8n16"}) : m.take_one({"m8n8", "m16n8"});
  const std::string times = m.take_one({"x1", "x2", "x4"});
  const bool trans = m.take("trans");
  const bool shared = m.take("shared") || m.take("shared::cta");
  std::string type = m.take_optional({"b16", "b8", "b8x16"}, "");
  if (type == "b8x16") r.bits = m.take_one({"b6x16_p32", "b4x16_p64"}) == "b6x16_p32" ? 6 : 4;
  const unsigned count = static_cast<unsigned>(times[1] - '0'), square = shape == "m16n16" ? 2 : 1;
  const bool fits = shape == "m8n8" ? type == "b16"
                    : shape == "m8n16" ? type == "b8x16" && !trans
                    : shape == "m16n16" ? (type == "b8" || type == "b8x16") && trans && count < 4
                                        : type == "b8" && trans;
  if (!fits) d.fail("." + shape + "." + times + (trans ? ".trans" : "") + " does not exist with ." + type);
  d.count(2, 2);
  r.address = address_of(d, d.operand(load ? 1 : 0), shared ? In::shared : In::generic);
  const Operand& vector = d.operand(load ? 0 : 1);
  r.registers = load ? d.destinations(vector, 4) : d.sources(vector, 4);
  if (r.registers.size() != count * square)
    d.fail(std::to_string(r.registers.size()) + " registers, expected " + std::to_string(count * square));
  r.rows = 8 * count * square;
  const Place place = shape == "m16n16" ? transposed_square
                      : shape == "m16n8" ? transposed_bytes
                      : trans            ? transposed
                                         : plain;
  for (unsigned i = 0; i < r.registers.size(); i++)
    for (unsigned t = 0; t < kLanes; t++)
      for (unsigned e = 0; e < 4; e++) r.places.push_back(place(t, i, e));
  op.kind = Class::shared;
  op.run = load ? run_load : run_store;
  op.effect = !load;
  op.list = r.registers;
  op.extra = std::make_shared<Matrices>(std::move(r));
}

}  // namespace

void decode_matrix(Decoder& d, Op& op) {
  Modifiers m(d.from);
  op.collective = true;
  m.take_one({"sync"});
  m.take_one({"aligned"});
  const std::string& root = d.from.parts[0];
  if (root == "mma") {
    decode_mma(d, op, m);
  } else if (root == "movmatrix") {
    m.take_one({"m8n8"});
    m.take_one({"trans"});
    m.take_one({"b16"});
    d.count(2, 2);
    op.kind = Class::move;
    op.d[0] = d.destination(d.operand(0), 4);
    op.s[0] = d.source(d.operand(1), 4);
    op.run = run_move;
  } else {
    decode_rows(d, op, m, root == "ldmatrix");
  }
  m.done();
}

}  // namespace ptx
