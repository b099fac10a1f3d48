// Compiled once and linked to every kernel: passes its calls on to the machine, whose table is filled in at load time.
#pragma once
typedef unsigned long msl_size;
struct msl_table {
  void (*simd)(int, int, int, const void*, void*, unsigned, const void*, int);
  void (*barrier)(int, int);
  void (*matrix)(int, void*, int, void*, int, void*, int, void*, int);
  void (*atomic)(int, int, int, void*, const void*, void*, int);
  void (*access)(const void*, unsigned, int);
  void (*range)(const void*, msl_size, unsigned, int);
  void (*trap)(int, int);
  void (*work)(int, int, int, int, int);
  void* (*variable)(int);
  unsigned (*lane)();
  float (*math)(int, float, float);
  void (*within)(const void*, const void*, msl_size, unsigned, int);
  void (*array)(const void*, msl_size);
  void (*array_access)(const void*, msl_size, int, int);
  void (*array_copy)(const void*, const void*, msl_size);
  void (*array_within)(const void*, const void*, msl_size, msl_size, int, int);
  void (*thread_access)(const void*, msl_size, int, int);
};
extern "C" {
__attribute__((visibility("default"))) const msl_table* msl_api = nullptr;
// Turns of loops that the threads of a threadgroup may still take before it counts as endless.
__attribute__((visibility("default"))) long msl_turns = 0;
void msl_turn(int site) {
  if (__builtin_expect(--msl_turns < 0, 0)) msl_api->trap(101, site);
}
void msl_divide(bool by_zero, bool overflows, int site) {
  if (by_zero | overflows) msl_api->trap(by_zero ? 102 : 103, site);
}
void msl_within(const void* p, const void* base, msl_size bytes, unsigned info, int site) {
  msl_api->within(p, base, bytes, info, site);
}
void msl_array(const void* p, msl_size bytes) { msl_api->array(p, bytes); }
void msl_array_access(const void* p, msl_size bytes, int write, int site) { msl_api->array_access(p, bytes, write, site); }
void msl_array_copy(const void* to, const void* from, msl_size bytes) { msl_api->array_copy(to, from, bytes); }
void msl_array_within(const void* p, const void* base, msl_size object, msl_size bytes, int write, int site) {
  msl_api->array_within(p, base, object, bytes, write, site);
}
void msl_thread_access(const void* p, msl_size bytes, int write, int site) { msl_api->thread_access(p, bytes, write, site); }
void msl_simd(int op, int type, int count, const void* in, void* out, unsigned arg, const void* fill, int site) {
  msl_api->simd(op, type, count, in, out, arg, fill, site);
}
void msl_barrier(int flags, int site) { msl_api->barrier(flags, site); }
void msl_simdgroup_barrier(int flags, int site) { msl_api->simd(19, 0, 0, nullptr, nullptr, flags, nullptr, site); }
void msl_matrix(int td, void* d, int ta, void* a, int tb, void* b, int tc, void* c, int site) {
  msl_api->matrix(td, d, ta, a, tb, b, tc, c, site);
}
void msl_atomic(int op, int type, int space, void* object, const void* value, void* old, int site) {
  msl_api->atomic(op, type, space, object, value, old, site);
}
void msl_access1(const void* p, unsigned info, int site) { msl_api->access(p, info, site); }
void msl_access2(const void* p, unsigned info, int site) { msl_api->access(p, info, site); }
void msl_access3(const void* p, unsigned info, int site) { msl_api->access(p, info, site); }
void msl_range1(const void* p, msl_size n, unsigned info, int site) { msl_api->range(p, n, info, site); }
void msl_range2(const void* p, msl_size n, unsigned info, int site) { msl_api->range(p, n, info, site); }
void msl_range3(const void* p, msl_size n, unsigned info, int site) { msl_api->range(p, n, info, site); }
void msl_trap(int kind, int site) { msl_api->trap(kind, site); }
void msl_work(int flops, int special, int integer, int conversions, int choices) {
  msl_api->work(flops, special, integer, conversions, choices);
}
void* msl_variable(int id, msl_size, msl_size) { return msl_api->variable(id); }
unsigned msl_lane() { return msl_api->lane(); }
float msl_math(int function, float x, float y) { return msl_api->math(function, x, y); }

// Compilers call this to round a float to bfloat.
__bf16 __truncsfbf2(float f) {
  unsigned u = __builtin_bit_cast(unsigned, f);
  unsigned short r = (u & 0x7fffffff) > 0x7f800000 ? (unsigned short)(u >> 16 | 64)
                                                    : (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
  return __builtin_bit_cast(__bf16, r);
}
}
