// From the machine's context to a kernel's parameters, and what the host may know about them.
#pragma once
#pragma GCC system_header
#include "msl_copy.h"
#include "msl_matrix.h"
#include "msl_simd.h"
#ifdef MSL_FOREIGN
#include "msl_internals.h"
#endif

// <metal_logging>, of Metal 3.2: what a kernel says is for a log that a simulation has not.
namespace metal {
enum os_log_type { os_log_type_debug, os_log_type_info, os_log_type_default, os_log_type_error, os_log_type_fault };
struct os_log {
  constexpr os_log(constant char*, constant char*) {}
  template <class... A> void log(constant char*, A...) const {}
  template <class... A> void log_debug(constant char*, A...) const {}
  template <class... A> void log_info(constant char*, A...) const {}
  template <class... A> void log_error(constant char*, A...) const {}
  template <class... A> void log_fault(constant char*, A...) const {}
  template <class... A> void log_with_type(os_log_type, constant char*, A...) const {}
};
}  // namespace metal

namespace msl {
struct context {
  ulong buffer[40];
  uint grid[16][4];
};
struct description {
  int kind, space, is_const, size, align, type, count;  // kind: 0 grid value, 1 pointer, 2 reference, 3 anything else
};

template <class T> struct space_of { enum { value = 0 }; typedef T type; };
template <class T> struct space_of<device T> { enum { value = 1 }; typedef T type; };
template <class T> struct space_of<constant T> { enum { value = 2 }; typedef const T type; };
template <class T> struct space_of<threadgroup T> { enum { value = 3 }; typedef T type; };
template <class T> struct space_of<volatile device T> : space_of<device T> {};
template <class T> struct constness { enum { value = 0 }; typedef T type; };
template <class T> struct constness<const T> { enum { value = 1 }; typedef T type; };
template <class T> struct plain { typedef T type; };
template <class T> struct plain<metal::atomic<T>> { typedef T type; };

template <class T> constexpr description describe_pointee(int kind) {
  typedef typename constness<typename space_of<T>::type>::type bare;
  typedef typename plain<bare>::type value;
  return {kind, space_of<T>::value, constness<typename space_of<T>::type>::value || space_of<T>::value == 2, sizeof(bare),
          alignof(bare), shape<value>::code, shape<value>::count};
}

template <class P> struct parameter {
  static constexpr description describe() {
    return {(int)scalar<element<P>>::code >= 3 ? 0 : 3, 0, 0, sizeof(P), alignof(P), shape<P>::code, shape<P>::count};
  }
  static MSL_INLINE P get(const context* c, int k) {
    P r = {};
    if constexpr (shape<P>::count == 1) r = (P)c->grid[k - 100][0];
    else for (int i = 0; i < (int)shape<P>::count; i++) r[i] = (element<P>)c->grid[k - 100][i];
    return r;
  }
};
template <class T> struct parameter<T*> {
  static constexpr description describe() { return describe_pointee<T>(1); }
  static MSL_INLINE T* get(const context* c, int k) { return (T*)c->buffer[k]; }
};
template <class P, int Slot> struct argument {
  static MSL_INLINE P get(const context* c) { return parameter<P>::get(c, Slot); }
};
// Threadgroup memory that the launch gives: its slots begin at 200, and go on with the numbers of variables.
template <class P, int Slot> struct launched {
  static MSL_INLINE P get(const context*) { return (P)(ulong)msl_variable(Slot - 200, 0, 16); }
};
template <bool> struct choose { template <class P, int Slot> using type = argument<P, Slot>; };
template <> struct choose<true> { template <class P, int Slot> using type = launched<P, Slot>; };
template <class T> struct parameter<T&> {
  static constexpr description describe() { return describe_pointee<T>(2); }
  static MSL_INLINE T& get(const context* c, int k) { return *(T*)c->buffer[k]; }
};

template <auto F, int... Slots> struct entry;
template <class... P, void (*F)(P...), int... Slots> struct entry<F, Slots...> {
  static MSL_INLINE void run(const context* c) { F(choose<(Slots >= 200)>::template type<P, Slots>::get(c)...); }
  static constexpr int count = sizeof...(P);
  static constexpr description descriptions[sizeof...(P) + 1] = {parameter<P>::describe()..., {}};
};
}  // namespace msl

// `threadgroup T x[n]` in a kernel becomes a reference into the memory of the threadgroup that runs.
#define MSL_THREADGROUP(T, id) (*(threadgroup T*)(ulong)msl_variable(id, sizeof(T), alignof(T)))
