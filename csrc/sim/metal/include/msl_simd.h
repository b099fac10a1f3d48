// What the lanes of a simdgroup do together, barriers, 8x8 matrices and atomics.
#pragma once
#pragma GCC system_header
#include "msl_types.h"

MSL_COLLECTIVE void msl_simd(int op, int type, int count, const void* in, void* out, uint arg, const void* fill, int site);
MSL_COLLECTIVE void msl_barrier(int flags, int site);
MSL_COLLECTIVE void msl_simdgroup_barrier(int flags, int site);
MSL_COLLECTIVE void msl_matrix(int td, void* d, int ta, void* a, int tb, void* b, int tc, void* c, int site);
MSL_COLLECTIVE void msl_atomic(int op, int type, int space, void* object, const void* value, void* old, int site);
MSL_COLLECTIVE void msl_trap(int kind, int site);
// What a matrix holds that nobody has set: a NaN that no operation produces.
template <class T> constexpr T msl_unset();
template <> constexpr float msl_unset<float>() { return __builtin_bit_cast(float, 0x7fe5a5a5); }
template <> constexpr half msl_unset<half>() { return __builtin_bit_cast(half, (unsigned short)0x7f5a); }
template <> constexpr bfloat msl_unset<bfloat>() { return __builtin_bit_cast(bfloat, (unsigned short)0x7fe5); }
#ifdef MSL_CHECKED
#define MSL_ALL_LANES(p, stride, transposed) \
  msl_simd(29, 0, 0, (const void*)(ulong)(p), nullptr, (uint)(stride) << 1 | (transposed), nullptr, -1)
#define MSL_ALL_SET(m) if (m.unset()) msl_trap(104, -1)
#else
#define MSL_ALL_LANES(p, stride, transposed)
#define MSL_ALL_SET(m)
#endif
extern "C" __attribute__((const)) uint msl_lane();
extern "C" __attribute__((const)) void* msl_variable(int id, size_t size, size_t align);

namespace metal {
MSL_INLINE void threadgroup_barrier(mem_flags f) { msl_barrier((int)f, -1); }
MSL_INLINE void simdgroup_barrier(mem_flags f) { msl_simdgroup_barrier((int)f, -1); }

#define MSL_SIMD_TYPE(T, name)                                                                                      \
  static_assert((int)msl::shape<T>::code >= 0, #name " takes scalars and vectors");                                 \
  static_assert((int)msl::shape<T>::code != 2, "Metal has no bfloat overload of " #name);                           \
  static_assert((int)msl::shape<T>::code != 9 && (int)msl::shape<T>::code != 10, "Metal has no 64-bit overload of " #name); \
  static_assert((int)msl::shape<T>::code != 11, "Metal has no bool overload of " #name)
#define MSL_REDUCTION(name, op)                                                                                      \
  template <class T> MSL_INLINE T name(T x) {                                                                        \
    MSL_SIMD_TYPE(T, name);                                                                                          \
    T r;                                                                                                             \
    msl_simd(op, msl::shape<T>::code, msl::shape<T>::count, &x, &r, 0, nullptr, -1);                                  \
    return r;                                                                                                        \
  }
MSL_REDUCTION(simd_sum, 0) MSL_REDUCTION(simd_product, 1) MSL_REDUCTION(simd_max, 2) MSL_REDUCTION(simd_min, 3)
MSL_REDUCTION(simd_prefix_inclusive_sum, 14) MSL_REDUCTION(simd_prefix_exclusive_sum, 15)
MSL_REDUCTION(simd_prefix_inclusive_product, 25) MSL_REDUCTION(simd_prefix_exclusive_product, 26)
#define MSL_BITWISE(name, op)                                                                                        \
  template <class T> MSL_INLINE T name(T x) {                                                                        \
    static_assert(!is_floating_point_v<msl::element<T>>, #name " takes integers");                                   \
    MSL_SIMD_TYPE(T, name);                                                                                          \
    T r;                                                                                                             \
    msl_simd(op, msl::shape<T>::code, msl::shape<T>::count, &x, &r, 0, nullptr, -1);                                  \
    return r;                                                                                                        \
  }
MSL_BITWISE(simd_and, 4) MSL_BITWISE(simd_or, 5) MSL_BITWISE(simd_xor, 6)
#define MSL_SHUFFLE(name, op)                                                                                        \
  template <class T> MSL_INLINE T name(T x, ushort lane) {                                                           \
    MSL_SIMD_TYPE(T, name);                                                                                          \
    T r;                                                                                                             \
    msl_simd(op, 0, sizeof(T), &x, &r, lane, nullptr, -1);                                                            \
    return r;                                                                                                        \
  }
MSL_SHUFFLE(simd_broadcast, 7) MSL_SHUFFLE(simd_shuffle, 8) MSL_SHUFFLE(simd_shuffle_down, 9)
MSL_SHUFFLE(simd_shuffle_up, 10) MSL_SHUFFLE(simd_shuffle_xor, 11) MSL_SHUFFLE(simd_shuffle_rotate_down, 21)
MSL_SHUFFLE(simd_shuffle_rotate_up, 22)
#define MSL_FILL(name, op)                                                                                           \
  template <class T> MSL_INLINE T name(T x, T fill, ushort delta) {                                                  \
    MSL_SIMD_TYPE(T, name);                                                                                          \
    T r;                                                                                                             \
    msl_simd(op, 0, sizeof(T), &x, &r, delta, &fill, -1);                                                             \
    return r;                                                                                                        \
  }
MSL_FILL(simd_shuffle_and_fill_down, 12) MSL_FILL(simd_shuffle_and_fill_up, 13)
// In groups of `modulo` lanes each.
#define MSL_FILL_MODULO(name, towards, inside)                                                                       \
  template <class T> MSL_INLINE T name(T x, T fill, ushort delta, ushort modulo) {                                   \
    uint lane = msl_lane(), l = lane % modulo;                                                                       \
    ushort from = (ushort)(lane - l + (l + (towards)) % modulo);                                                     \
    T mine = simd_shuffle(x, from), other = simd_shuffle(fill, from);                                                \
    return inside ? mine : other;                                                                                    \
  }
MSL_FILL_MODULO(simd_shuffle_and_fill_down, delta, l + delta < modulo)
MSL_FILL_MODULO(simd_shuffle_and_fill_up, modulo - delta, l >= delta)
template <class T> MSL_INLINE T simd_broadcast_first(T x) {
  MSL_SIMD_TYPE(T, simd_broadcast_first);
  T r;
  msl_simd(23, 0, sizeof(T), &x, &r, 0, nullptr, -1);
  return r;
}
MSL_INLINE bool simd_all(bool x) { bool r; msl_simd(16, 11, 1, &x, &r, 0, nullptr, -1); return r; }
MSL_INLINE bool simd_any(bool x) { bool r; msl_simd(17, 11, 1, &x, &r, 0, nullptr, -1); return r; }
MSL_INLINE bool simd_is_first() { bool x = true, r; msl_simd(24, 11, 1, &x, &r, 0, nullptr, -1); return r; }
class simd_vote {
 public:
  typedef ulong vote_t;
  explicit constexpr simd_vote(vote_t v = 0) : vote(v) {}
  explicit constexpr operator vote_t() const { return vote; }
  constexpr bool all() const { return (uint)vote == ~0u; }
  constexpr bool any() const { return vote != 0; }

 private:
  vote_t vote;
};
MSL_INLINE simd_vote simd_ballot(bool x) { ulong r; msl_simd(18, 11, 1, &x, &r, 0, nullptr, -1); return simd_vote(r); }
MSL_INLINE simd_vote simd_active_threads_mask() { bool x = true; ulong r; msl_simd(27, 11, 1, &x, &r, 0, nullptr, -1); return simd_vote(r); }

// Of the four lanes of a quad (Metal Shading Language, "Quad-group Functions"): operations numbered as those of
// simdgroups, with a bit that keeps quads apart. A lane of another quad cannot be named, so shuffles say which they mean.
#define MSL_QUADS 64
#define MSL_QUAD_REDUCTION(name, op)                                                                                 \
  template <class T> MSL_INLINE T name(T x) {                                                                        \
    MSL_SIMD_TYPE(T, name);                                                                                          \
    T r;                                                                                                             \
    msl_simd(op | MSL_QUADS, msl::shape<T>::code, msl::shape<T>::count, &x, &r, 0, nullptr, -1);                      \
    return r;                                                                                                        \
  }
MSL_QUAD_REDUCTION(quad_sum, 0) MSL_QUAD_REDUCTION(quad_product, 1) MSL_QUAD_REDUCTION(quad_max, 2)
MSL_QUAD_REDUCTION(quad_min, 3) MSL_QUAD_REDUCTION(quad_prefix_inclusive_sum, 14)
MSL_QUAD_REDUCTION(quad_prefix_exclusive_sum, 15) MSL_QUAD_REDUCTION(quad_prefix_inclusive_product, 25)
MSL_QUAD_REDUCTION(quad_prefix_exclusive_product, 26)
#define MSL_QUAD_BITWISE(name, op)                                                                                   \
  template <class T> MSL_INLINE T name(T x) {                                                                        \
    static_assert(!is_floating_point_v<msl::element<T>>, #name " takes integers");                                   \
    MSL_SIMD_TYPE(T, name);                                                                                          \
    T r;                                                                                                             \
    msl_simd(op | MSL_QUADS, msl::shape<T>::code, msl::shape<T>::count, &x, &r, 0, nullptr, -1);                      \
    return r;                                                                                                        \
  }
MSL_QUAD_BITWISE(quad_and, 4) MSL_QUAD_BITWISE(quad_or, 5) MSL_QUAD_BITWISE(quad_xor, 6)
#define MSL_QUAD(name, lane)                                                                                         \
  template <class T> MSL_INLINE T name(T x, ushort a) {                                                              \
    MSL_SIMD_TYPE(T, name);                                                                                          \
    T r;                                                                                                             \
    uint l = msl_lane();                                                                                             \
    msl_simd(28, 0, sizeof(T), &x, &r, (l & ~3u) | ((lane) & 3u), nullptr, -1);                                        \
    return r;                                                                                                        \
  }
MSL_QUAD(quad_shuffle_xor, l ^ a) MSL_QUAD(quad_shuffle, a) MSL_QUAD(quad_broadcast, a)
MSL_QUAD(quad_shuffle_rotate_down, l + a) MSL_QUAD(quad_shuffle_rotate_up, l - a)
// From past the quad's end comes what Metal does not specify: a lane past the simdgroup's is the same to the machine.
#define MSL_QUAD_DRIFT(name, op, inside)                                                                             \
  template <class T> MSL_INLINE T name(T x, ushort delta) {                                                          \
    MSL_SIMD_TYPE(T, name);                                                                                          \
    T r;                                                                                                             \
    uint l = msl_lane() & 3;                                                                                         \
    msl_simd(op, 0, sizeof(T), &x, &r, inside ? delta : 64, nullptr, -1);                                             \
    return r;                                                                                                        \
  }
MSL_QUAD_DRIFT(quad_shuffle_down, 9, l + delta < 4) MSL_QUAD_DRIFT(quad_shuffle_up, 10, l >= delta)
#define MSL_QUAD_FILL(name, rotate, inside)                                                                          \
  template <class T> MSL_INLINE T name(T x, T fill, ushort delta) {                                                  \
    T mine = rotate(x, delta), other = rotate(fill, delta);                                                          \
    uint l = msl_lane() & 3;                                                                                         \
    return inside ? mine : other;                                                                                    \
  }
MSL_QUAD_FILL(quad_shuffle_and_fill_down, quad_shuffle_rotate_down, l + delta < 4)
MSL_QUAD_FILL(quad_shuffle_and_fill_up, quad_shuffle_rotate_up, l >= delta)
template <class T> MSL_INLINE T quad_broadcast_first(T x) {
  MSL_SIMD_TYPE(T, quad_broadcast_first);
  T r;
  msl_simd(23 | MSL_QUADS, 0, sizeof(T), &x, &r, 0, nullptr, -1);
  return r;
}
class quad_vote {
 public:
  typedef ushort vote_t;
  explicit constexpr quad_vote(vote_t v = 0) : vote(v) {}
  explicit constexpr operator vote_t() const { return vote; }
  constexpr bool all() const { return vote == 15; }
  constexpr bool any() const { return vote != 0; }

 private:
  vote_t vote;
};
MSL_INLINE bool quad_all(bool x) { bool r; msl_simd(16 | MSL_QUADS, 11, 1, &x, &r, 0, nullptr, -1); return r; }
MSL_INLINE bool quad_any(bool x) { bool r; msl_simd(17 | MSL_QUADS, 11, 1, &x, &r, 0, nullptr, -1); return r; }
MSL_INLINE bool quad_is_first() { bool x = true, r; msl_simd(24 | MSL_QUADS, 11, 1, &x, &r, 0, nullptr, -1); return r; }
MSL_INLINE quad_vote quad_ballot(bool x) {
  ulong r;
  msl_simd(18 | MSL_QUADS, 11, 1, &x, &r, 0, nullptr, -1);
  return quad_vote((ushort)(r >> (msl_lane() & ~3u)));
}
MSL_INLINE quad_vote quad_active_threads_mask() {
  bool x = true;
  ulong r;
  msl_simd(27 | MSL_QUADS, 11, 1, &x, &r, 0, nullptr, -1);
  return quad_vote((ushort)(r >> (msl_lane() & ~3u)));
}

// A lane holds two neighbours of a row: the layout that thread_elements() has on every Apple GPU so far.
template <class T, int Columns, int Rows> struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup_matrix is 8x8");
  static_assert((int)msl::scalar<T>::code >= 0 && (int)msl::scalar<T>::code <= 2, "simdgroup_matrix holds float, half or bfloat");
  typedef vec<T, 2> storage_type;
  simdgroup_matrix() : elements(msl_unset<T>()) {}
  explicit simdgroup_matrix(T diagonal) {
    for (int e = 0; e < 2; e++) elements[e] = row() == column() + e ? diagonal : T(0);
  }
  thread storage_type& thread_elements() { return elements; }
  thread const storage_type& thread_elements() const { return elements; }
  static int row() { int l = msl_lane(); return (l / 4 & 4) + l / 2 % 4; }
  static int column() { int l = msl_lane(); return (l / 4 & 2) * 2 + l % 2 * 2; }
  bool unset() const {
    T nobodys = msl_unset<T>(), held[2] = {elements[0], elements[1]};
    return !__builtin_memcmp(held, &nobodys, sizeof(T)) || !__builtin_memcmp(held + 1, &nobodys, sizeof(T));
  }
  storage_type elements;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int C, int R = C> MSL_INLINE simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, C, R> m;
  m.elements = (vec<T, 2>)v;
  return m;
}
template <class D, class A, class B, class C>
MSL_INLINE void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d, thread simdgroup_matrix<A, 8, 8>& a,
                                              thread simdgroup_matrix<B, 8, 8>& b, thread simdgroup_matrix<C, 8, 8>& c) {
  vec<D, 2> de;
  vec<A, 2> ae = a.elements;
  vec<B, 2> be = b.elements;
  vec<C, 2> ce = c.elements;
  msl_matrix(msl::scalar<D>::code, &de, msl::scalar<A>::code, &ae, msl::scalar<B>::code, &be, msl::scalar<C>::code, &ce, -1);
  d.elements = de;
}
template <class D, class A, class B>
MSL_INLINE void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, thread simdgroup_matrix<A, 8, 8>& a,
                                   thread simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_matrix<D, 8, 8> zero;
  zero.elements = (vec<D, 2>)(D)0;
  simdgroup_multiply_accumulate(d, a, b, zero);
}
template <class T> MSL_INLINE simdgroup_matrix<T, 8, 8> operator*(simdgroup_matrix<T, 8, 8> a, simdgroup_matrix<T, 8, 8> b) {
  simdgroup_matrix<T, 8, 8> d;
  simdgroup_multiply(d, a, b);
  return d;
}
// An origin is a place in memory, (column, row), also of a matrix that is transposed on its way: kernels of gpt-oss, whose
// results have been compared on Apple GPUs, load so (moematmul.metal).
#define MSL_MATRIX_MEMORY(space)                                                                                     \
  template <class T> MSL_INLINE void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& m, const space T* p, ulong stride = 8, \
                                                    ulong2 origin = (ulong2)0ul, bool transpose = false) {           \
    p += origin.y * stride + origin.x;                                                                               \
    MSL_ALL_LANES(p, stride, transpose);                                                                             \
    ulong r = m.row(), c = m.column();                                                                               \
    m.elements[0] = transpose ? p[c * stride + r] : p[r * stride + c];                                               \
    m.elements[1] = transpose ? p[(c + 1) * stride + r] : p[r * stride + c + 1];                                     \
  }                                                                                                                  \
  template <class T> MSL_INLINE void simdgroup_store(thread const simdgroup_matrix<T, 8, 8>& m, space T* p, ulong stride = 8, \
                                                     ulong2 origin = (ulong2)0ul, bool transpose = false) {          \
    p += origin.y * stride + origin.x;                                                                               \
    MSL_ALL_LANES(p, stride, transpose);                                                                             \
    MSL_ALL_SET(m);                                                                                                  \
    ulong r = m.row(), c = m.column();                                                                               \
    (transpose ? p[c * stride + r] : p[r * stride + c]) = m.elements[0];                                             \
    (transpose ? p[(c + 1) * stride + r] : p[r * stride + c + 1]) = m.elements[1];                                   \
  }
MSL_MATRIX_MEMORY(device) MSL_MATRIX_MEMORY(threadgroup)

enum memory_order { memory_order_relaxed };
// Of fences alone: what is atomic is relaxed.
enum fence_order { memory_order_acquire = 2, memory_order_release, memory_order_acq_rel, memory_order_seq_cst };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup = 4, thread_scope_threadgroup = 1, thread_scope_device = 2 };
// Threads take turns, so that all see what has been written; it does not count as an order that a race is judged by.
MSL_INLINE void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {}
MSL_INLINE void atomic_thread_fence(mem_flags, fence_order, thread_scope = thread_scope_device) {}
template <class T> struct atomic {
  static_assert(__is_same(T, int) || __is_same(T, uint) || __is_same(T, float) || __is_same(T, ulong) || __is_same(T, bool),
                "atomic takes int, uint, bool, float and ulong");
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;
// ulong has max and min without a result only; float adds and subtracts, and lives in device memory alone.
#define MSL_FETCH(space, number, name, op, allowed)                                                                  \
  template <class T, class U> MSL_INLINE T name(volatile space atomic<T>* p, U operand, memory_order) {              \
    static_assert(!__is_same(T, float) || number == 1, "a float atomic lives in device memory");                     \
    static_assert(allowed, #name " does not take this type");                                                        \
    T value = operand, old;                                                                                          \
    msl_atomic(op, msl::scalar<T>::code, number, (void*)&p->value, &value, &old, -1);                                 \
    return old;                                                                                                      \
  }
#define MSL_WORD (__is_same(T, int) || __is_same(T, uint))
#define MSL_ATOMIC(space, number)                                                                                    \
  template <class T> MSL_INLINE T atomic_load_explicit(const volatile space atomic<T>* p, memory_order) {            \
    static_assert(!__is_same(T, ulong), "atomic_load_explicit does not take ulong");                                 \
    T old;                                                                                                           \
    msl_atomic(0, msl::scalar<T>::code, number, (void*)&p->value, nullptr, &old, -1);                                 \
    return old;                                                                                                      \
  }                                                                                                                  \
  template <class T, class U> MSL_INLINE void atomic_store_explicit(volatile space atomic<T>* p, U v, memory_order) { \
    static_assert(!__is_same(T, ulong), "atomic_store_explicit does not take ulong");                                \
    T value = v;                                                                                                     \
    msl_atomic(1, msl::scalar<T>::code, number, (void*)&p->value, &value, nullptr, -1);                               \
  }                                                                                                                  \
  template <class T> MSL_INLINE bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>* p, thread T* expected, \
                                                                           T desired, memory_order, memory_order) {  \
    T old;                                                                                                           \
    msl_atomic(0, msl::scalar<T>::code, number, (void*)&p->value, nullptr, &old, -1);                                 \
    if (__builtin_memcmp(&old, expected, sizeof(T)) == 0) {                                                          \
      msl_atomic(1, msl::scalar<T>::code, number, (void*)&p->value, &desired, nullptr, -1);                           \
      return true;                                                                                                   \
    }                                                                                                                \
    *expected = old;                                                                                                 \
    return false;                                                                                                    \
  }                                                                                                                  \
  MSL_FETCH(space, number, atomic_exchange_explicit, 2, !(__is_same(T, ulong)))                                      \
  MSL_FETCH(space, number, atomic_fetch_add_explicit, 3, MSL_WORD || __is_same(T, float))                            \
  MSL_FETCH(space, number, atomic_fetch_sub_explicit, 4, MSL_WORD || __is_same(T, float))                            \
  MSL_FETCH(space, number, atomic_fetch_max_explicit, 5, MSL_WORD)                                                   \
  MSL_FETCH(space, number, atomic_fetch_min_explicit, 6, MSL_WORD)                                                   \
  MSL_FETCH(space, number, atomic_fetch_or_explicit, 7, MSL_WORD)                                                    \
  MSL_FETCH(space, number, atomic_fetch_and_explicit, 8, MSL_WORD)                                                   \
  MSL_FETCH(space, number, atomic_fetch_xor_explicit, 9, MSL_WORD)
MSL_ATOMIC(device, 1) MSL_ATOMIC(threadgroup, 3)
// Metal Shading Language, "Atomic Modify Functions (64 Bits)": in device memory, without a result.
#define MSL_MODIFY(name, op)                                                                                         \
  MSL_INLINE void name(volatile device atomic_ulong* p, ulong operand, memory_order) {                               \
    ulong old;                                                                                                       \
    msl_atomic(op, msl::scalar<ulong>::code, 1, (void*)&p->value, &operand, &old, -1);                                \
  }
MSL_MODIFY(atomic_max_explicit, 5) MSL_MODIFY(atomic_min_explicit, 6)
}  // namespace metal
