// clusterlaunchcontrol: a running cluster takes over the work of one that has not started. PTX ISA 9.7.13.17 and .18.
#include "async/async.h"

namespace ptx {

namespace {

// The 16 bytes of a response are opaque: ours are a mark and the first CTA's coordinates.
struct Response {
  uint32_t cancelled = 0, ctaid[3] = {};
};
static_assert(sizeof(Response) == 16, "the response is 16 bytes");

struct Request {
  Address to, barrier;
  bool multicast = false;
};

// What a query reads: 0..2 a coordinate, 3 all of them.
struct Query {
  Slot response = 0;
  std::vector<Slot> to;
  unsigned first = 0;
};

Response take(const Context& c) {
  Response r;
  uint32_t index;
  if (!c.launch.take_waiting(index)) {
    c.cluster.cancelled_all = true;
    return r;
  }
  r.cancelled = 1;
  const uint32_t* grid = c.launch.grid;
  const uint32_t* size = c.launch.cluster;
  const uint32_t along[2] = {grid[0] / size[0], grid[1] / size[1]};
  r.ctaid[0] = index % along[0] * size[0];
  r.ctaid[1] = index / along[0] % along[1] * size[1];
  r.ctaid[2] = index / along[0] / along[1] * size[2];
  return r;
}

void answer(const Context& c, const Response& r, SharedPlace to, SharedPlace barrier, const AsyncRef& ref) {
  if (c.check) c.check->access(ref, Space::shared, to.cta, to.offset, sizeof r, true);
  std::memcpy(to.bytes(), &r, sizeof r);
  mbarrier_complete(c, barrier, sizeof r, ref);
}

Step run_try_cancel(Context& c, const Op& op) {
  const auto& r = record<Request>(op);
  uint64_t to[kLanes], barrier[kLanes];
  r.to.lanes(c, to);
  r.barrier.lanes(c, barrier);
  for (unsigned l = 0; l < kLanes; l++) {
    if (!(c.mask >> l & 1)) continue;
    const SharedPlace at = shared_place(c, to[l], r.to.generic, sizeof(Response), 16, true, "the response");
    const SharedPlace signal = shared_place(c, barrier[l], r.barrier.generic, 8, 8, true, "the mbarrier");
    const AsyncRef ref = c.check ? c.check->issue(c, l) : nullptr;
    const auto held = std::make_shared<const Issued>(c);
    const bool multicast = r.multicast;
    c.cluster.submit(0, [held, at, signal, ref, multicast] {
      const Context& issuer = held->c;
      const Response response = take(issuer);
      if (!multicast) return answer(issuer, response, at, signal, ref);
      for (unsigned rank = 0; rank < issuer.cluster.ctas.size(); rank++)
        issuer.cluster.submit(0, [held, response, at, signal, ref, rank] {
          answer(held->c, response, shared_in(held->c, at, rank), shared_in(held->c, signal, rank), ref);
        });
    });
  }
  return Step::next;
}

// A 128-bit register: the low halves of all lanes, then the high halves.
Response response_of(Context& c, Slot s, unsigned lane) {
  const uint64_t low = c.warp.v64(s).x[lane], high = c.warp.v64(s + 2).x[lane];
  Response r;
  r.cancelled = static_cast<uint32_t>(low);
  r.ctaid[0] = static_cast<uint32_t>(low >> 32);
  r.ctaid[1] = static_cast<uint32_t>(high);
  r.ctaid[2] = static_cast<uint32_t>(high >> 32);
  return r;
}

Step run_is_canceled(Context& c, const Op& op) {
  const auto& q = record<Query>(op);
  Mask yes = 0;
  for (unsigned l = 0; l < kLanes; l++)
    if (c.mask >> l & 1 && response_of(c, q.response, l).cancelled == 1) yes |= 1u << l;
  Mask& d = c.warp.pred(q.to[0]);
  d = (d & ~c.mask) | yes;
  return Step::next;
}

Step run_first_ctaid(Context& c, const Op& op) {
  const auto& q = record<Query>(op);
  for (unsigned l = 0; l < kLanes; l++) {
    if (!(c.mask >> l & 1)) continue;
    const Response r = response_of(c, q.response, l);
    // After a failed request the coordinates are undefined; kernels read them all the same and do not use them.
    for (size_t i = 0; i < q.to.size(); i++) {
      const size_t axis = q.first + i;
      c.warp.v32(q.to[i]).x[l] = axis < 3 && r.cancelled == 1 ? r.ctaid[axis] : ~0u;
    }
  }
  return Step::next;
}

void decode_query(Decoder& d, Op& op, Modifiers& m) {
  auto extra = std::make_shared<Query>();
  d.count(2, 2);
  if (m.take("is_canceled")) {
    if (!m.take("pred")) d.fail("the type .pred is missing");
    extra->to = {d.destination(d.operand(0), 0)};
    op.run = run_is_canceled;
  } else {
    const std::string which =
        m.take_one({"get_first_ctaid", "get_first_ctaid::x", "get_first_ctaid::y", "get_first_ctaid::z"});
    const bool all = which == "get_first_ctaid";
    if (all != m.take("v4") || !m.take("b32")) d.fail("get_first_ctaid is .v4.b32, one coordinate of it .b32");
    if (!all) extra->first = static_cast<unsigned>(which.back() - 'x');
    extra->to = d.destinations(d.operand(0), 4);
    if (extra->to.size() != (all ? 4u : 1u)) d.fail("the destination has the wrong number of registers");
    op.run = run_first_ctaid;
  }
  if (!m.take("b128")) d.fail("the response is .b128");
  extra->response = d.source(d.operand(1), 16);
  op.extra = std::move(extra);
}

}  // namespace

void decode_cancel(Decoder& d, Op& op) {
  Modifiers m(d.from);
  op.kind = Class::sync;
  if (m.take("query_cancel")) {
    decode_query(d, op, m);
  } else {
    if (!m.take("try_cancel") || !m.take("async") || !m.take("mbarrier::complete_tx::bytes") || !m.take("b128"))
      d.fail("neither try_cancel.async...mbarrier::complete_tx::bytes.b128 nor query_cancel");
    auto extra = std::make_shared<Request>();
    extra->multicast = m.take("multicast::cluster::all");
    const In in = m.take("shared::cta") ? In::shared : In::generic;
    d.count(2, 2);
    extra->to = address_of(d, d.operand(0), in);
    extra->barrier = address_of(d, d.operand(1), in);
    op.extra = std::move(extra);
    op.run = run_try_cancel;
  }
  m.done();
}

}  // namespace ptx
