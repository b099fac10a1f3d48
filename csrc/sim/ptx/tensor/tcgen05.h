// What the tcgen05 units share: tensor memory and who may touch it, the pipes, and the operations by file.
//
// tcgen05.mma, cp, shift and commit of one CTA (or of a CTA pair) complete in the order of issue. The ISA orders less
// (9.7.16.6.2 "Pipelined tcgen05 Instructions"); what it does not order is reported by the checker, not reordered.
#pragma once
#include <map>

#include "async/async.h"

namespace ptx {

// Which CTAs an operation works on: .cta_group::1, the executing CTA; .cta_group::2, its pair, the even one first.
std::vector<Cta*> tensor_group(const Context&, bool pair);
// `order` for Cluster::submit, and the pipe that the checker orders by.
uint64_t tensor_order(const Context&, bool pair);
TensorPipe tensor_pipe(const Context&, bool pair);

// A tensor memory address (9.7.16.1.1): lane in the upper half, column in the lower.
struct TensorPlace {
  unsigned lane, column;
};
inline TensorPlace tensor_place(uint32_t address) { return {address >> 16, address & 0xffff}; }

// Fails unless the block lies in tensor memory and in allocated columns. `what` names the access.
void check_tensor(const Context&, const Cta&, unsigned lane, unsigned lanes, unsigned column, unsigned columns,
                  const char* what);
inline uint32_t* tensor_row(Cta& cta, unsigned lane) {
  return cta.tmem.data() + static_cast<size_t>(lane) * kTmemColumns;
}

// Of a column that is free, the rest of a sentence: who gave it back; empty when it has never been allocated.
std::string tensor_freed(const Context&, const Cta&, unsigned column);

// Columns that a CTA has not deallocated, as the text of an error; empty when there are none. For the end of a CTA.
std::string tensor_leak(const Cta&);

// `.cta_group::1` or `.cta_group::2` of an instruction, which has to be there: true for 2.
bool take_pair(Decoder&, Modifiers&);
// [taddr] as an operand.
Address tensor_operand(Decoder&, const Operand&);
// The first lane's value of an address operand in tensor memory; all executing lanes have to agree.
uint32_t uniform_address(Context&, const Address&, const char* what);

// The opcodes, by file.
void decode_tensor_memory(Decoder&, Op&, Modifiers&);   // tcgen05_memory.cpp: alloc, dealloc, relinquish_alloc_permit
void decode_tensor_load(Decoder&, Op&, Modifiers&);     // tcgen05_load.cpp: ld, ld.red, st, wait
void decode_tensor_copy(Decoder&, Op&, Modifiers&);     // tcgen05_copy.cpp: cp, shift
void decode_tensor_mma(Decoder&, Op&, Modifiers&);      // tcgen05_mma.cpp

}  // namespace ptx
