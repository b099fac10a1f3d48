// The functions that a compiled kernel calls. include/msl_entry.h has the same layout on the kernel's side.
#pragma once
#include <cstddef>
#include <cstdint>

namespace sim {

struct Api {
  void (*simd)(int op, int type, int count, const void* in, void* out, unsigned arg, const void* fill, int site);
  void (*barrier)(int flags, int site);
  void (*matrix)(int td, void* d, int ta, void* a, int tb, void* b, int tc, void* c, int site);
  void (*atomic)(int op, int type, int space, void* object, const void* value, void* old, int site);
  void (*access)(const void* p, unsigned info, int site);
  void (*range)(const void* p, size_t bytes, unsigned info, int site);
  void (*trap)(int kind, int site);
  void (*work)(int flops, int special, int integer, int conversions, int choices);
  void* (*variable)(int id);
  unsigned (*lane)();
  float (*math)(int function, float x, float y);
  void (*within)(const void* p, const void* base, size_t bytes, unsigned info, int site);
  void (*array)(const void* p, size_t bytes);
  void (*array_access)(const void* p, size_t bytes, int write, int site);
  void (*array_copy)(const void* to, const void* from, size_t bytes);
  void (*array_within)(const void* p, const void* base, size_t object, size_t bytes, int write, int site);
  void (*thread_access)(const void* p, size_t bytes, int write, int site);
};
extern const Api api;

// The entry points that are not in module.cpp, by file.
namespace entry {
// schedule.cpp
void simd(int op, int type, int count, const void* in, void* out, unsigned arg, const void* fill, int site);
void barrier(int flags, int site);
void matrix(int td, void* d, int ta, void* a, int tb, void* b, int tc, void* c, int site);
// memory.cpp
void access(const void* p, unsigned info, int site);
void range(const void* p, size_t bytes, unsigned info, int site);
void within(const void* p, const void* base, size_t bytes, unsigned info, int site);
void array(const void* p, size_t bytes);
void array_access(const void* p, size_t bytes, int write, int site);
void array_copy(const void* to, const void* from, size_t bytes);
void array_within(const void* p, const void* base, size_t object, size_t bytes, int write, int site);
void thread_access(const void* p, size_t bytes, int write, int site);
}  // namespace entry

// Bits of `info`: bytes, then these.
constexpr unsigned kInfoWrite = 1u << 16;
constexpr int kInfoSpace = 17, kInfoAlign = 20, kInfoVariable = 24;  // the variable: its number and one, 0 if unknown
// Kinds of msl_trap, beside clang's own of a sanitizer.
enum Trap { kTrapIndex = 18, kTrapTurns = 101, kTrapDivision, kTrapOverflow, kTrapUnset, kTrapAssert };

}  // namespace sim
