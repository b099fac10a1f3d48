#include "fiber.h"

#include <cstdint>
#include <cstring>

#if defined(__APPLE__)
#define SYMBOL "_attnkit_metal_switch"
#else
#define SYMBOL "attnkit_metal_switch"
#endif

// ucontext is fifty times slower: it changes the signal mask with a system call at every switch.
#if defined(__x86_64__)
asm(".text\n.globl " SYMBOL "\n" SYMBOL ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n");
#elif defined(__aarch64__)
asm(".text\n.balign 4\n.globl " SYMBOL "\n" SYMBOL ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n");
#else
#error "the Metal simulator switches stacks on x86-64 and arm64 only"
#endif

namespace sim {

void* fiber_start(char* stack_top, void (*entry)()) {
  auto top = reinterpret_cast<uintptr_t>(stack_top) & ~uintptr_t(63);
#if defined(__x86_64__)
  auto* sp = reinterpret_cast<void**>(top);
  *--sp = nullptr;  // keeps the stack as a call would leave it: 16-byte aligned before the return address
  *--sp = reinterpret_cast<void*>(entry);
  sp -= 6;
  std::memset(sp, 0, 6 * sizeof(void*));
#else
  auto* sp = reinterpret_cast<void**>(top - 160);
  std::memset(sp, 0, 160);
  sp[11] = reinterpret_cast<void*>(entry);  // x30, the return address
#endif
  return sp;
}

}  // namespace sim
