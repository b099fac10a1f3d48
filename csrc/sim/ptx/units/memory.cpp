// ld st (PTX ISA 9.7.9.8 to 9.7.9.11) and the cache hints, which change nothing here.
#include "machine/access.h"
#include "machine/lanes.h"

namespace ptx {

namespace {

struct Wide {
  uint64_t low, high;
};  // .b128

// Values of type T into registers of `bytes` 4 or 8; a narrower T is extended by its own sign (PTX ISA 9.4.1).
template <class T, unsigned bytes, bool half>
PTX_CLONES void load_into(Context& c, Slot slot, uint8_t* const* pointer, unsigned offset) {
  using Word = typename Lanes<bytes>::Word;
  Word* d = Lanes<bytes>::of(c.warp, slot);
  each_lane(c.mask, d, [=](unsigned l) {
    T value;
    std::memcpy(&value, pointer[l] + offset, sizeof value);
    const Word word = static_cast<Word>(static_cast<std::make_signed_t<Word>>(value));
    return half ? static_cast<Word>(word & 0xffff) : word;
  });
}

template <class T, unsigned bytes, bool half>
Step load(Context& c, const Op& op) {
  const Access& a = access_of(op);
  uint64_t address[kLanes];
  uint8_t* pointer[kLanes] = {};
  addresses(c, op.s[0], a.address_bytes, op.offset, address);
  reach(c, a, address, static_cast<unsigned>(sizeof(T) * op.list.size()), true, false, false, pointer);
  Mask off = ~c.mask;
  if (off != kAll && off != 0) {  // gathers read every lane: give the idle ones a readable place
    uint8_t* any = pointer[c.first()];
    for (; off != 0; off &= off - 1) pointer[__builtin_ctz(off)] = any;
  }
  for (size_t i = 0; i < op.list.size(); i++)
    load_into<T, bytes, half>(c, op.list[i], pointer, static_cast<unsigned>(i * sizeof(T)));
  if (a.order.acquire) std::atomic_thread_fence(std::memory_order_acquire);
  return Step::next;
}

Step load_wide(Context& c, const Op& op) {
  const Access& a = access_of(op);
  uint64_t address[kLanes];
  uint8_t* pointer[kLanes];
  addresses(c, op.s[0], a.address_bytes, op.offset, address);
  reach(c, a, address, static_cast<unsigned>(16 * op.list.size()), true, false, false, pointer);
  for (size_t i = 0; i < op.list.size(); i++)
    for (Mask left = c.mask; left != 0; left &= left - 1) {
      const unsigned l = static_cast<unsigned>(__builtin_ctz(left));
      Wide value;
      std::memcpy(&value, pointer[l] + 16 * i, 16);
      c.warp.v64(op.list[i]).x[l] = value.low;
      c.warp.v64(op.list[i] + 2).x[l] = value.high;
    }
  return Step::next;
}

template <class T, unsigned bytes>
Step store(Context& c, const Op& op) {
  const Access& a = access_of(op);
  uint64_t address[kLanes];
  uint8_t* pointer[kLanes];
  addresses(c, op.s[0], a.address_bytes, op.offset, address);
  reach(c, a, address, static_cast<unsigned>(sizeof(T) * op.list.size()), false, true, false, pointer);
  if (a.order.release) std::atomic_thread_fence(std::memory_order_release);
  for (size_t i = 0; i < op.list.size(); i++) {
    const auto* s = Lanes<bytes>::of(c.warp, op.list[i]);
    for (Mask left = c.mask; left != 0; left &= left - 1) {
      const unsigned l = static_cast<unsigned>(__builtin_ctz(left));
      const T value = static_cast<T>(s[l]);
      std::memcpy(pointer[l] + i * sizeof(T), &value, sizeof value);
    }
  }
  return Step::next;
}

Step store_wide(Context& c, const Op& op) {
  const Access& a = access_of(op);
  uint64_t address[kLanes];
  uint8_t* pointer[kLanes];
  addresses(c, op.s[0], a.address_bytes, op.offset, address);
  reach(c, a, address, static_cast<unsigned>(16 * op.list.size()), false, true, false, pointer);
  for (size_t i = 0; i < op.list.size(); i++)
    for (Mask left = c.mask; left != 0; left &= left - 1) {
      const unsigned l = static_cast<unsigned>(__builtin_ctz(left));
      const Wide value{c.warp.v64(op.list[i]).x[l], c.warp.v64(op.list[i] + 2).x[l]};
      std::memcpy(pointer[l] + 16 * i, &value, 16);
    }
  return Step::next;
}

template <class T>
Handler load_of(unsigned bytes, bool half) {
  if (bytes == 8) return load<T, 8, false>;
  return half ? load<T, 4, true> : load<T, 4, false>;
}

Handler load_handler(Ty type, unsigned bytes, bool half) {
  switch (type) {
    case Ty::b8:
    case Ty::u8: return load_of<uint8_t>(bytes, half);
    case Ty::s8: return load_of<int8_t>(bytes, half);
    case Ty::s16: return load_of<int16_t>(bytes, half);
    case Ty::b16:
    case Ty::u16:
    case Ty::f16:
    case Ty::bf16: return load_of<uint16_t>(bytes, half);
    case Ty::s32: return load_of<int32_t>(bytes, false);
    case Ty::b64:
    case Ty::u64:
    case Ty::s64:
    case Ty::f64: return load_of<uint64_t>(bytes, false);
    case Ty::b128: return load_wide;
    default: return load_of<uint32_t>(bytes, false);
  }
}

unsigned memory_bytes(Ty type) { return type == Ty::b8 || type == Ty::u8 || type == Ty::s8 ? 1 : bytes_of(type); }

// A register may be wider than what is stored of it: `bytes` is its own width, 4 or 8.
Handler store_handler(Ty type, unsigned bytes) {
  const bool wide = bytes == 8;
  switch (memory_bytes(type)) {
    case 1: return wide ? store<uint8_t, 8> : store<uint8_t, 4>;
    case 2: return wide ? store<uint16_t, 8> : store<uint16_t, 4>;
    case 4: return wide ? store<uint32_t, 8> : store<uint32_t, 4>;
    case 8: return store<uint64_t, 8>;
    default: return store_wide;
  }
}

// Cache operators, eviction priorities, prefetch sizes: PTX ISA 9.7.9.1 and 9.7.9.2. True when a cache policy follows.
bool take_hints(Modifiers& m) {
  m.take_optional({"ca", "cg", "cs", "lu", "cv", "wb", "wt"}, "");
  m.take_optional({"L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate"},
                  "");
  m.take_optional({"L2::evict_normal", "L2::evict_first", "L2::evict_last"}, "");
  const bool policy = m.take("L2::cache_hint");
  m.take_optional({"L2::64B", "L2::128B", "L2::256B"}, "");
  return policy;
}

// The registers of a load or store: as wide as the type or wider (PTX ISA 9.4.1), all of one width in a vector.
unsigned registers(Decoder& d, const Operand& o, Ty type, unsigned vector, bool load, Op& op) {
  const unsigned bytes = memory_bytes(type);
  unsigned width = 0;
  auto one = [&](const Operand& part) {
    unsigned have = std::max(bytes, 2u);
    if (part.kind == Operand::reg) have = bytes_of(part.decl->type);
    else if (width != 0 && (part.kind == Operand::imm || load)) have = width;
    if (have < bytes || (have > 8 && bytes != 16))
      d.fail("a register of " + std::to_string(have * 8) + " bits for " + std::to_string(bytes * 8));
    if (width == 0) width = have;
    if (load ? part.kind != Operand::sink && have != width : (have == 8) != (width == 8))
      d.fail("the registers of a vector differ in width");
    op.list.push_back(load ? d.destination(part, have) : d.source(part, have));
  };
  if (vector > 1) {
    if (o.kind != Operand::vec || o.parts.size() != vector)
      d.fail("a vector of " + std::to_string(vector) + " is expected");
    for (const Operand& part : o.parts) one(part);
  } else {
    one(o.kind == Operand::vec && o.parts.size() == 1 ? o.parts[0] : o);
  }
  return width;
}

void decode_access(Decoder& d, Op& op, bool load) {
  Modifiers m(d.from);
  Access a;
  a.order = take_order(d, m);
  a.window = take_window(m, Window::generic);
  a.constant = load && m.take("nc");
  if (a.constant && a.window != Window::global) d.fail("'.nc' is for .global");
  const bool policy = take_hints(m);
  const std::string vector = m.take_optional({"v2", "v4", "v8"}, "v1");
  const Ty type = m.take_type();
  if (type == Ty::pred || type == Ty::f16x2 || type == Ty::bf16x2 || type == Ty::f32x2)
    d.fail("no type of a load or store");
  m.done();
  d.count(2, policy ? 3 : 2);
  const unsigned n = static_cast<unsigned>(vector[1] - '0');
  if (n * memory_bytes(type) > 32 || (n == 8 && memory_bytes(type) != 4)) d.fail("vectors have at most 32 bytes");
  set_address(d, op, d.operand(load ? 1 : 0), a, op.s[0]);
  if (!load && (a.window == Window::constant || a.window == Window::param))
    d.fail("this state space cannot be written");
  const unsigned width = registers(d, d.operand(load ? 0 : 1), type, n, load, op);
  op.run = load ? load_handler(type, std::max(4u, width), width == 2) : store_handler(type, width);
  op.kind = a.window == Window::shared ? Class::shared : Class::memory;
  op.extra = std::make_shared<Access>(a);
}

Step nothing(Context&, const Op&) { return Step::next; }

Step zero64(Context& c, const Op& op) {
  each_lane(c.mask, c.warp.v64(op.d[0]).x, [](unsigned) { return 0; });
  return Step::next;
}

// PTX ISA 9.7.9.18 "createpolicy": an opaque value that only hints look at.
void decode_policy(Decoder& d, Op& op) {
  Modifiers m(d.from);
  const std::string kind = m.take_one({"fractional", "range", "cvt"});
  if (kind == "cvt") m.take_one({"L2"});
  if (kind == "range") m.take_optional({"global"}, "");
  while (!m.take_prefix("L2::evict_").empty()) {}
  m.take_one({"b64"});
  m.done();
  d.count(1, 4);
  op.d[0] = d.destination(d.operand(0), 8);
  op.run = zero64;
  op.kind = Class::move;
}

}  // namespace

void decode_memory(Decoder& d, Op& op) {
  const std::string& root = d.from.parts[0];
  if (root == "ldu" || root == "ld") return decode_access(d, op, true);
  if (root == "st") {
    if (d.from.parts.size() > 1 && (d.from.parts[1] == "async" || d.from.parts[1] == "bulk")) return decode_copy(d, op);
    return decode_access(d, op, false);
  }
  if (root == "createpolicy") return decode_policy(d, op);
  Modifiers m(d.from);  // prefetch prefetchu discard applypriority: no effect on values
  take_window(m, Window::generic);
  if (root == "prefetch") m.take_one({"L1", "L2", "tensormap", "L2::evict_last", "L2::evict_normal"});
  else if (root == "prefetchu") m.take_one({"L1"});
  else if (root == "discard") m.take_one({"L2"});
  else m.take_one({"L2::evict_normal"});
  m.done();
  d.count(1, 2);
  unsigned bytes = 8;
  op.s[0] = d.address(d.operand(0), op, bytes);
  op.run = nothing;
  op.kind = Class::memory;
}

}  // namespace ptx
