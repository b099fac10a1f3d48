// What tells the plan of one call from that of another: the words of its arguments.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <cstring>
#include <string>

namespace attnkit {

// Kernels ask whether addresses are multiples of 16 bytes or less; this covers all that a GPU could tell apart.
constexpr uint64_t kAlignment = 128;

inline const void* address(const at::Tensor& t) { return t.unsafeGetTensorImpl()->data(); }

struct Key {
  static constexpr uint32_t kMost = 320;  // 13 tensors of 4 axes and as many scalars take 150
  uint32_t size = 0;
  bool fits = true;
  uint64_t words[kMost];  // those beyond size hold anything

  void put(uint64_t word) {
    if (size < kMost)
      words[size++] = word;
    else
      fits = false;
  }

  // Sizes and strides, dtype, device, and of the address what a kernel may be chosen by: its remainder by ``alignment``.
  void put(const at::Tensor& t, uint64_t alignment) {
    const at::TensorImpl& i = *t.unsafeGetTensorImpl();
    const auto sizes = i.sizes(), strides = i.strides();
    const auto device = i.device();
    const auto low = reinterpret_cast<uintptr_t>(i.data()) % alignment;
    put(sizes.size() << 40 | uint64_t(uint8_t(i.dtype().toScalarType())) << 24 | uint64_t(uint8_t(device.type())) << 16 |
        uint64_t(uint8_t(device.index())) << 8 | low);
    for (int64_t s : sizes) put(uint64_t(s));
    for (int64_t s : strides) put(uint64_t(s));
  }

  void put(const std::string& text) {
    put(text.size());
    for (size_t at = 0; at < text.size(); at += 8) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + at, std::min<size_t>(8, text.size() - at));
      put(word);
    }
  }

  // Anything but a tensor. The kind of an optional argument is known by its word: None is none that a value has.
  void put(const c10::IValue& value) {
    uint64_t word = 0;
    if (value.isDouble()) {
      const double number = value.toDouble();
      std::memcpy(&word, &number, 8);
      put(1), put(word);
    } else if (value.isInt()) {
      put(2), put(uint64_t(value.toInt()));
    } else if (value.isBool()) {
      put(3), put(uint64_t(value.toBool()));
    } else if (value.isString()) {
      put(4), put(value.toStringRef());
    } else {
      put(5);
      fits = fits && value.isNone();
    }
  }

  // Two words a product, in two chains, since a product waits for the one before it: words are told apart as they stand,
  // so that this need only spread well.
  uint64_t hash() {
    static_assert(kMost % 4 == 0);
    for (uint32_t i = size; i % 4; i++) words[i] = 0;
    uint64_t even = size, odd = 1;
    for (uint32_t i = 0; i < size; i += 4) {
      even = folded(even ^ words[i], words[i + 1] ^ 0x9e3779b97f4a7c15ull);
      odd = folded(odd ^ words[i + 2], words[i + 3] ^ 0xd6e8feb86659fd93ull);
    }
    return folded(even, odd ^ 0x9e3779b97f4a7c15ull);
  }

  static uint64_t folded(uint64_t a, uint64_t b) {
    const auto product = static_cast<unsigned __int128>(a) * b;
    return uint64_t(product) ^ uint64_t(product >> 64);
  }
};

}  // namespace attnkit
