// Branches and exits, printf, and what only hardware feels (PTX ISA 9.7.12, 9.7.13.13, 9.7.19).
#include <cinttypes>

#include "check/check.h"
#include "machine/lanes.h"

namespace ptx {

namespace {

// The lanes in `taken` go to `target`, the others to the next instruction.
void split(Context& c, Mask taken, uint32_t target) {
  Fragment& f = c.fragment;
  if (taken == f.lanes) {
    f.pc = target;
    return;
  }
  Fragment away{target, taken, false, {}, 0};
  f.lanes &= ~taken;
  f.pc++;
  c.warp.fragments.push_back(away);
}

Step branch(Context& c, const Op& op) {
  split(c, c.mask, op.target);
  return Step::jumped;
}

Step branch_indexed(Context& c, const Op& op) {
  const uint32_t* index = c.warp.v32(op.s[0]).x;
  const Mask all = c.mask;
  for (Mask left = all; left != 0;) {
    const uint32_t i = index[__builtin_ctz(left)];
    Mask same = 0;
    for (Mask m = left; m != 0; m &= m - 1)
      if (index[__builtin_ctz(m)] == i) same |= m & -m;
    if (i >= op.list.size())
      c.fail("branch index " + std::to_string(i) + " of " + std::to_string(op.list.size()) + " targets");
    left &= ~same;
    split(c, same, op.list[i]);
  }
  return Step::jumped;
}

Step leave(Context& c, const Op&) {
  c.warp.live &= ~c.mask;
  c.fragment.lanes &= ~c.mask;
  return Step::exited;
}

Step trap(Context& c, const Op&) { c.fail("the kernel trapped"); }

Step nothing(Context&, const Op&) { return Step::next; }

// --- vprintf(format, arguments): both generic pointers; the arguments as a C compiler lays them out for a variadic
// call.

struct Call {
  std::string name;
  std::vector<std::string> parameters;  // unique names of the .param variables passed
  std::string result;
};

uint8_t* generic(const Context& c, uint64_t address, uint64_t bytes, unsigned lane) {
  const Place p = place_generic(c, address);
  if (p.space == Place::shared) return shared_bytes(c, static_cast<uint32_t>(address), static_cast<uint32_t>(bytes), 1);
  if (p.space == Place::global) return c.launch.global(c, address, bytes, false);
  const uint32_t size = c.launch.program->local_bytes;
  const uint64_t offset = address & (kGenericLocal - 1);
  if (offset + bytes > size) c.fail("a local address beyond the lane's memory");
  return c.warp.local.data() + static_cast<uint64_t>(lane) * size + offset;
}

std::string c_string(const Context& c, uint64_t address, unsigned lane) {
  std::string out;
  while (const char ch = static_cast<char>(*generic(c, address + out.size(), 1, lane))) out += ch;
  return out;
}

// One conversion of a format, with the argument at `at`; moves `at` behind it.
std::string convert_argument(const Context& c, std::string spec, uint64_t arguments, uint64_t& at, unsigned lane) {
  const char kind = spec.back();
  const bool wide =
      spec.find('l') != std::string::npos || strchr("sp", kind) != nullptr || strchr("fFeEgGaA", kind) != nullptr;
  const unsigned bytes = wide ? 8 : 4;
  at = (at + bytes - 1) / bytes * bytes;
  uint64_t raw = 0;
  std::memcpy(&raw, generic(c, arguments + at, bytes, lane), bytes);
  at += bytes;
  if (kind == 's') return c_string(c, raw, lane);
  char text[512];
  if (strchr("fFeEgGaA", kind) != nullptr) {
    snprintf(text, sizeof text, spec.c_str(), bit_cast<double>(raw));
    return text;
  }
  if (kind == 'c') return std::string(1, static_cast<char>(raw));
  std::string flags;
  for (char ch : spec)
    if (strchr("lhjzt", ch) == nullptr) flags += ch;
  if (kind == 'p') {
    snprintf(text, sizeof text, "0x%" PRIx64, raw);
    return text;
  }
  if (!wide && (kind == 'd' || kind == 'i'))
    raw = static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(raw)));
  flags.insert(flags.size() - 1, "ll");
  snprintf(text, sizeof text, flags.c_str(), static_cast<unsigned long long>(raw));
  return text;
}

std::string formatted(const Context& c, uint64_t format, uint64_t arguments, unsigned lane) {
  const std::string f = c_string(c, format, lane);
  std::string out;
  uint64_t at = 0;
  for (size_t i = 0; i < f.size(); i++) {
    if (f[i] != '%' || i + 1 == f.size()) {
      out += f[i];
      continue;
    }
    if (f[i + 1] == '%') {
      out += '%';
      i++;
      continue;
    }
    const size_t end = f.find_first_of("diouxXfFeEgGaAcsp", i + 1);
    if (end == std::string::npos) c.fail("printf format '" + f + "'");
    out += convert_argument(c, f.substr(i, end - i + 1), arguments, at, lane);
    i = end;
  }
  return out;
}

uint64_t parameter(const Context& c, const std::string& name, unsigned lane) {
  const Program& p = *c.launch.program;
  uint64_t value = 0;
  const uint64_t size = p.function->local.at(name).size;
  std::memcpy(&value, &c.warp.local[static_cast<uint64_t>(lane) * p.local_bytes + p.symbols.at(name)],
              std::min<uint64_t>(size, 8));
  return value;
}

Step call(Context& c, const Op& op) {
  const Call& f = *static_cast<const Call*>(op.extra.get());
  if (f.name != "vprintf") c.fail("the kernel called " + f.name);  // __assertfail
  for (Mask left = c.mask; left != 0; left &= left - 1) {
    const unsigned lane = static_cast<unsigned>(__builtin_ctz(left));
    const std::string text =
        formatted(c, parameter(c, f.parameters[0], lane), parameter(c, f.parameters[1], lane), lane);
    std::lock_guard<std::mutex> lock(c.launch.result_lock);
    c.launch.printed.push_back(text);
  }
  return Step::next;
}

void decode_call(Decoder& d, Op& op) {
  Modifiers m(d.from);
  m.take("uni");
  m.done();
  auto f = std::make_shared<Call>();
  size_t at = 0;
  if (d.operand(0).kind == Operand::vec) f->result = d.operand(at++).parts.at(0).name;
  f->name = d.operand(at).name;
  if (f->name != "vprintf" && f->name != "__assertfail") d.fail("only vprintf and __assertfail can be called");
  if (d.from.operands.size() > at + 1)
    for (const Operand& o : d.operand(at + 1).parts) {
      if (home_of(d.program, o.name) != Home::local) d.fail("the parameters of a call are .param variables");
      f->parameters.push_back(o.name);
    }
  if (f->name == "vprintf" && f->parameters.size() != 2) d.fail("vprintf takes a format and its arguments");
  op.extra = f;
  op.run = call;
}

void decode_branch(Decoder& d, Op& op, bool indexed) {
  Modifiers m(d.from);
  m.take("uni");
  if (indexed) m.take_one({"idx"});
  m.done();
  d.count(indexed ? 2 : 1, indexed ? 2 : 1);
  if (!indexed) {
    if (d.operand(0).kind != Operand::label) d.fail("a label is expected");
    op.target = static_cast<uint32_t>(d.operand(0).target);
    op.run = branch;
    return;
  }
  op.s[0] = d.source(d.operand(0), 4);
  if (d.operand(1).kind != Operand::vec) d.fail("a label of .branchtargets is expected");
  for (const Operand& o : d.operand(1).parts) op.list.push_back(static_cast<Slot>(o.target));
  op.run = branch_indexed;
}

// PTX ISA 9.7.19.5: .dec gives registers back to the CTA's pool, .inc waits until there are enough in it. The pool is
// taken to be what all threads of the CTA could have at most. How many a thread begins with is the assembler's choice,
// so only after a first setmaxnreg is it known whether another one goes the way that it says.
Step change_registers(Context& c, const Op& op) {
  Warp& w = c.warp;
  uint32_t others = 0, threads = 0;
  for (const auto& one : c.cta.warps) {
    threads += kLanes;
    if (one.get() != &w && one->live != 0) others += one->registers * kLanes;
  }
  const uint32_t pool = registers_at_launch(threads) * threads;
  if (others + op.target * kLanes > pool) {
    c.fragment.why = {"setmaxnreg to %llu: the other warps hold %llu registers of the CTA's %llu",
                      {op.target, others, pool, 0}};
    return Step::blocked;
  }
  const bool more = op.mode != 0;
  if (w.registers_changed && (more ? op.target < w.registers : op.target > w.registers))
    c.fail(std::string("setmaxnreg.") + (more ? "inc" : "dec") + " to " + std::to_string(op.target) +
           " by a warp whose threads have " + std::to_string(w.registers) + " registers");
  if (c.check != nullptr) c.check->change_registers(c);
  w.registers = op.target;
  w.registers_changed = true;
  return Step::next;
}

void decode_setmaxnreg(Decoder& d, Op& op) {
  Modifiers m(d.from);
  op.mode = m.take_one({"inc", "dec"}) == "inc";
  m.take_one({"sync"});
  m.take_one({"aligned"});
  m.take_one({"u32"});
  m.done();
  d.count(1, 1);
  const Operand& o = d.operand(0);
  if (o.kind != Operand::imm || o.bits < 24 || o.bits > 256 || o.bits % 8 != 0)
    d.fail("the count is a multiple of 8 from 24 to 256");
  op.collective = true;
  op.target = static_cast<uint32_t>(o.bits);
  op.run = change_registers;
}

}  // namespace

void decode_control(Decoder& d, Op& op) {
  const std::string& root = d.from.parts[0];
  op.kind = Class::control;
  if (root == "bra" || root == "brx") return decode_branch(d, op, root == "brx");
  if (root == "call") return decode_call(d, op);
  if (root == "setmaxnreg") return decode_setmaxnreg(d, op);
  Modifiers m(d.from);
  if (root == "ret") m.take("uni");
  if (root == "nanosleep") {
    m.take_one({"u32"});
    d.count(1, 1);
    op.s[0] = d.source(d.operand(0), 4);
  } else if (root == "pmevent") {
    m.take("mask");
    d.count(1, 1);
  } else {
    if (root == "griddepcontrol") m.take_one({"launch_dependents", "wait"});  // grids run one after another here
    d.count(0, 0);
  }
  m.done();
  op.run = root == "ret" || root == "exit" ? leave : root == "trap" || root == "brkpt" ? trap : nothing;
}

}  // namespace ptx
