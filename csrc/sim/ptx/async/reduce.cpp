// The element-wise operations of cp.reduce.async.bulk, its tensor form and red.async (PTX ISA 9.7.9.25.4.2).
#include "async/async.h"
#include "units/formats.h"

namespace ptx {

namespace {

// How an element type is held, compared and added.
template <class T>
struct Plain {
  using Word = T;
  static T add(T a, T b) { return static_cast<T>(a + b); }
  static T min(T a, T b) { return b < a ? b : a; }
  static T max(T a, T b) { return a < b ? b : a; }
};
// cp.reduce.async.bulk.add.f32 flushes subnormal inputs and results to zero of the same sign.
struct F32 : Plain<float> {
  static float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
  static float add(float a, float b) { return flush(flush(a) + flush(b)); }
};
// f16 and bf16, .noftz. Added in f32: 24 bits hold the sum well enough that rounding twice is rounding once.
template <uint32_t (*Encode)(float), float (*Decode)(uint32_t)>
struct Half {
  using Word = uint16_t;
  static Word add(Word a, Word b) { return static_cast<Word>(Encode(Decode(a) + Decode(b))); }
  // A NaN loses against a number, and -0 is less than +0: the rule of min and max in 9.7.4.
  static bool less(Word a, Word b) {
    const float x = Decode(a), y = Decode(b);
    return x < y || (x == y && std::signbit(x) && !std::signbit(y));
  }
  static Word min(Word a, Word b) { return std::isnan(Decode(a)) ? b : std::isnan(Decode(b)) || !less(b, a) ? a : b; }
  static Word max(Word a, Word b) { return std::isnan(Decode(a)) ? b : std::isnan(Decode(b)) || !less(a, b) ? a : b; }
};
using F16 = Half<f16_of_f32, f32_of_f16>;
using BF16 = Half<bf16_of_f32, f32_of_bf16>;

template <size_t N>
struct Bits;
template <>
struct Bits<2> { using T = uint16_t; };
template <>
struct Bits<4> { using T = uint32_t; };
template <>
struct Bits<8> { using T = uint64_t; };

// Other clusters, on other threads, may reduce into the same element: compare and exchange.
template <class Word, class F>
void apply(uint8_t* to, const uint8_t* from, uint64_t bytes, F f) {
  using Raw = typename Bits<sizeof(Word)>::T;
  for (uint64_t at = 0; at < bytes; at += sizeof(Word)) {
    Word x, y;
    std::memcpy(&x, from + at, sizeof x);
    Raw* target = reinterpret_cast<Raw*>(to + at);
    Raw old = __atomic_load_n(target, __ATOMIC_RELAXED), next;
    do {
      std::memcpy(&y, &old, sizeof y);
      const Word z = f(y, x);
      std::memcpy(&next, &z, sizeof next);
    } while (!__atomic_compare_exchange_n(target, &old, next, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
  }
}

template <class T>
void add(uint8_t* to, const uint8_t* from, uint64_t bytes) { apply<typename T::Word>(to, from, bytes, T::add); }
template <class T>
void least(uint8_t* to, const uint8_t* from, uint64_t bytes) { apply<typename T::Word>(to, from, bytes, T::min); }
template <class T>
void most(uint8_t* to, const uint8_t* from, uint64_t bytes) { apply<typename T::Word>(to, from, bytes, T::max); }
template <class W>
void both(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  apply<W>(to, from, bytes, [](W a, W b) { return a & b; });
}
template <class W>
void either(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  apply<W>(to, from, bytes, [](W a, W b) { return a | b; });
}
template <class W>
void odd(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  apply<W>(to, from, bytes, [](W a, W b) { return a ^ b; });
}
void increment(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  apply<uint32_t>(to, from, bytes, [](uint32_t a, uint32_t b) { return a >= b ? 0 : a + 1; });
}
void decrement(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  apply<uint32_t>(to, from, bytes, [](uint32_t a, uint32_t b) { return a == 0 || a > b ? b : a - 1; });
}

Reducer adder(Ty type) {
  switch (type) {
    case Ty::u32: case Ty::s32: return add<Plain<uint32_t>>;
    case Ty::u64: case Ty::s64: return add<Plain<uint64_t>>;
    case Ty::f16: return add<F16>;
    case Ty::bf16: return add<BF16>;
    case Ty::f32: return add<F32>;
    case Ty::f64: return add<Plain<double>>;
    default: return nullptr;
  }
}

Reducer extreme(bool min, Ty type) {
  switch (type) {
    case Ty::u32: return min ? least<Plain<uint32_t>> : most<Plain<uint32_t>>;
    case Ty::s32: return min ? least<Plain<int32_t>> : most<Plain<int32_t>>;
    case Ty::u64: return min ? least<Plain<uint64_t>> : most<Plain<uint64_t>>;
    case Ty::s64: return min ? least<Plain<int64_t>> : most<Plain<int64_t>>;
    case Ty::f16: return min ? least<F16> : most<F16>;
    case Ty::bf16: return min ? least<BF16> : most<BF16>;
    default: return nullptr;
  }
}

template <class W>
Reducer logic(Reduce what) {
  return what == Reduce::op_and ? both<W> : what == Reduce::op_or ? either<W> : odd<W>;
}

}  // namespace

Reduce reduce_named(const std::string& name) {
  Reduce r = Reduce::add;
  for (const char* n : kReduceNames) {
    if (name == n) return r;
    r = static_cast<Reduce>(static_cast<int>(r) + 1);
  }
  throw Error("no reduction is called '" + name + "'");
}

Reducer reducer(Reduce what, Ty type) {
  switch (what) {
    case Reduce::add: return adder(type);
    case Reduce::min: case Reduce::max: return extreme(what == Reduce::min, type);
    case Reduce::inc: return type == Ty::u32 ? increment : nullptr;
    case Reduce::dec: return type == Ty::u32 ? decrement : nullptr;
    default: return type == Ty::b32 ? logic<uint32_t>(what) : type == Ty::b64 ? logic<uint64_t>(what) : nullptr;
  }
}

}  // namespace ptx
