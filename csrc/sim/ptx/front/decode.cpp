#include "front/decode.h"

#include <algorithm>

#include "machine/target.h"

namespace ptx {

namespace {

[[noreturn]] void complain(const Statement& s, const std::string& what) {
  throw Error("line " + std::to_string(s.line) + ": '" + s.text + "': " + what);
}

uint64_t literal_bits(const Operand& o, unsigned bytes) {
  uint64_t bits = o.bits;
  if (o.literal == Ty::f64 && bytes == 4) {  // decimal literals and 0d.. are doubles; PTX ISA 4.5.2
    double wide;
    std::memcpy(&wide, &bits, 8);
    const float narrow = static_cast<float>(wide);
    bits = 0;
    std::memcpy(&bits, &narrow, 4);
  } else if (o.literal == Ty::f32 && bytes == 8) {
    float narrow;
    std::memcpy(&narrow, &bits, 4);
    const double wide = narrow;
    std::memcpy(&bits, &wide, 8);
  }
  return bytes >= 8 ? bits : bits & ((1ull << (bytes * 8)) - 1);
}

bool same(const Preset& a, const Preset& b) {
  return a.kind == b.kind && a.bits == b.bits && a.name == b.name && a.bytes == b.bytes;
}

Slot preset(Program& p, Preset wanted) {
  for (const Preset& known : p.presets)
    if (same(known, wanted)) return known.slot;
  wanted.slot = p.slots;
  p.slots += wanted.kind == Preset::scratch ? 4 : wanted.bytes == 8 ? 2 : 1;
  p.presets.push_back(wanted);
  return wanted.slot;
}

const Variable* find(const std::map<std::string, Variable>& in, const std::string& name) {
  const auto found = in.find(name);
  return found == in.end() ? nullptr : &found->second;
}

uint32_t align_up(uint64_t value, uint64_t align) { return static_cast<uint32_t>((value + align - 1) / align * align); }

// Shared and local memory: offsets for every variable; dynamic shared memory follows the static part.
void lay_out(Program& p) {
  const Module& m = *p.module;
  const Function& f = *p.function;
  uint64_t at = kSharedBase, dynamic_align = 16;
  for (const auto* variables : {&m.shared, &f.shared})
    for (const auto& [name, v] : *variables) {
      if (v.size == 0) {
        dynamic_align = std::max(dynamic_align, v.align);
        continue;
      }
      at = align_up(at, v.align);
      p.symbols[name] = at;
      at += v.size;
    }
  p.static_shared = static_cast<uint32_t>(at - kSharedBase);
  p.dynamic_base = align_up(at, dynamic_align);
  for (const auto* variables : {&m.shared, &f.shared})
    for (const auto& [name, v] : *variables)
      if (v.size == 0) p.symbols[name] = p.dynamic_base;
  uint64_t local = 0;
  for (const auto& [name, v] : f.local) {
    local = align_up(local, v.align);
    p.symbols[name] = local;
    local += v.size;
  }
  p.local_bytes = align_up(local, 16);
}

// Module variables live as long as the program, as they do in a loaded module.
void store_globals(Program& p) {
  constexpr uint64_t kAlign = 256;
  for (const auto* variables : {&p.module->globals, &p.module->constants})
    for (const auto& [name, v] : *variables) {
      if (v.external) throw Error("variable '" + name + "' is .extern: its module is not here");
      auto& storage = p.globals[name];
      storage.assign(v.size + kAlign, 0);
      uint64_t address = reinterpret_cast<uint64_t>(storage.data());
      address = (address + kAlign - 1) / kAlign * kAlign;
      if (!v.initial.empty()) std::memcpy(reinterpret_cast<void*>(address), v.initial.data(), v.initial.size());
      p.symbols[name] = address;
    }
  for (const auto* variables : {&p.module->globals, &p.module->constants})
    for (const auto& [name, v] : *variables)
      for (const auto& [at, target] : v.addresses) {
        const size_t plus = target.find('+');
        const auto symbol = p.symbols.find(target.substr(0, plus));
        if (symbol == p.symbols.end()) throw Error("initialiser of '" + name + "': unknown symbol '" + target + "'");
        const uint64_t address =
            symbol->second + (plus == std::string::npos ? 0 : std::stoull(target.substr(plus + 1)));
        std::memcpy(reinterpret_cast<void*>(p.symbols[name] + at), &address, 8);
      }
}

}  // namespace

Home home_of(const Program& p, const std::string& name) {
  if (find(p.function->local, name)) return Home::local;
  if (find(p.function->shared, name) || find(p.module->shared, name)) return Home::shared;
  for (const Param& param : p.function->params)
    if (param.name == name) return Home::param;
  if (find(p.module->constants, name)) return Home::constant;
  return find(p.module->globals, name) ? Home::global : Home::none;
}

std::shared_ptr<Program> decode(std::shared_ptr<const Module> module, const std::string& kernel) {
  auto p = std::make_shared<Program>();
  p->module = module;
  p->function = &module->entry(kernel);
  p->slots = p->function->register_slots;
  lay_out(*p);
  store_globals(*p);
  const auto& body = p->function->body;
  p->ops.resize(body.size());
  for (size_t i = 0; i < body.size(); i++) {
    const Statement& s = body[i];
    Op& op = p->ops[i];
    op.from = &s;
    op.index = static_cast<int>(i);
    if (s.guard != nullptr) {
      op.guard = s.guard->slot;
      op.guard_negated = s.guard_negated;
    }
    const std::string& root = s.parts[0];
    op.effect = root == "st" || root == "red" || root == "cp";
    Unit unit = unit_of(root);
    if (unit == nullptr) complain(s, "unknown opcode '" + root + "'");
    if (!is_known(s, p->module->target)) complain(s, "is not supported on .target '" + p->module->target + "'");
    Decoder d(*p, s);
    unit(d, op);
    if (op.run == nullptr) complain(s, "no handler was chosen");
  }
  return p;
}

Modifiers::Modifiers(const Statement& s) : from_(s), left_(s.parts.begin() + 1, s.parts.end()) {}

bool Modifiers::take(const char* name) {
  const auto found = std::find(left_.begin(), left_.end(), name);
  if (found == left_.end()) return false;
  left_.erase(found);
  return true;
}

std::string Modifiers::take_one(std::initializer_list<const char*> names) {
  const std::string found = take_optional(names, "");
  if (!found.empty()) return found;
  std::string all;
  for (const char* n : names) all += std::string(" .") + n;
  complain(from_, "one of" + all + " is missing");
}

std::string Modifiers::take_optional(std::initializer_list<const char*> names, const char* otherwise) {
  for (const char* n : names)
    if (take(n)) return n;
  return otherwise;
}

std::string Modifiers::take_prefix(const char* prefix) {
  const std::string p = prefix;
  for (auto it = left_.begin(); it != left_.end(); ++it)
    if (it->compare(0, p.size(), p) == 0) {
      const std::string rest = it->substr(p.size());
      left_.erase(it);
      return rest;
    }
  return "";
}

Ty Modifiers::take_type() {
  for (auto it = left_.begin(); it != left_.end(); ++it) {
    const Ty type = type_named(*it);
    if (type == Ty::none) continue;
    left_.erase(it);
    return type;
  }
  complain(from_, "a type is missing");
}

void Modifiers::done() const {
  if (!left_.empty()) complain(from_, "modifier '." + left_.front() + "' is not supported here");
}

Decoder::Decoder(Program& p, const Statement& s) : from(s), program(p) {}

void Decoder::fail(const std::string& what) const { complain(from, what); }

const Operand& Decoder::operand(size_t i) const {
  if (i >= from.operands.size())
    fail("operand " + std::to_string(i + 1) + " is missing, there are " + std::to_string(from.operands.size()));
  return from.operands[i];
}

void Decoder::count(size_t least, size_t most) const {
  const size_t n = from.operands.size();
  if (n < least || n > most)
    fail(std::to_string(n) + " operands, expected " + std::to_string(least) +
         (most > least ? " to " + std::to_string(most) : ""));
}

void Decoder::not_for_a_family(const std::string& feature) const {
  const std::string& target = program.module->target;
  if (!target.empty() && target.back() == 'f')
    fail("'" + feature + "' is not supported on .target '" + target + "', only on one GPU's own, such as sm_100a");
}

Slot Decoder::constant(uint64_t bits, unsigned bytes) {
  return preset(program, Preset{Preset::constant, bits, "", bytes == 8 ? 8u : 4u});
}

unsigned Decoder::width(const Operand& o) const {
  if (o.kind != Operand::reg) fail("a register is expected");
  const unsigned bytes = bytes_of(o.decl->type);
  return bytes == 2 ? 4 : bytes;
}

static void check_width(const Decoder& d, const Operand& o, unsigned bytes, bool any_width) {
  const unsigned have = bytes_of(o.decl->type);
  const bool fits = bytes == 4 ? have == 2 || have == 4 : have == bytes;
  if (have == 0) d.fail("'" + o.decl->name + "' is a predicate");
  if (!fits && !any_width)
    d.fail("'" + o.decl->name + "' has " + std::to_string(have * 8) + " bits, " + std::to_string(bytes * 8) +
           " are expected");
}

Slot Decoder::source(const Operand& o, unsigned bytes, bool any_width) {
  switch (o.kind) {
    case Operand::reg:
      check_width(*this, o, bytes, any_width);
      if (o.negated) fail("'!' is for predicates");
      return o.decl->slot;
    case Operand::imm:
      if (bytes == 16) fail("an immediate of 128 bits");
      return constant(literal_bits(o, bytes), bytes);
    case Operand::special:
      if (o.name == "WARP_SZ") return constant(kLanes, bytes);
      if (!special_known(o.name)) fail("unknown special register '" + o.name + "', or one that only mov reads");
      return preset(program, Preset{Preset::special, 0, o.name, bytes == 8 ? 8u : 4u});
    case Operand::symbol:
      if (home_of(program, o.name) == Home::none) fail("'" + o.name + "' has no address");
      return preset(program, Preset{Preset::symbol, static_cast<uint64_t>(o.offset), o.name, bytes == 8 ? 8u : 4u});
    default: fail("a value is expected here");
  }
}

Slot Decoder::predicate(const Operand& o, bool& negated) {
  negated = o.negated;
  if (o.kind == Operand::imm) return preset(program, Preset{Preset::predicate, o.bits != 0, ""});
  if (o.kind != Operand::reg || o.decl->type != Ty::pred) fail("a predicate is expected here");
  return o.decl->slot;
}

Slot Decoder::destination(const Operand& o, unsigned bytes, bool any_width) {
  if (o.kind == Operand::sink)  // written, never read
    return preset(program, Preset{Preset::scratch, 0, ""});
  if (o.kind != Operand::reg) fail("a register is expected as the destination");
  if (bytes == 0 && o.decl->type != Ty::pred) fail("'" + o.decl->name + "' is no predicate");
  if (bytes != 0) check_width(*this, o, bytes, any_width);
  return o.decl->slot;
}

std::vector<Slot> Decoder::sources(const Operand& o, unsigned bytes) {
  if (o.kind != Operand::vec) return {source(o, bytes)};
  std::vector<Slot> out;
  for (const Operand& part : o.parts) out.push_back(source(part, bytes));
  return out;
}

std::vector<Slot> Decoder::destinations(const Operand& o, unsigned bytes) {
  if (o.kind != Operand::vec) return {destination(o, bytes)};
  std::vector<Slot> out;
  for (const Operand& part : o.parts) out.push_back(destination(part, bytes));
  return out;
}

Slot Decoder::address(const Operand& o, Op& op, unsigned& bytes) {
  if (o.kind != Operand::memory) fail("an address in brackets is expected");
  op.offset = o.offset;
  const Operand& base = o.parts[0];
  if (base.kind == Operand::reg) {
    bytes = bytes_of(base.decl->type);
    if (bytes != 4 && bytes != 8) fail("'" + base.decl->name + "' cannot hold an address");
    return source(base, bytes);
  }
  const bool shared = base.kind == Operand::symbol && home_of(program, base.name) == Home::shared;
  bytes = shared ? 4 : 8;
  return source(base, bytes);
}

}  // namespace ptx
