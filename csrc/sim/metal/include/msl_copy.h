// Objects of classes that lie in device, constant or threadgroup memory, which C++ reads and assigns in its own alone.
#pragma once
#pragma GCC system_header
#include "msl_types.h"

#ifdef MSL_CHECKED
// Padding has no value, and is copied as well: nothing of a copy counts as unset.
extern "C" void msl_array_access(const void* p, size_t bytes, int write, int site);
#define MSL_ALL_WRITTEN(r) msl_array_access(&r, sizeof r, 1, -1)
#else
#define MSL_ALL_WRITTEN(r)
#endif

namespace msl {
// The widest type that an object of some alignment can be copied in.
template <int Align> struct unit { typedef uint4 type; };
template <> struct unit<1> { typedef uchar type; };
template <> struct unit<2> { typedef ushort type; };
template <> struct unit<4> { typedef uint type; };
template <> struct unit<8> { typedef uint2 type; };
template <class T> struct bytes {
  typedef typename unit<alignof(T)>::type word;
  word words[sizeof(T) / sizeof(word)];
};

// What an expression that names an object is worth, wherever the object lies.
template <class T> MSL_INLINE T&& value(T&& x) { return (T&&)x; }
#define MSL_VALUE(space)                                                                   \
  template <class T> MSL_INLINE T copied(space T& x) {                                     \
    typedef bytes<T> raw;                                                                  \
    raw r;                                                                                 \
    const space typename raw::word* p = (const space typename raw::word*)&x;               \
    for (size_t i = 0; i < sizeof(T) / sizeof(typename raw::word); i++) r.words[i] = p[i]; \
    return __builtin_bit_cast(T, r);                                                       \
  }                                                                                        \
  template <class T> MSL_INLINE constexpr T value(space T& x) {                            \
    if constexpr (__is_class(T) || __is_union(T)) {                                        \
      if (__builtin_is_constant_evaluated()) return __builtin_bit_cast(T, x);              \
      else return copied(x);                                                               \
    } else return x;                                                                       \
  }
MSL_VALUE(device) MSL_VALUE(const device) MSL_VALUE(constant) MSL_VALUE(threadgroup) MSL_VALUE(const threadgroup)

// The value as no other type than its own: an element of an aggregate, not what the class converts to.
template <class T> struct held_value {
  T it;
  MSL_INLINE operator T() const { return it; }
};
template <class T> MSL_INLINE auto held(T&& x) {
  auto v = value(x);
  return held_value<decltype(v)>{v};
}

// The object that a method is called on: constant, so that none changes a copy for the object.
template <class T> MSL_INLINE auto object(T&& x) -> const __remove_reference_t(decltype(value(x))) { return value(x); }

// What stands to the left of =, wherever the object lies.
template <class T> MSL_INLINE T& place(T& x) { return x; }
#define MSL_PLACE(space, name)                                                             \
  template <class T> struct name {                                                         \
    space T* to;                                                                           \
    MSL_INLINE void operator=(T x) const {                                                 \
      typedef bytes<T> raw;                                                                \
      raw r = __builtin_bit_cast(raw, x);                                                  \
      MSL_ALL_WRITTEN(r);                                                                  \
      space typename raw::word* p = (space typename raw::word*)to;                         \
      for (size_t i = 0; i < sizeof(T) / sizeof(typename raw::word); i++) p[i] = r.words[i]; \
    }                                                                                      \
    template <class U> MSL_INLINE void operator=(const device U& x) const { *this = (T)value(x); }        \
    template <class U> MSL_INLINE void operator=(constant U& x) const { *this = (T)value(x); }            \
    template <class U> MSL_INLINE void operator=(const threadgroup U& x) const { *this = (T)value(x); }   \
  };                                                                                       \
  template <class T> MSL_INLINE auto place(space T& x) {                                   \
    return name<T>{&x};                                                                    \
  }
MSL_PLACE(device, device_place) MSL_PLACE(threadgroup, threadgroup_place)
}  // namespace msl
