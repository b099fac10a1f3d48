// cp.async.bulk.tensor, cp.reduce.async.bulk.tensor, cp.async.bulk.prefetch.tensor: PTX ISA 9.7.9.27.1 "Tensor copy".
#include <algorithm>

#include "async/tma.h"

namespace ptx {

namespace {

struct Tensor {
  Address map, shared, barrier;
  std::vector<Slot> coordinates;
  bool own = false;              // the destination is .shared::cta
  bool scattered = false;        // tile::gather4, tile::scatter4
  bool multicast = false, pair = false;   // pair: .cta_group::2
  Slot mask = 0;
  bool reduces = false;
  Reduce reduce = Reduce::add;
  unsigned dims = 1;
};

// The descriptor of a lane, read when the instruction is issued.
TensorMap map_of(const Context& c, uint64_t address) {
  return decode_tensor_map(global_place(c, address, kTensorMapBytes, 64, false, "the tensor map"));
}

AsyncRef issue(const Context& c, uint64_t map, unsigned lane) {
  if (!c.check) return nullptr;
  const AsyncRef ref = c.check->issue(c, lane);
  c.check->access(ref, Space::global, nullptr, map, kTensorMapBytes, false, Proxy::tensormap);
  return ref;
}

struct Lane {
  uint64_t map, shared, barrier;
  int32_t x[5];
  unsigned number;
  bool same_store(const Lane& o, size_t n) const {
    return map == o.map && shared == o.shared && std::equal(x, x + n, o.x);
  }
};

SharedPlace place_of(const Context& c, const Tensor& r, const Box& b, uint64_t address, bool own) {
  return shared_place(c, address, r.shared.generic, b.shared_bytes(), 128, own, "the shared side of the tensor copy");
}

void load(Context& c, const Tensor& r, const Lane& lane, uint32_t mask) {
  const auto box = std::make_shared<const Box>(
      box_at(c, map_of(c, lane.map), lane.x, static_cast<unsigned>(r.coordinates.size()), r.scattered, false));
  const SharedPlace to = place_of(c, r, *box, lane.shared, r.own);
  const SharedPlace barrier = shared_place(c, lane.barrier, r.barrier.generic, 8, 8, false, "the mbarrier");
  const unsigned peers = r.pair ? ~1u : ~0u;
  if (!r.multicast && (barrier.cta->rank & peers) != (to.cta->rank & peers))
    c.fail("the mbarrier is in CTA rank " + std::to_string(barrier.cta->rank) + ", the destination in " +
           std::to_string(to.cta->rank) + ": they have to be in one CTA" + (r.pair ? " pair" : ""));
  const AsyncRef ref = issue(c, lane.map, lane.number);
  const auto held = std::make_shared<const Issued>(c);
  c.count.tma_read += box->bytes();
  c.count.tma_transactions++;
  for (unsigned rank = 0; rank < 16; rank++) {
    if (r.multicast && !(mask >> rank & 1)) continue;
    const SharedPlace at = r.multicast ? shared_in(c, to, rank) : to;
    // .cta_group::2: of each destination's pair, the CTA with the parity of the one that the address names.
    const unsigned signalled = r.pair ? (rank & ~1u) | (barrier.cta->rank & 1u) : rank;
    const SharedPlace signal = r.multicast ? shared_in(c, barrier, signalled) : barrier;
    c.cluster.submit(0, [held, ref, box, at, signal] {
      if (Checker* check = held->c.check) {
        tell_global(*check, ref, *box, false, false);
        tell_shared(*check, ref, *box, at, true);
      }
      load_box(*box, at);
      mbarrier_complete(held->c, signal, box->bytes(), ref);
    });
    if (!r.multicast) break;
  }
}

// The type that a reduction works on; the bitwise ones take any integer of their size.
Reducer reducer_of(const Context& c, Reduce what, Element e) {
  const bool bitwise = what == Reduce::op_and || what == Reduce::op_or || what == Reduce::op_xor;
  Ty type = Ty::none;
  switch (e) {
    case Element::u32: type = bitwise ? Ty::b32 : Ty::u32; break;
    case Element::s32: type = bitwise ? Ty::b32 : Ty::s32; break;
    case Element::u64: type = bitwise ? Ty::b64 : Ty::u64; break;
    case Element::s64: type = bitwise ? Ty::b64 : what == Reduce::add ? Ty::none : Ty::s64; break;
    case Element::f16: type = Ty::f16; break;
    case Element::bf16: type = Ty::bf16; break;
    case Element::f32: case Element::f32_ftz: type = Ty::f32; break;
    default: break;
  }
  const Reducer found = type == Ty::none ? nullptr : reducer(what, type);
  if (!found) c.fail(std::string("the reduction has no form for elements of ") + element_name(e));
  return found;
}

void store(Context& c, const Tensor& r, const Lane& lane, Mask lanes) {
  const TensorMap map = map_of(c, lane.map);
  if (map.element == Element::b4x16_p64 || map.element == Element::b6x16_p32)
    c.fail(std::string("storing elements of ") + element_name(map.element) + " is not supported");
  const auto box = std::make_shared<const Box>(
      box_at(c, map, lane.x, static_cast<unsigned>(r.coordinates.size()), r.scattered, true));
  const SharedPlace from = place_of(c, r, *box, lane.shared, true);
  const Reducer reduce = r.reduces ? reducer_of(c, r.reduce, map.element) : nullptr;
  const AsyncRef ref = issue(c, lane.map, lane.number);
  Checker* check = c.check;
  uint64_t written = 0;
  for (const BoxRow& row : box->rows) written += row.last - row.first;
  c.count.tma_written += written;
  c.count.tma_transactions++;
  submit_store(
      c, lanes, ref,
      [check, ref, box, from](Buffer& bytes) {
        if (check) tell_shared(*check, ref, *box, from, false);
        gather_box(*box, from, bytes);
      },
      [check, ref, box, reduce](const Buffer& bytes) {
        if (check) tell_global(*check, ref, *box, true, reduce != nullptr);
        if (reduce) reduce_box(*box, bytes, reduce);
        else store_box(*box, bytes);
      });
}

// The operands of every executing lane.
void read_lanes(Context& c, const Tensor& r, bool barrier, Lane* lanes) {
  uint64_t map[kLanes], shared[kLanes] = {}, bar[kLanes] = {};
  r.map.lanes(c, map);
  if (r.shared.bytes) r.shared.lanes(c, shared);
  if (barrier) r.barrier.lanes(c, bar);
  for (unsigned l = 0; l < kLanes; l++) {
    lanes[l] = {map[l], shared[l], bar[l], {}, l};
    for (size_t i = 0; i < r.coordinates.size(); i++)
      lanes[l].x[i] = static_cast<int32_t>(c.warp.v32(r.coordinates[i]).x[l]);
  }
}

Step run_load(Context& c, const Op& op) {
  const auto& r = record<Tensor>(op);
  Lane lanes[kLanes];
  read_lanes(c, r, true, lanes);
  for (unsigned l = 0; l < kLanes; l++)
    if (c.mask >> l & 1) load(c, r, lanes[l], r.multicast ? c.warp.v32(r.mask).x[l] & 0xffff : 0);
  return Step::next;
}

Step run_store(Context& c, const Op& op) {
  const auto& r = record<Tensor>(op);
  Lane lanes[kLanes];
  read_lanes(c, r, false, lanes);
  Mask done = 0;
  for (unsigned l = 0; l < kLanes; l++) {
    if (!(c.mask >> l & 1) || done >> l & 1) continue;
    Mask same = 1u << l;
    // Compilers let all lanes of a warp execute one store; a reduction counts every lane.
    for (unsigned k = l + 1; k < kLanes && !r.reduces; k++)
      if (c.mask >> k & 1 && lanes[k].same_store(lanes[l], r.coordinates.size())) same |= 1u << k;
    done |= same;
    store(c, r, lanes[l], same);
  }
  return Step::next;
}

// A hint; what it names has to make sense all the same.
Step run_prefetch(Context& c, const Op& op) {
  const auto& r = record<Tensor>(op);
  Lane lanes[kLanes];
  read_lanes(c, r, false, lanes);
  for (unsigned l = 0; l < kLanes; l++)
    if (c.mask >> l & 1)
      box_at(c, map_of(c, lanes[l].map), lanes[l].x, static_cast<unsigned>(r.coordinates.size()), r.scattered, false);
  return Step::next;
}

// [tensorMap, {coordinates}]
void decode_map(Decoder& d, Tensor& r, const Operand& o) {
  if (o.kind != Operand::memory || o.parts.size() != 2) d.fail("[tensorMap, {coordinates}] is expected");
  r.map = address_of(d, o, In::generic);
  if (r.map.bytes != 8) d.fail("the address of the tensor map has 64 bits");
  const Operand& x = o.parts[1];
  if (x.kind == Operand::vec)
    for (const Operand& part : x.parts) r.coordinates.push_back(d.source(part, 4));
  else
    r.coordinates.push_back(d.source(x, 4));
  const size_t n = r.scattered ? 5 : r.dims;
  if (r.coordinates.size() != n)
    d.fail(std::to_string(r.coordinates.size()) + " coordinates, expected " + std::to_string(n));
}

void decode_mode(Decoder& d, Modifiers& m, Tensor& r, bool load) {
  r.dims = static_cast<unsigned>(m.take_one({"1d", "2d", "3d", "4d", "5d"})[0] - '0');
  for (const char* im2col : {"im2col", "im2col::w", "im2col::w::128", "im2col_no_offs"})
    if (m.take(im2col)) d.fail(std::string("the access mode .") + im2col + " is not supported, only the tile modes");
  r.scattered = !r.reduces && m.take(load ? "tile::gather4" : "tile::scatter4");
  if (r.scattered && r.dims != 2) d.fail("gather4 and scatter4 are for 2d tensors");
  if (!r.scattered) m.take("tile");
}

void decode_load(Decoder& d, Op& op, Modifiers& m, Tensor& r) {
  r.own = m.take("shared::cta");
  if (!r.own && !m.take("shared::cluster")) d.fail("the destination space is missing");
  if (!m.take("global")) d.fail("the source has to be .global");
  m.take("mbarrier::complete_tx::bytes");
  r.multicast = !r.own && m.take("multicast::cluster");
  r.pair = m.take_optional({"cta_group::1", "cta_group::2"}, "") == "cta_group::2";
  const bool policy = m.take("L2::cache_hint");
  const size_t n = 3u + r.multicast + policy;
  d.count(n, n);
  r.shared = address_of(d, d.operand(0), In::shared);
  decode_map(d, r, d.operand(1));
  r.barrier = address_of(d, d.operand(2), In::shared);
  if (r.multicast) r.mask = source32(d, d.operand(3));
  if (policy) d.source(d.operand(n - 1), 8);
  op.run = run_load;
}

void decode_store(Decoder& d, Op& op, Modifiers& m, Tensor& r) {
  if (!m.take("global") || !m.take("shared::cta")) d.fail("a tensor store goes from .shared::cta to .global");
  if (!m.take("bulk_group")) d.fail("a tensor store completes by .bulk_group");
  const bool policy = m.take("L2::cache_hint");
  d.count(policy ? 3 : 2, policy ? 3 : 2);
  decode_map(d, r, d.operand(0));
  r.shared = address_of(d, d.operand(1), In::shared);
  if (policy) d.source(d.operand(2), 8);
  op.run = run_store;
}

}  // namespace

void decode_tma(Decoder& d, Op& op) {
  Modifiers m(d.from);
  auto extra = std::make_shared<Tensor>();
  Tensor& r = *extra;
  op.kind = Class::copy;
  const auto& parts = d.from.parts;
  r.reduces = m.take("reduce");
  m.take("async");
  m.take("bulk");
  m.take("tensor");
  const bool prefetch = m.take("prefetch");
  // The first of the two spaces is the destination.
  const auto global = std::find(parts.begin(), parts.end(), "global");
  const auto shared = std::find_if(parts.begin(), parts.end(),
                                   [](const std::string& s) { return s.rfind("shared::", 0) == 0; });
  const bool load = prefetch || shared < global;
  if (load && r.reduces) d.fail("a tensor reduction goes from .shared::cta to .global");
  decode_mode(d, m, r, load);
  if (r.reduces) r.reduce = reduce_named(m.take_one(kReduceNames));
  if (prefetch) {
    if (!m.take("L2") || !m.take("global")) d.fail("a tensor prefetch is .L2.global");
    const bool policy = m.take("L2::cache_hint");
    d.count(policy ? 2 : 1, policy ? 2 : 1);
    decode_map(d, r, d.operand(0));
    if (policy) d.source(d.operand(1), 8);
    op.run = run_prefetch;
  } else if (load) {
    decode_load(d, op, m, r);
  } else {
    decode_store(d, op, m, r);
  }
  m.done();
  op.extra = std::move(extra);
}

}  // namespace ptx
