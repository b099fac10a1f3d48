// tcgen05.alloc, dealloc and relinquish_alloc_permit (PTX ISA 9.7.16.7).
//
// Columns are given out first fit. With .cta_group::2 both CTAs of the pair get the same columns: the n-th alloc (or
// dealloc) of one CTA goes together with the n-th of the other, and each blocks until the other has come.
#include <algorithm>

#include "tensor/tcgen05.h"

namespace ptx {

// Of a CTA, for the collective forms: how many it has begun, and what has been granted.
struct TensorPair {
  uint64_t allocs = 0, deallocs = 0;
  std::map<uint64_t, unsigned> granted;   // n-th alloc -> first column; kept by the even CTA
};

namespace {

TensorPair& pair_state(Cta& cta) {
  if (!cta.tensor_pair) cta.tensor_pair = std::make_shared<TensorPair>();
  return *cta.tensor_pair;
}

struct Alloc {
  bool pair;
  Address to;          // alloc: where the address is written; dealloc: the tensor memory address
  Slot columns;
};

unsigned columns_of(Context& c, const Alloc& r, const char* what) {
  const V32& v = c.warp.v32(r.columns);
  const uint32_t n = v.x[c.first()];
  if (n < 32 || n > kTmemColumns || n & (n - 1))
    c.fail(std::string(what) + ": nCols is " + std::to_string(n) + ", accepted are powers of two from 32 to 512");
  for (unsigned l = 0; l < kLanes; l++)
    if (c.mask >> l & 1 && v.x[l] != n) c.fail(std::string(what) + ": nCols differs between the lanes of the warp");
  return n;
}

// The first free run of `n` columns in all CTAs, -1 when there is none.
int find_columns(const std::vector<Cta*>& ctas, unsigned n) {
  unsigned run = 0;
  for (unsigned i = 0; i < kTmemColumns; i++) {
    const bool free = std::all_of(ctas.begin(), ctas.end(), [&](const Cta* cta) { return cta->tmem_owner[i] < 0; });
    run = free ? run + 1 : 0;
    if (run == n) return static_cast<int>(i + 1 - n);
  }
  return -1;
}

void take_columns(Context& c, Cta& cta, unsigned first, unsigned n) {
  for (unsigned i = first; i < first + n; i++) cta.tmem_owner[i] = static_cast<int>(first);
  // What was there before must not look like data: all ones is a NaN in every format.
  if (c.launch.options.poison)
    for (unsigned lane = 0; lane < kTmemLanes; lane++) std::fill_n(tensor_row(cta, lane) + first, n, 0xffffffffu);
  if (c.check) c.check->tensor_allocated(c, cta, first, n);
}

Step run_alloc(Context& c, const Op& op) {
  const Alloc& r = record<Alloc>(op);
  const unsigned n = columns_of(c, r, "tcgen05.alloc");
  if (c.cta.tmem_relinquished) c.fail("tcgen05.alloc after tcgen05.relinquish_alloc_permit in the same CTA");
  const std::vector<Cta*> ctas = tensor_group(c, r.pair);
  for (Cta* cta : ctas) {
    if (!cta->tmem.empty()) continue;
    cta->tmem.assign(static_cast<size_t>(kTmemLanes) * kTmemColumns, 0);
    cta->tmem_owner.assign(kTmemColumns, -1);
    cta->tmem_freed.resize(kTmemColumns);
  }
  int first;
  if (r.pair) {
    TensorPair& mine = pair_state(c.cta);
    TensorPair& peer = pair_state(*ctas[c.cta.rank & 1 ? 0 : 1]);
    if (c.fragment.state == 0) c.fragment.state = ++mine.allocs;
    c.fragment.why = {"tcgen05.alloc.cta_group::2 number %llu: waiting for the other CTA of the pair, which began %llu",
                      {c.fragment.state, peer.allocs}};
    if (peer.allocs < c.fragment.state) return Step::blocked;
    std::map<uint64_t, unsigned>& granted = pair_state(*ctas[0]).granted;
    const auto found = granted.find(c.fragment.state);
    first = found == granted.end() ? find_columns(ctas, n) : static_cast<int>(found->second);
    if (found == granted.end() && first >= 0) {
      granted[c.fragment.state] = static_cast<unsigned>(first);
      for (Cta* cta : ctas) take_columns(c, *cta, static_cast<unsigned>(first), n);
    }
  } else {
    first = find_columns(ctas, n);
    if (first >= 0) take_columns(c, c.cta, static_cast<unsigned>(first), n);
  }
  c.fragment.why = {"tcgen05.alloc of %llu columns: no such run of columns is free", {n}};
  if (first < 0) return Step::blocked;
  c.fragment.state = 0;
  uint64_t at[kLanes];
  r.to.lanes(c, at);
  const SharedPlace place = shared_place(c, at[c.first()], r.to.generic, 4, 4, true, "tcgen05.alloc destination");
  if (c.check) c.check->range(c, Space::shared, place.cta, place.offset, 4, true);
  const uint32_t address = static_cast<uint32_t>(first);
  std::memcpy(place.bytes(), &address, 4);
  c.count.shared_written += 4;
  return Step::next;
}

Step run_dealloc(Context& c, const Op& op) {
  const Alloc& r = record<Alloc>(op);
  const unsigned n = columns_of(c, r, "tcgen05.dealloc");
  const TensorPlace place = tensor_place(uniform_address(c, r.to, "tcgen05.dealloc"));
  if (r.pair) {
    TensorPair& mine = pair_state(c.cta);
    TensorPair& peer = pair_state(*tensor_group(c, true)[c.cta.rank & 1 ? 0 : 1]);
    if (c.fragment.state == 0) c.fragment.state = ++mine.deallocs;
    c.fragment.why = {"tcgen05.dealloc.cta_group::2 number %llu: waiting for the other CTA of the pair, it began %llu",
                      {c.fragment.state, peer.deallocs}};
    if (peer.deallocs < c.fragment.state) return Step::blocked;
    c.fragment.state = 0;
  }
  std::vector<int>& owner = c.cta.tmem_owner;
  const int first = static_cast<int>(place.column);
  const unsigned held = static_cast<unsigned>(std::count(owner.begin(), owner.end(), first));
  if (place.lane != 0 || held != n)
    c.fail("tcgen05.dealloc of " + std::to_string(n) + " columns at lane " + std::to_string(place.lane) + ", column " +
           std::to_string(place.column) + ": " +
           (held ? "the allocation there has " + std::to_string(held) + " columns"
                 : "no allocation starts there" + tensor_freed(c, c.cta, place.column)));
  std::replace(owner.begin(), owner.end(), first, -1);
  std::fill_n(c.cta.tmem_freed.begin() + first, n, TensorFreed{c.op, c.warp.id, place.column, n});
  if (c.check) c.check->tensor_freed(c, c.cta, place.column, n);
  return Step::next;
}

Step run_relinquish(Context& c, const Op&) {
  c.cta.tmem_relinquished = true;
  return Step::next;
}

}  // namespace

void decode_tensor_memory(Decoder& d, Op& op, Modifiers& m) {
  Alloc r{};
  op.collective = true;
  if (m.take("relinquish_alloc_permit")) {
    op.run = run_relinquish;
    d.count(0, 0);
  } else {
    const bool alloc = m.take("alloc");
    if (!alloc && !m.take("dealloc")) d.fail("unknown tcgen05 operation");
    m.take_one({"b32"});
    d.count(2, 2);
    if (alloc) {
      const bool shared = m.take("shared::cta");
      r.to = address_of(d, d.operand(0), shared ? In::shared : In::generic);
    } else {
      r.to = {d.source(d.operand(0), 4), 4, 0, false};
    }
    r.columns = d.source(d.operand(1), 4);
    op.run = alloc ? run_alloc : run_dealloc;
  }
  r.pair = take_pair(d, m);
  m.take_one({"sync"});
  m.take_one({"aligned"});
  op.extra = std::make_shared<Alloc>(r);
}

}  // namespace ptx
