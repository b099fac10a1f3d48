// PTX as parsed: statements with their operands resolved to declarations, nothing decided yet about execution.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace ptx {

// Every complaint about a program carries the PTX line; the message is complete when it is thrown.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The fundamental types of PTX ISA 5.2, and the packed ones that instructions name.
enum class Ty : uint8_t {
  none, pred, b8, u8, s8, b16, u16, s16, f16, bf16, b32, u32, s32, f32, f16x2, bf16x2, b64, u64, s64, f64, f32x2, b128,
  u16x2, s16x2
};
unsigned bytes_of(Ty);                   // storage of one lane: pred 0, b8..b16 2 in a register; see Decl
Ty type_named(const std::string& name);  // Ty::none when the name is no type

// A .reg declaration. `slot` is where its 32 lanes live in a warp's register file, in units of 128 bytes.
struct Decl {
  std::string name;
  Ty type;
  uint32_t slot;
};

struct Operand {
  enum Kind : uint8_t { reg, imm, special, symbol, memory, vec, pair, sink, label } kind = sink;
  bool negated = false;         // !%p
  const Decl* decl = nullptr;   // reg
  uint64_t bits = 0;            // imm: integer value, or the raw bits of 0f.. / 0d.. literals
  Ty literal = Ty::none;        // imm: f32 or f64 for 0f.. / 0d.., else none
  std::string name;             // special (with %), symbol (its unique name, see Function::local), label
  int64_t offset = 0;           // memory: constant offset; symbol + constant
  int target = -1;              // label: index of the statement it names
  std::vector<Operand> parts;   // vec {a, b} or (a, b); pair a|b; memory: [0] the base, [1] a vec of coordinates,
                                // then further operands inside the brackets
};

struct Statement {
  std::string text;                // as written, without the semicolon
  std::vector<std::string> parts;  // the opcode split at dots: "ld", "shared::cta", "v4", "b32"
  std::vector<Operand> operands;
  const Decl* guard = nullptr;     // @p
  bool guard_negated = false;
  int line = 0;                    // line of the PTX text, from 1
  int file = 0, source_line = 0;   // the last .loc before it; 0 when there is none
};

struct Variable {  // .shared, .local, .global, .const
  std::string name;
  uint64_t align = 1, size = 0;    // size 0: the extern array of dynamic shared memory
  std::vector<uint8_t> initial;    // .global/.const initialiser, empty when none
  std::vector<std::pair<uint64_t, std::string>> addresses;  // of `initial`: offsets that hold the address of a variable
  bool external = false;
};

struct Param {
  std::string name;
  uint32_t offset, size, align;
};

struct Function {
  std::string name;
  bool entry = true;
  std::vector<Param> params;
  uint32_t param_bytes = 0;
  std::vector<std::unique_ptr<Decl>> registers;
  std::vector<Statement> body;
  std::map<std::string, Variable> shared, local;   // a name declared in an inner scope is followed by "@" and the scope
  uint32_t reqntid[3] = {0, 0, 0}, maxntid[3] = {0, 0, 0}, reqnctapercluster[3] = {0, 0, 0};
  uint32_t register_slots = 0;     // size of the register file that the declarations need
};

struct Module {
  std::string version, target;     // ".version 8.8", ".target sm_100a"
  std::vector<std::unique_ptr<Function>> functions;
  std::map<std::string, Variable> globals, constants, shared;  // module scope
  std::vector<std::string> declared;                           // functions without a body: vprintf
  std::map<int, std::string> files;                            // .file index -> path
  const Function& entry(const std::string& name) const;        // Error when there is none
};

std::unique_ptr<Module> parse(const std::string& text);  // Error with line and text on anything not understood

}  // namespace ptx
