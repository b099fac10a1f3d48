// tcgen05.mma: decoding and issue. Sparse A (.sp), .ashift, K = 96 and zero-column masks are refused.
#include "tensor/tcgen05_mma.h"

namespace ptx {
namespace {

unsigned bits(uint32_t word, unsigned at, unsigned n) { return word >> at & ((1u << n) - 1); }

bool scaled(MmaKind kind) { return kind >= MmaKind::mxf8f6f4; }
bool fp4_only(MmaKind kind) { return kind == MmaKind::mxf4 || kind == MmaKind::mxf4nvf4; }

struct Complaint {
  const Context& c;
  const Mma& mma;
  uint32_t word;
  [[noreturn]] void operator()(const std::string& what) const {
    c.fail("tcgen05.mma.kind::" + mma.name + ": instruction descriptor " + hex(word) + ": " + what);
  }
};

// Tables 42 to 44: the types of A and B.
Element element(const Complaint& complain, MmaKind kind, unsigned code, const char* which) {
  switch (kind) {
    case MmaKind::f16:
      if (code == 0) return Element::f16;
      if (code == 1) return Element::bf16;
      break;
    case MmaKind::tf32:
      if (code == 2) return Element::tf32;
      break;
    case MmaKind::i8:
      if (code == 0) return Element::u8;
      if (code == 1) return Element::s8;
      break;
    case MmaKind::mxf4:
    case MmaKind::mxf4nvf4:
      if (code == 1) return Element::e2m1;
      break;
    default:
      if (code == 0) return Element::e4m3;
      if (code == 1) return Element::e5m2;
      if (code == 3) return Element::e2m3;
      if (code == 4) return Element::e3m2;
      if (code == 5) return Element::e2m1;
  }
  complain(std::string(which) + "type " + std::to_string(code) + " does not belong to this kind");
}

// Table 39: the shapes of a kind.
void check_shape(const Complaint& complain, const Mma& r, const MmaJob& job) {
  const unsigned m = job.m, n = job.n;
  bool m_fits, n_fits;
  if (r.stationary) {
    m_fits = m == 32 || m == 64 || m == 128;
    n_fits = n == 64 || n == 128 || n == 256;
  } else {
    m_fits = r.pair ? m == 128 || m == 256 : m == 128 || (m == 64 && !scaled(r.kind));
    const unsigned step = (r.pair ? 16 : 8) * (r.kind == MmaKind::i8 && (r.pair || n > 32) ? 2 : 1);
    n_fits = n >= step && n <= 256 && n % step == 0;
  }
  if (!m_fits || !n_fits)
    complain("shape M = " + std::to_string(m) + ", N = " + std::to_string(n) + " does not exist for " +
             (r.stationary ? ".ws" : r.pair ? ".cta_group::2" : ".cta_group::1"));
}

void plain_fields(const Complaint& complain, const Mma& r, uint32_t word, MmaJob& job) {
  const unsigned type = bits(word, 4, 2);
  const bool fits = r.kind == MmaKind::i8 ? type == 2 : type == 1 || (type == 0 && r.kind != MmaKind::tf32);
  if (!fits) complain("dtype " + std::to_string(type) + " does not belong to this kind");
  job.d_type = type == 0 ? MmaJob::D::f16 : type == 1 ? MmaJob::D::f32 : MmaJob::D::s32;
  job.saturate = bits(word, 3, 1);
  if (job.saturate && r.kind != MmaKind::i8) complain("bit 3, saturation, is for kind::i8");
  job.m = bits(word, 24, 5) << 4;
}

void scaled_fields(const Complaint& complain, const Mma& r, uint32_t word, MmaJob& job) {
  job.m = bits(word, 27, 2) << 7;
  job.ue8m0 = bits(word, 23, 1);
  job.scale_a_id = bits(word, 29, 2);
  job.scale_b_id = bits(word, 4, 2);
  if (!job.ue8m0 && (r.kind != MmaKind::mxf4nvf4 || r.block != 16))
    complain("bit 23: UE4M3 scale factors are for kind::mxf4nvf4 with blocks of 16");
  if (fp4_only(r.kind) && bits(word, 31, 1)) complain("bit 31: K = 96 (sm_103a) is not supported");
  const unsigned step = job.k / r.block;   // scale factors of a row lie side by side, aligned to their number
  if (job.scale_a_id % step || job.scale_b_id % step)
    complain("scale factor ids " + std::to_string(job.scale_a_id) + " and " + std::to_string(job.scale_b_id) +
             " have to be multiples of " + std::to_string(step));
}

MmaJob take_apart(const Context& c, const Mma& r, uint32_t word) {
  const Complaint complain{c, r, word};
  MmaJob job;
  job.mma = &r;
  job.k = r.kind == MmaKind::f16 ? 16 : r.kind == MmaKind::tf32 ? 8 : fp4_only(r.kind) ? 64 : 32;
  if (bits(word, 2, 1)) complain("bit 2: sparse A is not supported");
  job.n = bits(word, 17, 6) << 3;
  job.negate_a = bits(word, 13, 1);
  job.negate_b = bits(word, 14, 1);
  job.a_mn_major = bits(word, 15, 1);
  job.b_mn_major = bits(word, 16, 1);
  job.a_type = element(complain, r.kind, bits(word, 7, 3), "a");
  job.b_type = element(complain, r.kind, bits(word, 10, fp4_only(r.kind) ? 2 : 3), "b");
  if (scaled(r.kind)) scaled_fields(complain, r, word, job);
  else plain_fields(complain, r, word, job);
  check_shape(complain, r, job);
  if (r.kind == MmaKind::i8 && (job.negate_a || job.negate_b)) complain("kind::i8 does not negate");
  const auto narrow = [](Element e) { return e == Element::e2m1 || e == Element::e2m3 || e == Element::e3m2; };
  if ((job.a_mn_major && narrow(job.a_type)) || (job.b_mn_major && narrow(job.b_type)))
    complain("4- and 6-bit types cannot be transposed");
  if (job.d_type == MmaJob::D::f16 && (job.a_type == Element::bf16 || job.b_type == Element::bf16))
    complain("dtype F16 is not for BF16 operands");
  return job;
}

Step run_mma(Context& c, const Op& op) {
  const Mma& r = record<Mma>(op);
  const std::vector<Cta*> ctas = tensor_group(c, r.pair);
  auto issued = std::make_shared<const Issued>(c);
  const auto lane_value = [&](const Address& a, unsigned l) {
    uint64_t at[kLanes];
    a.lanes(c, at);
    return static_cast<uint32_t>(at[l]);
  };
  for (unsigned l = 0; l < kLanes; l++) {
    if (!(c.mask >> l & 1)) continue;
    MmaJob job = take_apart(c, r, c.warp.v32(r.instruction).x[l]);
    job.d = tensor_place(lane_value(r.d, l));
    if (r.tensor_a) job.a = tensor_place(lane_value(r.a, l));
    else job.a_descriptor = c.warp.v64(r.a_descriptor).x[l];
    job.b_descriptor = c.warp.v64(r.b_descriptor).x[l];
    job.accumulate = (c.warp.pred(r.enable) >> l & 1) != static_cast<unsigned>(r.enable_negated);
    for (size_t i = 0; i < r.disable.size(); i++) job.disable[i] = c.warp.v32(r.disable[i]).x[l];
    if (r.block) {   // bits 30-31 repeat the scale factor ids of the instruction descriptor
      job.scale_a = tensor_place(lane_value(r.scale_a, l) & 0x3fffffffu);
      job.scale_b = tensor_place(lane_value(r.scale_b, l) & 0x3fffffffu);
    }
    if (r.zero_columns && (c.warp.v64(r.zero_columns).x[l] & 0x3f00008000000000ull))
      c.fail("tcgen05.mma.ws: zero-column masks and column shifts are not supported");
    c.count.flops[r.name] += 2ull * job.m * job.n * job.k;
    const uint64_t operand = 32;   // bytes of a row of A or of a column of B, whatever the kind
    c.count.tensor_shared_read += operand * (job.n + (r.tensor_a ? 0 : job.m));
    c.count.tmem_read += (r.tensor_a ? operand * job.m : 0) + (job.accumulate ? 4ull * job.m * job.n : 0);
    c.count.tmem_written += 4ull * job.m * job.n;
    const AsyncRef ref = c.check ? c.check->issue_tensor(c, tensor_pipe(c, r.pair), l) : nullptr;
    c.cluster.submit(tensor_order(c, r.pair), [=] { run_product(issued->c, ctas, job, ref); });
  }
  return Step::next;
}

unsigned decode_block(Decoder& d, Modifiers& m, MmaKind kind) {
  if (!m.take("block_scale")) d.fail(".block_scale is missing");
  const std::string size =
      m.take_optional({"scale_vec::1X", "scale_vec::2X", "scale_vec::4X", "block16", "block32"}, "");
  const bool one = kind == MmaKind::mxf8f6f4;
  if (size.compare(0, 5, "scale") == 0) d.not_for_a_family("." + size);  // block16 and block32 name the same
  if (size.empty() && kind == MmaKind::mxf4nvf4) d.fail(".kind::mxf4nvf4 needs a scale vector size");
  if (size.empty() || size == "block32" || size == (one ? "scale_vec::1X" : "scale_vec::2X")) return 32;
  if (kind == MmaKind::mxf4nvf4 && (size == "block16" || size == "scale_vec::4X")) return 16;
  d.fail("." + size + " does not go with this kind");
}

MmaKind take_kind(Decoder& d, Modifiers& m, std::string& name) {
  constexpr const char* names[] = {"f16", "tf32", "f8f6f4", "i8", "mxf8f6f4", "mxf4", "mxf4nvf4"};
  name = m.take_prefix("kind::");
  for (unsigned i = 0; i < 7; i++)
    if (name == names[i]) return static_cast<MmaKind>(i);
  d.fail("unknown .kind::" + name);
}

// 9.7.16.10: whether the tensor core keeps an operand is not visible to a correct program.
void take_collector(Decoder& d, Modifiers& m, bool stationary) {
  const std::string usage = m.take_prefix("collector::");
  if (usage.empty()) return;
  const size_t colon = usage.find("::");
  const std::string buffer = usage.substr(0, colon), what = colon == std::string::npos ? "" : usage.substr(colon + 2);
  const bool buffer_fits = stationary ? buffer.size() == 2 && buffer[0] == 'b' && buffer[1] >= '0' && buffer[1] <= '3'
                                      : buffer == "a";
  if (!buffer_fits || (what != "fill" && what != "use" && what != "lastuse" && what != "discard"))
    d.fail("unknown .collector::" + usage);
}

}  // namespace

// [d], a, b, idesc, then: {disable}, enable{, scale-d} | [scale-a], [scale-b], enable | .ws: enable{, zero-columns}.
void decode_tensor_mma(Decoder& d, Op& op, Modifiers& m) {
  Mma r;
  if (m.take("sp")) d.fail("tcgen05.mma.sp is not supported");
  r.stationary = m.take("ws");
  if (m.take("sp")) d.fail("tcgen05.mma.ws.sp is not supported");
  if (m.take("ashift")) d.fail(".ashift is not supported");
  r.pair = take_pair(d, m);
  r.kind = take_kind(d, m, r.name);
  if (r.kind == MmaKind::i8) d.not_for_a_family(".kind::i8");
  if (scaled(r.kind)) r.block = decode_block(d, m, r.kind);
  take_collector(d, m, r.stationary);
  if (r.stationary && (r.pair || r.block)) d.fail(".ws is for .cta_group::1 without block scaling");
  r.d = tensor_operand(d, d.operand(0));
  r.tensor_a = d.operand(1).kind == Operand::memory;
  if (r.tensor_a) r.a = tensor_operand(d, d.operand(1));
  else r.a_descriptor = d.source(d.operand(1), 8);
  r.b_descriptor = d.source(d.operand(2), 8);
  r.instruction = d.source(d.operand(3), 4);
  size_t next = 4;
  if (r.block) {
    r.scale_a = tensor_operand(d, d.operand(next++));
    r.scale_b = tensor_operand(d, d.operand(next++));
  } else if (!r.stationary && d.operand(next).kind == Operand::vec) {
    r.disable = d.sources(d.operand(next++), 4);
    if (r.disable.size() != (r.pair ? 8 : 4)) d.fail("disable-output-lane has 4 words, 8 with .cta_group::2");
  }
  r.enable = d.predicate(d.operand(next++), r.enable_negated);
  if (next < d.from.operands.size() && r.stationary) {
    r.zero_columns = d.source(d.operand(next++), 8);
  } else if (next < d.from.operands.size() && (r.kind == MmaKind::f16 || r.kind == MmaKind::tf32)) {
    const Operand& scale = d.operand(next++);
    if (scale.kind != Operand::imm || scale.bits > 15) d.fail("scale-input-d has to be an immediate from 0 to 15");
    r.scale_d = static_cast<unsigned>(scale.bits);
  }
  d.count(next, next);
  op.run = run_mma;
  op.extra = std::make_shared<Mma>(std::move(r));
}

}  // namespace ptx
