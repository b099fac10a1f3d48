// tcgen05: which file decodes what; the pair of CTAs, bounds of tensor memory, commit and fence.
#include "tensor/tcgen05.h"

namespace ptx {

std::vector<Cta*> tensor_group(const Context& c, bool pair) {
  if (!pair) return {&c.cta};
  if ((c.cta.rank | 1) >= c.cluster.ctas.size())
    c.fail(".cta_group::2 needs a pair of CTAs, the cluster has " + std::to_string(c.cluster.ctas.size()));
  return {c.cluster.ctas[c.cta.rank & ~1u].get(), c.cluster.ctas[c.cta.rank | 1].get()};
}

uint64_t tensor_order(const Context& c, bool pair) {
  constexpr uint64_t kPipes = 1ull << 40;   // apart from orders that other units choose
  return kPipes + (pair ? 2 * (c.cta.rank & ~1u) + 1 : 2 * c.cta.rank);
}

TensorPipe tensor_pipe(const Context& c, bool pair) { return {pair ? tensor_group(c, true)[0] : &c.cta}; }

std::string tensor_freed(const Context& c, const Cta& cta, unsigned column) {
  const TensorFreed by = column < cta.tmem_freed.size() && cta.tmem_owner[column] < 0 ? cta.tmem_freed[column]
                                                                                      : TensorFreed{};
  if (by.op == nullptr) return "";
  return ": warp " + std::to_string(by.warp) + " has given columns " + std::to_string(by.first) + " .. " +
         std::to_string(by.first + by.columns - 1) + " back, " + c.quote(*by.op);
}

void check_tensor(const Context& c, const Cta& cta, unsigned lane, unsigned lanes, unsigned column, unsigned columns,
                  const char* what) {
  const auto block = [&] {
    return std::string(what) + ": lanes " + std::to_string(lane) + " .. " + std::to_string(lane + lanes - 1) +
           ", columns " + std::to_string(column) + " .. " + std::to_string(column + columns - 1) + " of CTA " +
           std::to_string(cta.rank);
  };
  if (lane + lanes > kTmemLanes || column + columns > kTmemColumns)
    c.fail(block() + " leave tensor memory (128 lanes, 512 columns)");
  for (unsigned i = column; i < column + columns; i++)
    if (cta.tmem_owner.empty() || cta.tmem_owner[i] < 0)
      c.fail(block() + ": column " + std::to_string(i) + " is not allocated" + tensor_freed(c, cta, i));
}

std::string tensor_leak(const Cta& cta) {
  std::string columns;
  for (unsigned i = 0; i < cta.tmem_owner.size(); i++)
    if (cta.tmem_owner[i] == static_cast<int>(i)) columns += (columns.empty() ? "" : ", ") + std::to_string(i);
  return columns.empty() ? "" : "tensor memory was not deallocated: allocations at column " + columns;
}

bool take_pair(Decoder& d, Modifiers& m) {
  const std::string group = m.take_prefix("cta_group::");
  if (group != "1" && group != "2") d.fail(".cta_group::1 or .cta_group::2 is missing");
  return group == "2";
}

Address tensor_operand(Decoder& d, const Operand& o) {
  Address a;
  Op scratch;
  a.slot = d.address(o, scratch, a.bytes);
  a.offset = scratch.offset;
  return a;
}

uint32_t uniform_address(Context& c, const Address& address, const char* what) {
  uint64_t lanes[kLanes];
  address.lanes(c, lanes);
  const uint32_t first = static_cast<uint32_t>(lanes[c.first()]);
  for (unsigned l = 0; l < kLanes; l++)
    if (c.mask >> l & 1 && static_cast<uint32_t>(lanes[l]) != first)
      c.fail(std::string(what) + ": lane " + std::to_string(l) + " names " + hex(lanes[l]) + ", lane " +
             std::to_string(c.first()) + " names " + hex(first) + "; the warp has to agree");
  return first;
}

namespace {

struct Commit {
  bool pair, multicast;
  Address mbarrier;
  Slot ctas = 0;
};

// 9.7.16.12 "tcgen05.commit": an arrival with count 1 once all earlier operations of the pipe have completed.
Step run_commit(Context& c, const Op& op) {
  const Commit& r = record<Commit>(op);
  uint64_t at[kLanes];
  r.mbarrier.lanes(c, at);
  for (unsigned l = 0; l < kLanes; l++) {
    if (!(c.mask >> l & 1)) continue;
    const uint32_t ctas = r.multicast ? c.warp.v32(r.ctas).x[l] & 0xffff : 0;
    const AsyncRef ref = c.check ? c.check->commit(c, tensor_pipe(c, r.pair), l) : nullptr;
    const uint64_t address = at[l];
    const bool generic = r.mbarrier.generic, multicast = r.multicast;
    auto issued = std::make_shared<const Issued>(c);
    c.cluster.submit(tensor_order(c, r.pair), [=] {
      const SharedPlace place = mbarrier_place(issued->c, address, generic);
      if (!multicast) return mbarrier_arrive_async(issued->c, place, {ref});
      for (unsigned rank = 0; rank < 16; rank++)
        if (ctas >> rank & 1) mbarrier_arrive_async(issued->c, shared_in(issued->c, place, rank), {ref});
    });
  }
  return Step::next;
}

void decode_commit(Decoder& d, Op& op, Modifiers& m) {
  Commit r;
  r.pair = take_pair(d, m);
  m.take_one({"mbarrier::arrive::one"});
  m.take_one({"b64"});
  const bool shared = m.take("shared::cluster");
  r.multicast = m.take("multicast::cluster");
  d.count(r.multicast ? 2 : 1, r.multicast ? 2 : 1);
  r.mbarrier = address_of(d, d.operand(0), shared ? In::shared : In::generic);
  if (r.multicast) r.ctas = source32(d, d.operand(1));
  op.kind = Class::tensor;
  op.run = run_commit;
  op.extra = std::make_shared<Commit>(r);
}

template <bool Before>
Step run_fence(Context& c, const Op&) {
  if (c.check) c.check->tensor_fence(c, Before);
  return Step::next;
}

}  // namespace

void decode_tcgen05(Decoder& d, Op& op) {
  Modifiers m(d.from);
  op.kind = Class::tensor;
  if (m.take("mma")) decode_tensor_mma(d, op, m);
  else if (m.take("commit")) decode_commit(d, op, m);
  else if (m.take("fence::before_thread_sync")) op.run = run_fence<true>, op.kind = Class::sync, d.count(0, 0);
  else if (m.take("fence::after_thread_sync")) op.run = run_fence<false>, op.kind = Class::sync, d.count(0, 0);
  else if (d.from.parts[1] == "cp" || d.from.parts[1] == "shift") decode_tensor_copy(d, op, m);
  else if (d.from.parts[1].find("alloc") != std::string::npos) decode_tensor_memory(d, op, m);
  else decode_tensor_load(d, op, m);
  m.done();
}

}  // namespace ptx
