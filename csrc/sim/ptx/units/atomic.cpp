// atom and red (PTX ISA 9.7.13.5, 9.7.13.6), on scalars, packed pairs and vectors.
//
// Clusters run on several OS threads: memory is changed by compare-and-swap, element by element as PTX guarantees it.
#include "machine/access.h"
#include "units/float_math.h"
#include "units/integer.h"

namespace ptx {

namespace {

struct Atomic : Access {
  bool returns = false;
  unsigned vector = 1;
  std::vector<Slot> old, value, other;  // registers of the result, of b, and of c (cas)
};

// Memory as one word that the processor can compare and swap.
template <class W, class F>
W update(uint8_t* p, F f) {
  W* at = reinterpret_cast<W*>(p);
  W old = __atomic_load_n(at, __ATOMIC_SEQ_CST);
  W next;
  do next = f(old);
  while (!__atomic_compare_exchange_n(at, &old, next, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
  return old;
}

struct AtomAdd {
  template <class T>
  static T of(T a, T b) {
    return AddInt::of(a, b);
  }
};
struct AtomInc {
  template <class T>
  static T of(T a, T b) {
    return a >= b ? 0 : static_cast<T>(a + 1);
  }
};
struct AtomDec {
  template <class T>
  static T of(T a, T b) {
    return a == 0 || a > b ? b : static_cast<T>(a - 1);
  }
};
struct AtomExchange {
  template <class T>
  static T of(T, T b) {
    return b;
  }
};

// Floats. `global`: additions of .f32 in global memory flush subnormals.
template <class E>
PTX_INLINE E sum(E a, E b) {
  return narrow<E>(to_odd(two_sum(value_of(a), value_of(b))));
}
PTX_INLINE float sum(float a, float b) { return canonical(a + b); }
PTX_INLINE double sum(double a, double b) { return a + b; }
template <class E, bool maximum>
PTX_INLINE E extreme(E a, E b) {  // as min and max: a number wins over NaN, -0 is below +0
  const double x = value_of(a), y = value_of(b);
  if (x != x && y != y) return narrow<E>(x);
  if (x != x || y != y) return x != x ? b : a;
  if (x == y) return std::signbit(x) == maximum ? b : a;
  return (x < y) == maximum ? b : a;
}
struct FloatAdd {
  template <class E>
  static E of(E a, E b) {
    return sum(a, b);
  }
};
struct FloatMin {
  template <class E>
  static E of(E a, E b) {
    return extreme<E, false>(a, b);
  }
};
struct FloatMax {
  template <class E>
  static E of(E a, E b) {
    return extreme<E, true>(a, b);
  }
};

bool in_global(const Context& c, const Atomic& a, uint64_t address) {
  return a.window == Window::global ||
         (a.window == Window::generic && place_generic(c, address).space == Place::global);
}

template <class T, class F>
Step atomic(Context& c, const Op& op) {
  using W = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
  const Atomic& a = *static_cast<const Atomic*>(static_cast<const Access*>(op.extra.get()));
  uint64_t address[kLanes];
  uint8_t* pointer[kLanes];
  addresses(c, op.s[0], a.address_bytes, op.offset, address);
  reach(c, a, address, static_cast<unsigned>(sizeof(T)) * a.vector, true, true, true, pointer);
  for (Mask left = c.mask; left != 0; left &= left - 1) {
    const unsigned l = static_cast<unsigned>(__builtin_ctz(left));
    const bool ftz = std::is_same_v<T, float> && in_global(c, a, address[l]);
    for (unsigned i = 0; i < a.vector; i++) {
      const T b = unpack<T>(LanesOf<T>::of(c.warp, a.value[i])[l]);
      const W old = update<W>(pointer[l] + i * sizeof(T), [&](W bits) {
        T v = bit_cast<T>(bits);
        if constexpr (std::is_same_v<T, float>) return bit_cast<W>(flush(F::of(flush(v, ftz), flush(b, ftz)), ftz));
        else return bit_cast<W>(F::of(v, b));
      });
      if (a.returns) LanesOf<T>::of(c.warp, a.old[i])[l] = old;
    }
  }
  return Step::next;
}

// f16x2 and bf16x2: each half is an atomic of its own.
template <class E, class F>
Step atomic_halves(Context& c, const Op& op) {
  const Atomic& a = *static_cast<const Atomic*>(static_cast<const Access*>(op.extra.get()));
  uint64_t address[kLanes];
  uint8_t* pointer[kLanes];
  addresses(c, op.s[0], a.address_bytes, op.offset, address);
  reach(c, a, address, 4 * a.vector, true, true, true, pointer);
  for (Mask left = c.mask; left != 0; left &= left - 1) {
    const unsigned l = static_cast<unsigned>(__builtin_ctz(left));
    for (unsigned i = 0; i < a.vector; i++) {
      const uint32_t b = c.warp.v32(a.value[i]).x[l];
      uint32_t old = 0;
      for (unsigned half = 0; half < 2; half++) {
        const E value{static_cast<uint16_t>(b >> 16 * half)};
        const uint16_t before =
            update<uint16_t>(pointer[l] + 4 * i + 2 * half, [&](uint16_t bits) { return F::of(E{bits}, value).bits; });
        old |= static_cast<uint32_t>(before) << 16 * half;
      }
      if (a.returns) c.warp.v32(a.old[i]).x[l] = old;
    }
  }
  return Step::next;
}

template <class T>
Step compare_and_swap(Context& c, const Op& op) {
  const Atomic& a = *static_cast<const Atomic*>(static_cast<const Access*>(op.extra.get()));
  uint64_t address[kLanes];
  uint8_t* pointer[kLanes];
  addresses(c, op.s[0], a.address_bytes, op.offset, address);
  reach(c, a, address, sizeof(T), true, true, true, pointer);
  for (Mask left = c.mask; left != 0; left &= left - 1) {
    const unsigned l = static_cast<unsigned>(__builtin_ctz(left));
    const T expected = static_cast<T>(LanesOf<T>::of(c.warp, a.value[0])[l]),
            next = static_cast<T>(LanesOf<T>::of(c.warp, a.other[0])[l]);
    const T old = update<T>(pointer[l], [=](T v) { return v == expected ? next : v; });
    if (a.returns) LanesOf<T>::of(c.warp, a.old[0])[l] = old;
  }
  return Step::next;
}

// 128 bits: under a lock, because not every processor swaps as much at once.
template <bool compare>
Step wide(Context& c, const Op& op) {
  static std::mutex lock;
  const Atomic& a = *static_cast<const Atomic*>(static_cast<const Access*>(op.extra.get()));
  uint64_t address[kLanes];
  uint8_t* pointer[kLanes];
  addresses(c, op.s[0], a.address_bytes, op.offset, address);
  reach(c, a, address, 16, true, true, true, pointer);
  std::lock_guard<std::mutex> held(lock);
  for (Mask left = c.mask; left != 0; left &= left - 1) {
    const unsigned l = static_cast<unsigned>(__builtin_ctz(left));
    uint64_t old[2], next[2];
    std::memcpy(old, pointer[l], 16);
    bool equal = true;
    for (unsigned i = 0; i < 2; i++) {
      const uint64_t b = c.warp.v64(a.value[0] + 2 * i).x[l];
      equal &= old[i] == b;
      next[i] = compare ? c.warp.v64(a.other[0] + 2 * i).x[l] : b;
    }
    if (!compare || equal) std::memcpy(pointer[l], next, 16);
    for (unsigned i = 0; i < 2 && a.returns; i++) c.warp.v64(a.old[0] + 2 * i).x[l] = old[i];
  }
  return Step::next;
}

template <class F>
Handler integers(Ty t, bool signs) {
  switch (t) {
    case Ty::u32: return atomic<uint32_t, F>;
    case Ty::u64: return atomic<uint64_t, F>;
    case Ty::s32: return signs ? atomic<int32_t, F> : nullptr;
    case Ty::s64: return signs ? atomic<int64_t, F> : nullptr;
    default: return nullptr;
  }
}
template <class F>
Handler words(Ty t) {
  return t == Ty::b32 ? atomic<uint32_t, F> : t == Ty::b64 ? atomic<uint64_t, F> : nullptr;
}
template <class F>
Handler halves(Ty t) {
  switch (t) {
    case Ty::f16: return atomic<F16, F>;
    case Ty::bf16: return atomic<BF16, F>;
    case Ty::f16x2: return atomic_halves<F16, F>;
    case Ty::bf16x2: return atomic_halves<BF16, F>;
    default: return nullptr;
  }
}

Handler handler_of(const std::string& what, Ty t) {
  const bool half = t == Ty::f16 || t == Ty::bf16 || t == Ty::f16x2 || t == Ty::bf16x2;
  if (what == "cas")
    return t == Ty::b16    ? compare_and_swap<uint16_t>
           : t == Ty::b32  ? compare_and_swap<uint32_t>
           : t == Ty::b64  ? compare_and_swap<uint64_t>
           : t == Ty::b128 ? wide<true>
                           : nullptr;
  if (what == "exch") return t == Ty::b128 ? wide<false> : words<AtomExchange>(t);
  if (what == "and") return words<And>(t);
  if (what == "or") return words<Or>(t);
  if (what == "xor") return words<Xor>(t);
  if (what == "inc") return t == Ty::u32 ? atomic<uint32_t, AtomInc> : nullptr;
  if (what == "dec") return t == Ty::u32 ? atomic<uint32_t, AtomDec> : nullptr;
  if (what == "add") {
    if (t == Ty::f32) return atomic<float, FloatAdd>;
    if (t == Ty::f64) return atomic<double, FloatAdd>;
    return half ? halves<FloatAdd>(t) : integers<AtomAdd>(t, t == Ty::s32);
  }
  if (what == "min") return half ? halves<FloatMin>(t) : integers<MinInt>(t, true);
  return half ? halves<FloatMax>(t) : integers<MaxInt>(t, true);
}

void take_registers(Decoder& d, std::vector<Slot>& out, const Operand& o, unsigned bytes, unsigned vector,
                    bool destination) {
  if ((vector > 1) != (o.kind == Operand::vec) || (vector > 1 && o.parts.size() != vector))
    d.fail("a vector of " + std::to_string(vector) + " is expected");
  out = destination ? d.destinations(o, bytes) : d.sources(o, bytes);
}

}  // namespace

void decode_atomic(Decoder& d, Op& op) {
  const auto& parts = d.from.parts;
  if (parts.size() > 1 && parts[1] == "async") return decode_copy(d, op);  // red.async
  Modifiers m(d.from);
  auto a = std::make_shared<Atomic>();
  a->returns = parts[0] == "atom";
  a->order.strong = true;
  const std::string sem = m.take_optional({"relaxed", "acquire", "release", "acq_rel"}, "relaxed");
  a->order.acquire = sem == "acquire" || sem == "acq_rel";
  a->order.release = sem == "release" || sem == "acq_rel";
  if (!a->returns && a->order.acquire) d.fail("red is .relaxed or .release");
  const std::string scope = m.take_optional({"cta", "cluster", "gpu", "sys"}, "gpu");
  a->order.reach = scope == "cta" ? 0 : scope == "cluster" ? 1 : scope == "gpu" ? 2 : 3;
  a->window = take_window(m, Window::generic);
  if (a->window != Window::generic && a->window != Window::global && a->window != Window::shared)
    d.fail("atomics are for .global and .shared");
  const std::string what = m.take_one({"add", "min", "max", "and", "or", "xor", "inc", "dec", "cas", "exch"});
  const bool noftz = m.take("noftz"), policy = m.take("L2::cache_hint");
  const std::string vector = m.take_optional({"v2", "v4", "v8"}, "v1");
  const Ty type = m.take_type();
  m.done();
  const bool half = type == Ty::f16 || type == Ty::bf16, pair = type == Ty::f16x2 || type == Ty::bf16x2;
  a->vector = static_cast<unsigned>(vector[1] - '0');
  if (noftz != (half || pair)) d.fail("'.noftz' goes with half precision");
  if (!a->returns && (what == "cas" || what == "exch")) d.fail("red has no ." + what);
  if ((half || pair) && what != "add" && a->vector == 1) d.fail("'." + what + "' in half precision is for vectors");
  if (a->vector > 1 &&
      (a->window == Window::shared || !(half || (a->vector < 8 && (pair || (type == Ty::f32 && what == "add"))))))
    d.fail("no vector of this type and operation");
  size_t at = a->returns ? 1 : 0;
  const size_t n = at + 2 + (what == "cas");
  d.count(n, n + (policy ? 1 : 0));
  const unsigned bytes = bytes_of(type);
  if (a->returns) take_registers(d, a->old, d.operand(0), bytes, a->vector, true);
  set_address(d, op, d.operand(at++), *a, op.s[0]);
  take_registers(d, a->value, d.operand(at++), bytes, a->vector, false);
  if (what == "cas") take_registers(d, a->other, d.operand(at), bytes, 1, false);
  op.run = handler_of(what, type);
  if (op.run == nullptr) d.fail("'." + what + "' is not one of this type");
  op.kind = a->window == Window::shared ? Class::shared : Class::memory;
  op.extra = std::static_pointer_cast<Access>(a);
}

}  // namespace ptx
