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
  void (*work)(int, int);
  void* (*variable)(int);
  unsigned (*lane)();
  float (*math)(int, float, float);
};
extern "C" {
__attribute__((visibility("default"))) const msl_table* msl_api = nullptr;
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
void msl_work(int flops, int special) { msl_api->work(flops, special); }
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
