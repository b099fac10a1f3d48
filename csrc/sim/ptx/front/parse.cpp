// PTX text to a Module: directives, scopes with registers and labels of their own, statements (PTX ISA 4 and 11).
#include <algorithm>
#include <cstring>
#include <set>

#include "front/scan.h"

namespace ptx {

namespace {

const std::map<std::string, Ty> kTypes = {
    {"pred", Ty::pred}, {"b8", Ty::b8},       {"u8", Ty::u8},      {"s8", Ty::s8},       {"b16", Ty::b16},
    {"u16", Ty::u16},   {"s16", Ty::s16},     {"f16", Ty::f16},    {"bf16", Ty::bf16},   {"b32", Ty::b32},
    {"u32", Ty::u32},   {"s32", Ty::s32},     {"f32", Ty::f32},    {"f16x2", Ty::f16x2}, {"bf16x2", Ty::bf16x2},
    {"b64", Ty::b64},   {"u64", Ty::u64},     {"s64", Ty::s64},    {"f64", Ty::f64},     {"f32x2", Ty::f32x2},
    {"b128", Ty::b128}, {"u16x2", Ty::u16x2}, {"s16x2", Ty::s16x2}};

struct Scope {
  int parent;
  std::map<std::string, const Decl*> registers;
  std::map<std::string, int> labels;
  std::map<std::string, std::string> variables;                  // name -> unique name
  std::map<std::string, std::vector<std::string>> target_lists;  // .branchtargets
};

class Parser {
 public:
  explicit Parser(const std::string& text) : scan_(text), module_(std::make_unique<Module>()) {}
  std::unique_ptr<Module> run();

 private:
  void directive(const std::string& name);
  void file();
  void section();
  void function(bool entry);
  void parameters(Function&);
  void performance(Function&, const std::string& name);
  Variable variable(const std::string& space);
  void initialise(Variable&, const std::string& text, Ty type);
  void initialise_list(Variable&, const std::string& text, Ty type, uint64_t& at);

  void body();
  void body_directive(const std::string& name);
  void location();
  void registers(const std::string& text);
  void statement();
  Operand operand(const std::string& text);
  Operand memory(const std::string& inner);
  Operand name(const std::string& text);
  const Decl* register_named(const std::string&) const;
  void resolve(Operand&, int scope, int line, const std::string& text);
  void resolve_labels();

  Scanner scan_;
  std::unique_ptr<Module> module_;
  Function* function_ = nullptr;
  std::vector<Scope> scopes_;
  std::vector<int> scope_of_;  // of each statement
  int scope_ = -1, file_ = 0, source_line_ = 0;
};

std::unique_ptr<Module> Parser::run() {
  bool external = false;
  while (!scan_.at_end()) {
    const std::string w = scan_.word();
    if (w == ".visible" || w == ".weak" || w == ".common") continue;
    if (w == ".extern") {
      external = true;
      continue;
    }
    if (w == ".version") module_->version = scan_.word();
    else if (w == ".target") {
      module_->target = scan_.word();
      while (scan_.take(',')) scan_.word();
    } else if (w == ".address_size") {
      const std::string bits = scan_.word();
      if (bits != "64") scan_.fail(".address_size " + bits + ": only 64 is supported");
    } else if (w == ".file") file();
    else if (w == ".section") section();
    else if (w == ".pragma") scan_.until(";");
    else if (w == ".entry") function(true);
    else if (w == ".func") function(false);
    else if (w == ".global" || w == ".const" || w == ".shared") {
      Variable v = variable(w);
      v.external = external;
      auto& where = w == ".global" ? module_->globals : w == ".const" ? module_->constants : module_->shared;
      where[v.name] = v;
    } else scan_.fail("unknown directive '" + (w.empty() ? std::string(1, scan_.peek()) : w) + "'");
    external = false;
  }
  return std::move(module_);
}

// .file N "path" [, timestamp, size]
void Parser::file() {
  const int index = std::stoi(scan_.word());
  module_->files[index] = scan_.quoted();
  scan_.rest_of_line();
}

// Debug data: nothing of it is executed.
void Parser::section() {
  scan_.word();
  scan_.expect('{', "to begin a section");
  while (!scan_.take('}')) {
    if (scan_.at_end()) scan_.fail("the text ends inside a .section");
    scan_.rest_of_line();
  }
}

// `.align N .type name[size] = value;` after the state space.
Variable Parser::variable(const std::string& space) {
  Variable v;
  Ty type = Ty::none;
  while (scan_.peek() == '.') {
    const std::string w = scan_.word();
    if (w == ".align") v.align = std::stoull(scan_.word());
    else if (w == ".attribute") {
      scan_.expect('(', "after .attribute");
      scan_.until(")");
    } else if ((type = type_named(w.substr(1))) == Ty::none)
      scan_.fail("unknown type '" + w + "' of a " + space + " variable");
  }
  if (type == Ty::none || type == Ty::pred) scan_.fail("a " + space + " variable without a type");
  const std::string rest = scan_.until(";");
  const size_t equals = rest.find('=');
  std::string declared = trim(rest.substr(0, equals));
  const uint64_t element = type == Ty::b8 || type == Ty::u8 || type == Ty::s8 ? 1 : bytes_of(type);
  v.align = std::max(v.align, element);
  v.size = element;
  const size_t bracket = declared.find('[');
  v.name = trim(declared.substr(0, bracket));
  for (size_t at = bracket; at != std::string::npos; at = declared.find('[', at + 1)) {
    const std::string n = trim(declared.substr(at + 1, declared.find(']', at) - at - 1));
    int64_t extent = 0;
    if (!n.empty() && !parse_integer(n, extent)) scan_.fail("array size '" + n + "'");
    v.size *= static_cast<uint64_t>(extent);
  }
  if (!is_identifier(v.name)) scan_.fail("'" + v.name + "' is no name of a variable");
  if (equals != std::string::npos) initialise(v, trim(rest.substr(equals + 1)), type);
  return v;
}

void Parser::initialise(Variable& v, const std::string& text, Ty type) {
  uint64_t at = 0;
  v.initial.assign(v.size, 0);
  initialise_list(v, text, type, at);
}

void Parser::initialise_list(Variable& v, const std::string& text, Ty type, uint64_t& at) {
  if (!text.empty() && text[0] == '{') {
    for (const std::string& part : split_top(text.substr(1, text.size() - 2), ',')) initialise_list(v, part, type, at);
    return;
  }
  const uint64_t bytes = type == Ty::b8 || type == Ty::u8 || type == Ty::s8 ? 1 : bytes_of(type);
  if (at + bytes > v.size && v.size != 0) scan_.fail("'" + v.name + "' has more initial values than elements");
  if (v.size == 0) v.initial.resize(at + bytes);  // name[] = {...}
  Operand value;
  if (!parse_literal(text, value)) {
    const bool generic = text.rfind("generic(", 0) == 0;
    v.addresses.emplace_back(at, generic ? trim(text.substr(8, text.size() - 9)) : text);
  } else {
    double number;
    if (value.literal == Ty::f64 && type == Ty::f32) {
      memcpy(&number, &value.bits, 8);
      const float narrow = static_cast<float>(number);
      value.bits = 0;
      memcpy(&value.bits, &narrow, 4);
    }
    memcpy(&v.initial[at], &value.bits, bytes);
  }
  at += bytes;
}

void Parser::function(bool entry) {
  auto f = std::make_unique<Function>();
  f->entry = entry;
  f->register_slots = 1;                  // slot 0 means "none"
  if (scan_.take('(')) scan_.until(")");  // return value of a .func
  f->name = scan_.word();
  function_ = f.get();
  scopes_.assign(1, Scope{-1, {}, {}, {}, {}});
  scope_of_.clear();
  scope_ = 0;
  if (scan_.take('(')) parameters(*f);
  while (scan_.peek() == '.') performance(*f, scan_.word());
  if (scan_.take(';')) {
    module_->declared.push_back(f->name);
    return;
  }
  scan_.expect('{', "to begin the body of a function");
  body();
  resolve_labels();
  module_->functions.push_back(std::move(f));
}

void Parser::parameters(Function& f) {
  const std::string text = scan_.until(")");
  for (const std::string& p : split_top(text, ',')) {
    Scanner s(p);
    Param out{"", f.param_bytes, 1, 1};
    Ty type = Ty::none;
    uint32_t align = 0;
    bool pointer = false;
    while (s.peek() == '.') {
      const std::string w = s.word();
      if (w == ".align") {
        const uint32_t n = static_cast<uint32_t>(std::stoul(s.word()));
        if (!pointer) align = n;
      } else if (w == ".ptr") pointer = true;  // what follows describes the memory pointed to
      else if (w == ".param" || w == ".reg" || w == ".global" || w == ".shared" || w == ".const" || w == ".local") {
      } else if ((type = type_named(w.substr(1))) == Ty::none)
        scan_.fail("unknown '" + w + "' in parameter '" + p + "'");
    }
    out.name = s.word();
    const uint32_t element = type == Ty::b8 || type == Ty::u8 || type == Ty::s8 ? 1 : bytes_of(type);
    if (out.name.empty() || element == 0) scan_.fail("parameter '" + p + "' has no name or no type");
    int64_t extent = 1;
    if (s.take('[') && !parse_integer(s.until("]"), extent)) scan_.fail("array size of parameter '" + p + "'");
    out.align = align != 0 ? align : element;
    out.size = element * static_cast<uint32_t>(extent);
    out.offset = (f.param_bytes + out.align - 1) / out.align * out.align;
    f.param_bytes = out.offset + out.size;
    f.params.push_back(out);
    scopes_[0].variables[out.name] = out.name;
  }
}

// PTX ISA 11.4 "Performance-Tuning Directives" and 11.7 "Cluster Dimension Directives".
void Parser::performance(Function& f, const std::string& name) {
  static const std::set<std::string> ignored = {".maxnreg", ".minnctapersm", ".maxnctapersm", ".maxclusterrank"};
  static const std::set<std::string> bare = {".noreturn", ".explicitcluster", ".blocksareclusters"};
  if (bare.count(name)) return;
  if (name == ".pragma") {
    scan_.until(";");
    return;
  }
  uint32_t* sizes = name == ".reqntid"             ? f.reqntid
                    : name == ".maxntid"           ? f.maxntid
                    : name == ".reqnctapercluster" ? f.reqnctapercluster
                                                   : nullptr;
  if (sizes == nullptr && !ignored.count(name)) scan_.fail("unknown directive '" + name + "' of a function");
  for (int i = 0; i < 3; i++) {
    int64_t n = 0;
    if (!parse_integer(scan_.word(), n)) scan_.fail("'" + name + "' without a number");
    if (sizes != nullptr) sizes[i] = static_cast<uint32_t>(n);
    if (!scan_.take(',')) break;
  }
  if (sizes != nullptr)
    for (int i = 1; i < 3; i++) sizes[i] = std::max(sizes[i], 1u);
}

void Parser::body() {
  for (int depth = 1; depth > 0;) {
    if (scan_.at_end()) scan_.fail("the text ends inside function '" + function_->name + "'");
    std::string label;
    if (scan_.take('{')) {
      scopes_.push_back(Scope{scope_, {}, {}, {}, {}});
      scope_ = static_cast<int>(scopes_.size()) - 1;
      depth++;
    } else if (scan_.take('}')) {
      scope_ = scopes_[scope_].parent;
      depth--;
    } else if (scan_.take(';')) {
      continue;
    } else if (scan_.take_label(label)) {
      const std::string directive = scan_.peek() == '.' ? scan_.word() : "";
      if (directive == ".branchtargets") {  // label: .branchtargets a, b;
        scopes_[scope_].target_lists[label] = split_top(scan_.until(";"), ',');
        continue;
      }
      if (!scopes_[scope_].labels.emplace(label, static_cast<int>(function_->body.size())).second)
        scan_.fail("label '" + label + "' is declared twice");
      if (!directive.empty()) body_directive(directive);
    } else if (scan_.peek() == '.') {
      body_directive(scan_.word());
    } else {
      statement();
    }
  }
}

void Parser::body_directive(const std::string& w) {
  if (w == ".loc") location();
  else if (w == ".pragma") scan_.until(";");
  else if (w == ".reg") registers(scan_.until(";"));
  else if (w == ".shared" || w == ".local" || w == ".param") {
    Variable v = variable(w);
    const std::string declared = v.name;
    if (scope_ != 0) v.name += "@" + std::to_string(scope_);
    scopes_[scope_].variables[declared] = v.name;
    (w == ".shared" ? function_->shared : function_->local)[v.name] = v;
  } else {
    scan_.fail("unknown directive '" + w + "' in a function");
  }
}

// .loc file line column [, function_name label, inlined_at file line column]
void Parser::location() {
  file_ = std::stoi(scan_.word());
  source_line_ = std::stoi(scan_.word());
  scan_.rest_of_line();
}

void Parser::registers(const std::string& text) {
  const size_t space = text.find_first_of(" \t\n");
  const Ty type = text.empty() || text[0] != '.' ? Ty::none : type_named(text.substr(1, space - 1));
  if (type == Ty::none || space == std::string::npos) scan_.fail("'.reg " + text + "': unknown type");
  const uint32_t slots = std::max(1u, bytes_of(type) / 4);
  auto declare = [&](const std::string& name) {
    if (!is_identifier(name)) scan_.fail("'" + name + "' is no name of a register");
    function_->registers.push_back(std::make_unique<Decl>(Decl{name, type, function_->register_slots}));
    function_->register_slots += slots;
    if (!scopes_[scope_].registers.emplace(name, function_->registers.back().get()).second)
      scan_.fail("register '" + name + "' is declared twice");
  };
  for (const std::string& name : split_top(text.substr(space), ',')) {
    const size_t angle = name.find('<');
    if (angle == std::string::npos) {
      declare(name);
      continue;
    }
    int64_t n = 0;
    if (name.back() != '>' || !parse_integer(name.substr(angle + 1, name.size() - angle - 2), n))
      scan_.fail("'.reg " + text + "': bad count");
    for (int64_t i = 0; i < n; i++) declare(name.substr(0, angle) + std::to_string(i));
  }
}

void Parser::statement() {
  Statement s;
  scan_.at_end();
  s.line = scan_.line();
  s.file = file_;
  s.source_line = source_line_;
  s.text = scan_.until(";");
  std::string rest = s.text;
  if (rest[0] == '@') {
    const size_t space = rest.find_first_of(" \t\n");
    std::string p = rest.substr(1, space - 1);
    s.guard_negated = !p.empty() && p[0] == '!';
    if (s.guard_negated) p.erase(0, 1);
    s.guard = register_named(p);
    if (s.guard == nullptr || s.guard->type != Ty::pred || space == std::string::npos)
      scan_.fail("'" + s.text + "': '" + p + "' is no predicate register");
    rest = trim(rest.substr(space));
  }
  const size_t end = std::min(rest.find_first_of(" \t\n"), rest.size());
  const std::string opcode = rest.substr(0, end);
  for (size_t begin = 0; begin <= opcode.size();) {
    const size_t dot = std::min(opcode.find('.', begin), opcode.size());
    s.parts.push_back(opcode.substr(begin, dot - begin));
    begin = dot + 1;
  }
  for (const std::string& o : split_top(rest.substr(end), ',')) {
    if (o.empty()) scan_.fail("'" + s.text + "': an empty operand");
    s.operands.push_back(operand(o));
  }
  function_->body.push_back(std::move(s));
  scope_of_.push_back(scope_);
}

Operand Parser::operand(const std::string& text) {
  Operand o;
  if (text == "_") return o;
  if (text[0] == '{' || text[0] == '(') {
    o.kind = Operand::vec;
    if (text.back() != (text[0] == '{' ? '}' : ')')) scan_.fail("'" + text + "' is not closed");
    for (const std::string& part : split_top(text.substr(1, text.size() - 2), ',')) o.parts.push_back(operand(part));
    return o;
  }
  if (text[0] == '[') {
    if (text.back() != ']') scan_.fail("'" + text + "' is not closed");
    return memory(text.substr(1, text.size() - 2));
  }
  if (text[0] == '!') {
    o = operand(trim(text.substr(1)));
    o.negated = true;
    return o;
  }
  const std::vector<std::string> pair = split_top(text, '|');
  if (pair.size() == 2 && !pair[0].empty() && !pair[1].empty()) {
    o.kind = Operand::pair;
    o.parts = {operand(pair[0]), operand(pair[1])};
    return o;
  }
  if (parse_literal(text, o)) return o;
  return name(text);
}

Operand Parser::memory(const std::string& inner) {
  Operand o;
  o.kind = Operand::memory;
  const std::vector<std::string> parts = split_top(inner, ',');
  if (parts.empty()) scan_.fail("an address without a base");
  std::string base = parts[0];
  // "%r1+-4" and "sym+8": the last '+' that a whole integer follows. "%r1-4" is not PTX, but cheap to read.
  const size_t plus = base.find_last_of('+');
  if (plus != std::string::npos && plus > 0) {
    if (!parse_integer(trim(base.substr(plus + 1)), o.offset)) scan_.fail("'[" + inner + "]': bad offset");
    base = trim(base.substr(0, plus));
  }
  o.parts.push_back(operand(base));
  for (size_t i = 1; i < parts.size(); i++) o.parts.push_back(operand(parts[i]));
  return o;
}

// A register, a special register, a variable, or a label still to be declared.
Operand Parser::name(const std::string& text) {
  Operand o;
  o.decl = register_named(text);
  if (o.decl != nullptr) {
    o.kind = Operand::reg;
    return o;
  }
  o.name = text;
  if (text[0] == '%' || text == "WARP_SZ") {
    o.kind = Operand::special;
    return o;
  }
  const size_t plus = text.find('+');
  if (plus != std::string::npos) {
    if (!parse_integer(trim(text.substr(plus + 1)), o.offset)) scan_.fail("operand '" + text + "' is not understood");
    o.name = trim(text.substr(0, plus));
  }
  if (!is_identifier(o.name)) scan_.fail("operand '" + text + "' is not understood");
  o.kind = Operand::label;  // until resolve() finds a variable of that name
  return o;
}

const Decl* Parser::register_named(const std::string& name) const {
  for (int s = scope_; s >= 0; s = scopes_[s].parent) {
    const auto found = scopes_[s].registers.find(name);
    if (found != scopes_[s].registers.end()) return found->second;
  }
  return nullptr;
}

void Parser::resolve(Operand& o, int scope, int line, const std::string& text) {
  for (Operand& part : o.parts) resolve(part, scope, line, text);
  if (o.kind != Operand::label) return;
  for (int s = scope; s >= 0; s = scopes_[s].parent) {
    const auto variable = scopes_[s].variables.find(o.name);
    if (variable != scopes_[s].variables.end()) {
      o.kind = Operand::symbol;
      o.name = variable->second;
      return;
    }
    const auto label = scopes_[s].labels.find(o.name);
    if (label != scopes_[s].labels.end()) {
      o.target = label->second;
      return;
    }
    const auto list = scopes_[s].target_lists.find(o.name);
    if (list != scopes_[s].target_lists.end()) {
      o.kind = Operand::vec;
      for (const std::string& name : list->second) {
        Operand part;
        part.kind = Operand::label;
        part.name = name;
        resolve(part, scope, line, text);
        o.parts.push_back(part);
      }
      return;
    }
  }
  const Module& m = *module_;
  const bool function = std::count(m.declared.begin(), m.declared.end(), o.name) != 0 ||
                        std::any_of(m.functions.begin(), m.functions.end(), [&](auto& f) { return f->name == o.name; });
  if (!m.globals.count(o.name) && !m.constants.count(o.name) && !m.shared.count(o.name) && !function)
    throw Error("line " + std::to_string(line) + ": unknown symbol '" + o.name + "' in '" + text + "'");
  o.kind = Operand::symbol;
}

void Parser::resolve_labels() {
  for (size_t i = 0; i < function_->body.size(); i++) {
    Statement& s = function_->body[i];
    for (Operand& o : s.operands) resolve(o, scope_of_[i], s.line, s.text);
  }
}

}  // namespace

Ty type_named(const std::string& name) {
  const auto found = kTypes.find(name);
  return found == kTypes.end() ? Ty::none : found->second;
}

unsigned bytes_of(Ty type) {
  switch (type) {
    case Ty::none:
    case Ty::pred: return 0;
    case Ty::b8:
    case Ty::u8:
    case Ty::s8:
    case Ty::b16:
    case Ty::u16:
    case Ty::s16:
    case Ty::f16:
    case Ty::bf16: return 2;
    case Ty::b64:
    case Ty::u64:
    case Ty::s64:
    case Ty::f64:
    case Ty::f32x2: return 8;
    case Ty::b128: return 16;
    default: return 4;
  }
}

const Function& Module::entry(const std::string& name) const {
  std::string known;
  for (const auto& f : functions) {
    if (f->name == name && f->entry) return *f;
    if (f->entry) known += " " + f->name;
  }
  throw Error("no kernel named '" + name + "'; the module has:" + known);
}

std::unique_ptr<Module> parse(const std::string& text) { return Parser(text).run(); }

}  // namespace ptx
