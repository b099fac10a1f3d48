// From statements to operations: every opcode is matched by the table, every modifier is consumed by name, and what
// nobody consumed is an error that quotes the line.
#pragma once
#include <initializer_list>

#include "machine/machine.h"

namespace ptx {

// What an operation costs an issue slot for; the counters and the roofline group by this.
enum class Class : uint8_t {
  integer, floating, special_function, convert, move, memory, shared, tensor, copy, sync, control
};

// A decoded instruction. Handlers read `d` and `s` as slots; what a handler needs beyond them it keeps in `extra`.
struct Op {
  Handler run = nullptr;
  Class kind = Class::control;
  bool collective = false;        // all live lanes (or those of `members`) have to be in one fragment
  Slot members = 0;               // slot of the member mask of a .sync operation; 0: all live lanes
  Slot guard = 0;                 // 0: none (slot 0 is never given out)
  bool guard_negated = false;
  bool effect = false;            // others may see what it does: a store or a copy (see Cluster::effects)
  uint8_t mode = 0, size = 0, count = 0;   // for the handler: rounding or comparison, bytes per element, vector length
  Slot d[2] = {}, s[4] = {};
  int64_t offset = 0;             // of an address
  uint32_t target = 0;            // branches
  std::vector<Slot> list;         // further slots, e.g. the registers of a vector
  std::shared_ptr<void> extra;    // a unit's own record
  const Statement* from = nullptr;
  int index = 0;
};

// The value a slot holds from the start of a warp: an immediate, a symbol's address, or a special register.
struct Preset {
  enum Kind : uint8_t { constant, predicate, special, symbol, scratch } kind;
  uint64_t bits = 0;              // constant, predicate: the value; symbol: added to its address
  std::string name;               // special, symbol
  unsigned bytes = 4;             // 8: a V64
  Slot slot = 0;
};

struct Program {
  std::shared_ptr<const Module> module;
  const Function* function = nullptr;
  std::vector<Op> ops;
  std::vector<Preset> presets;
  uint32_t slots = 0;             // size of a warp's register file
  uint32_t static_shared = 0, local_bytes = 0;
  std::map<std::string, uint64_t> symbols;       // .shared / .local / .global / .const -> address
  std::map<std::string, std::vector<uint8_t>> globals;   // storage of the module's .global and .const variables
  uint32_t dynamic_base = 0;      // where dynamic shared memory begins
};

// Where a symbol lives; fails in source() for functions, which have no address here.
enum class Home : uint8_t { shared, local, global, constant, param, none };
Home home_of(const Program&, const std::string& symbol);
std::shared_ptr<Program> decode(std::shared_ptr<const Module>, const std::string& kernel);

// The modifiers of one opcode, consumed one by one. `done()` throws when something is left.
class Modifiers {
 public:
  explicit Modifiers(const Statement&);            // everything after the root
  bool take(const char* name);                     // true and consumed when present, wherever it stands
  std::string take_one(std::initializer_list<const char*> names);           // one of them must be there
  std::string take_optional(std::initializer_list<const char*> names, const char* otherwise);
  std::string take_prefix(const char* prefix);     // "kind::" -> "f16"; empty when absent
  Ty take_type();                                  // the first type left; Error when there is none
  bool empty() const { return left_.empty(); }
  void done() const;
 private:
  const Statement& from_;
  std::vector<std::string> left_;
};

class Decoder {
 public:
  Decoder(Program&, const Statement&);
  const Statement& from;
  Program& program;

  [[noreturn]] void fail(const std::string& what) const;              // quotes the line
  // The slot that holds an operand's value: a register's own, or a preset for immediates, symbols, special registers.
  // `bytes` 2, 4, 8 or 16: how the handler reads it (16-bit registers are read as 4: their value is in the low half,
  // the rest 0; with `bytes` 2 only they are accepted). A register of another width is refused unless `any_width`.
  Slot source(const Operand&, unsigned bytes, bool any_width = false);
  Slot predicate(const Operand&, bool& negated);                      // register, or immediate 0/1
  Slot destination(const Operand&, unsigned bytes, bool any_width = false);   // sink: slot of a scratch register
  unsigned width(const Operand&) const;                               // bytes per lane of a register: 0 pred, 4, 8, 16
  std::vector<Slot> sources(const Operand& vec, unsigned bytes);      // {a, b, ...}, or a single operand
  std::vector<Slot> destinations(const Operand& vec, unsigned bytes);
  // [base + offset]: the base as a 64-bit source (`bytes` 8) or 32-bit (4, shared addresses: 64-bit registers are
  // accepted and cut by the handler's read of the low word); the constant goes to op.offset.
  Slot address(const Operand& memory, Op& op, unsigned& bytes);
  const Operand& operand(size_t i) const;                             // fails when there are fewer
  void count(size_t least, size_t most) const;
  // Refuses what one GPU has and its family has not: under .target sm_100f and its like ptxas does not know it.
  void not_for_a_family(const std::string& feature) const;
  Slot constant(uint64_t bits, unsigned bytes);
};

// The 32 lanes of an address slot as 64-bit values, constant offset added (mod 2^32 for 4-byte addresses).
inline void addresses(Context& c, Slot s, unsigned bytes, int64_t offset, uint64_t out[kLanes]) {
  if (bytes == 8) {
    const V64& v = c.warp.v64(s);
    for (unsigned l = 0; l < kLanes; l++) out[l] = v.x[l] + static_cast<uint64_t>(offset);
  } else {
    const V32& v = c.warp.v32(s);
    for (unsigned l = 0; l < kLanes; l++) out[l] = static_cast<uint32_t>(v.x[l] + static_cast<uint32_t>(offset));
  }
}

// One entry per opcode root ("ld", "tcgen05", ...). A unit decodes all forms of its roots.
using Unit = void (*)(Decoder&, Op&);
Unit unit_of(const std::string& root);  // front/table.cpp; null when unknown
std::vector<std::string> opcode_roots();

// The decoders of the roots, by file.

// units/integer.cpp and bits.cpp: add sub mul mad div rem min max and or xor not shl shr shf neg abs bfe bfi bfind brev
// clz popc prmt lop3 sad dp4a dp2a fns szext bmsk
void decode_integer(Decoder&, Op&);
// units/float.cpp and special.cpp: the same roots on f16 bf16 f32 f64 and their x2 forms; fma rcp sqrt rsqrt ex2 lg2
// sin cos tanh copysign testp
void decode_float(Decoder&, Op&);
void decode_arithmetic(Decoder&, Op&);  // front/table.cpp: picks one of the two by the type
void decode_compare(Decoder&, Op&);     // units/compare.cpp: setp set selp slct
void decode_convert(Decoder&, Op&);     // units/convert.cpp and convert_packed.cpp: cvt, cvta
// units/move.cpp: mov (packing, special registers, b128), mapa, isspacep, getctarank
void decode_move(Decoder&, Op&);
// units/memory.cpp: ld ldu st prefetch prefetchu discard applypriority createpolicy
void decode_memory(Decoder&, Op&);
void decode_atomic(Decoder&, Op&);      // units/atomic.cpp: atom red
void decode_collective(Decoder&, Op&);  // units/collective.cpp: shfl vote match redux elect activemask
// units/control.cpp: bra brx ret exit trap call nanosleep pmevent brkpt setmaxnreg griddepcontrol
void decode_control(Decoder&, Op&);
void decode_barrier(Decoder&, Op&);   // async/barrier.cpp: bar barrier (named and cluster) fence membar
void decode_mbarrier(Decoder&, Op&);  // async/mbarrier.cpp: mbarrier
// async/copy.cpp: cp (cp.async, cp.async.bulk*, cp.async.bulk.tensor, cp.reduce.async, commit_group, wait_group,
// mbarrier.arrive), st.async, red.async, tensormap, multimem; which file of the room has the form
void decode_copy(Decoder&, Op&);
void decode_cancel(Decoder&, Op&);   // async/cancel.cpp: clusterlaunchcontrol
void decode_matrix(Decoder&, Op&);   // tensor/matrix.cpp: mma.sync ldmatrix stmatrix movmatrix
void decode_wgmma(Decoder&, Op&);    // tensor/wgmma.cpp
void decode_tcgen05(Decoder&, Op&);  // tensor/tcgen05.cpp and tcgen05_*.cpp

}  // namespace ptx
