// Registers that asynchronous operations share with ordinary ones: what tcgen05.ld loads, what wgmma reads and writes.
//
// tcgen05.ld: PTX ISA 9.7.16.6.4.5. A register dependency gives the value, with or without tcgen05.wait::ld, and orders
// nothing else: "a register dependency does not imply that a dependee instruction's memory accesses will be performed
// before a dependent instruction's memory accesses". So to store what was loaded is right and says nothing of the load:
// the cells may be written anew, or deallocated, after tcgen05.wait::ld alone. Arithmetic, which is no memory access,
// is taken as the end of the load: FlashAttention-4's forward has no other, and runs on the hardware. Of the sources
// of tcgen05.st the ISA says nothing of the kind, and they leave the registers when it is issued.
// wgmma: 9.7.15.7. Accumulators may not be used, nor A registers written, before wgmma.wait_group; and between any use
// of either and the wgmma there has to be a wgmma.fence.
#include <algorithm>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "check/state.h"

namespace ptx {

namespace {
void collect(const Operand& o, std::vector<const Decl*>& into) {
  if (o.kind == Operand::reg && o.decl) into.push_back(o.decl);
  for (const Operand& part : o.parts) collect(part, into);
}

// Opcodes without a destination, as far as they can name such registers.
bool only_reads(const std::string& root) {
  return root == "st" || root == "red" || root == "cp" || root == "bra" || root == "tcgen05" || root == "bar" ||
         root == "barrier" || root == "mbarrier" || root == "prefetch" || root == "stmatrix";
}

void add(std::vector<uint16_t>& to, const std::vector<uint16_t>& ordinals) {
  for (uint16_t o : ordinals)
    if (std::find(to.begin(), to.end(), o) == to.end()) to.push_back(o);
}

bool is(const Statement& s, const char* root, const char* second) {
  return s.parts.size() > 1 && s.parts[0] == root && s.parts[1] == second;
}

// Opcodes that access memory.
bool of_memory(const std::string& root) {
  static const std::set<std::string> roots = {"ld",       "ldu",      "st",      "atom",     "red",
                                              "cp",       "stmatrix", "tcgen05", "multimem", "ldmatrix",
                                              "prefetch", "mbarrier"};
  return roots.count(root) != 0;
}

using Ordinals = std::unordered_map<const Decl*, std::vector<uint16_t>>;

// Copies hold what they copy, and are no uses of it.
void follow_copies(const Program& program, Ordinals& loaded) {
  for (bool more = !loaded.empty(); more;) {
    more = false;
    for (const Op& op : program.ops) {
      const Statement* s = op.from;
      if (!s || s->parts.empty() || s->parts[0] != "mov" || s->operands.size() != 2) continue;
      std::vector<const Decl*> to, of;
      collect(s->operands[0], to);
      collect(s->operands[1], of);
      for (const Decl* d : of) {
        const auto at = loaded.find(d);
        if (at == loaded.end()) continue;
        const std::vector<uint16_t> ordinals = at->second;
        for (const Decl* copy : to) {
          const size_t before = loaded[copy].size();
          add(loaded[copy], ordinals);
          more |= loaded[copy].size() != before;
        }
      }
    }
  }
}
}  // namespace

namespace {
// Opcodes that do nothing but compute their first operand.
bool only_computes(const std::string& root) {
  static const std::set<std::string> roots = {"mov", "cvt", "and", "or", "xor", "not", "shl", "shr", "shf", "prmt",
                                              "bfe", "bfi", "add", "sub", "mul", "mad", "fma", "neg", "min", "max",
                                              "selp", "lop3", "abs", "ex2"};
  return roots.count(root) != 0;
}

// Of every load into a vector the bytes whose register nothing depends on: the compiler asks for four where three are
// needed, and what memory holds in the fourth's place does not matter.
void find_unused(const Program& program, std::vector<uint32_t>& unused) {
  const size_t n = program.ops.size();
  unused.resize(n);
  std::unordered_set<const Decl*> used;
  for (size_t before = ~size_t{0}; before != used.size();) {
    before = used.size();
    for (size_t i = 0; i < n; i++) {
      const Statement* s = program.ops[i].from;
      if (!s || s->parts.empty()) continue;
      const std::string& root = s->parts[0];
      std::vector<const Decl*> results, sources;
      const bool gives = !s->operands.empty() && !only_reads(root) && s->operands[0].kind != Operand::memory;
      if (gives) collect(s->operands[0], results);
      for (size_t k = gives ? 1 : 0; k < s->operands.size(); k++) collect(s->operands[k], sources);
      const bool carries = std::find(s->parts.begin(), s->parts.end(), "cc") != s->parts.end();
      const bool idle = gives && only_computes(root) && !carries &&
                        std::none_of(results.begin(), results.end(), [&](const Decl* d) { return used.count(d); });
      if (!idle) used.insert(sources.begin(), sources.end());
      if (s->guard) used.insert(s->guard);
    }
  }
  for (size_t i = 0; i < n; i++) {
    const Statement* s = program.ops[i].from;
    if (!s || s->parts.empty() || s->parts[0] != "ld" || s->operands[0].kind != Operand::vec) continue;
    const std::vector<Operand>& to = s->operands[0].parts;
    const std::string& type = s->parts.back();
    const size_t each = type == "b8" || type == "u8" || type == "s8" ? 1 : bytes_of(type_named(type));
    for (size_t k = 0; k < to.size() && (k + 1) * each <= 32; k++)
      if (to[k].kind == Operand::sink || (to[k].kind == Operand::reg && used.count(to[k].decl) == 0))
        unused[i] |= static_cast<uint32_t>(((1ull << each) - 1) << k * each);
  }
}
}  // namespace

Registers checking::find_registers(const Program& program) {
  Registers r;
  find_unused(program, r.unused);
  Ordinals loaded, accumulated, multiplied;
  const size_t n = program.ops.size();
  r.uses.resize(n);
  r.loads.resize(n);
  r.products.resize(n);
  for (size_t i = 0; i < n; i++) {
    const Statement* s = program.ops[i].from;
    if (!s || s->parts.empty()) continue;
    std::vector<const Decl*> regs;
    if (s->parts[0] == "tcgen05" && s->parts.size() > 1 && s->parts[1].rfind("fence", 0) == 0) r.tensor_fences = true;
    if (is(*s, "tcgen05", "ld")) {
      r.loads[i] = static_cast<uint16_t>(r.load_statement.size());
      r.load_statement.push_back(static_cast<int>(i));
      collect(s->operands.at(0), regs);
      for (const Decl* d : regs) loaded[d].push_back(r.loads[i]);
    } else if (is(*s, "wgmma", "mma_async")) {
      r.products[i] = static_cast<uint16_t>(r.product_statement.size());
      r.product_statement.push_back(static_cast<int>(i));
      collect(s->operands.at(0), regs);
      for (const Decl* d : regs) accumulated[d].push_back(r.products[i]);
      regs.clear();
      if (s->operands.at(1).kind == Operand::vec) collect(s->operands[1], regs);
      for (const Decl* d : regs) multiplied[d].push_back(r.products[i]);
    }
  }
  if (loaded.empty() && accumulated.empty()) return r;
  follow_copies(program, loaded);
  for (size_t i = 0; i < n; i++) {
    const Statement* s = program.ops[i].from;
    if (!s || s->parts.empty() || is(*s, "wgmma", "mma_async")) continue;
    Registers::Use& use = r.uses[i];
    // Copies and constants of loop variables, which the compiler's PTX moves past a fence, are no uses: the assembler
    // keeps accumulators in place.
    const bool copy = s->parts[0] == "mov" && s->operands.size() == 2 && s->operands[0].kind == Operand::reg &&
                      (s->operands[1].kind == Operand::reg || s->operands[1].kind == Operand::imm);
    for (size_t k = 0; k < s->operands.size(); k++) {
      const bool writes = k == 0 && !only_reads(s->parts[0]) && s->operands[k].kind != Operand::memory;
      std::vector<const Decl*> regs;
      collect(s->operands[k], regs);
      for (const Decl* d : regs) {
        if (auto at = loaded.find(d); at != loaded.end() && !writes && s->parts[0] != "mov")
          add(of_memory(s->parts[0]) ? use.stored : use.loads, at->second);
        if (copy) continue;
        if (auto at = accumulated.find(d); at != accumulated.end()) {
          add(use.pending, at->second);
          add(use.unfenced, at->second);
        }
        if (auto at = multiplied.find(d); at != multiplied.end()) {
          if (writes) add(use.pending, at->second);
          add(use.unfenced, at->second);
        }
      }
    }
  }
  return r;
}

void Checker::touch(const Context& c) {
  WarpState& w = warp_state(c);
  const Registers::Use& use = state_->registers.uses[static_cast<size_t>(c.op->index)];
  if (w.any_loading && state_->raises(Finding::registers_loading))
    for (const auto* loads : {&use.loads, &use.stored})
      for (uint16_t load : *loads)
        if (w.loading[load] != 0)
          state_->report(Finding::registers_loading, Space::shared, actor_of(c), nullptr,
                         epoch(w.loads.agent, w.loading[load], state_->registers.load_statement[load]), 0);
  if (w.any_loading)
    for (uint16_t load : use.loads)
      if (w.loading[load] != 0) {  // a true dependency: the load is over, for this warp
        for (View& v : w.views) {
          uint32_t& seen = v.clock.of(w.loads.local).at[kOrder];
          if (seen >= w.loading[load]) continue;
          seen = w.loading[load];
          v.snapshot.reset();
        }
        w.loading[load] = 0;
      }
  if (w.any_multiplying)
    for (uint16_t product : use.pending)
      if (w.multiplying[product] != 0) {
        const Epoch earlier = epoch(w.agent, 0, state_->registers.product_statement[product]);
        state_->report(Finding::registers_pending, Space::shared, actor_of(c), nullptr, earlier, 0);
      }
  for (uint16_t product : use.unfenced) w.touched[product] = 1;
}

void Checker::begin_product(const Context& c, WarpState& w, uint32_t number) {
  const Registers& r = state_->registers;
  if (r.product_statement.empty() || !is(*c.op->from, "wgmma", "mma_async")) return;
  const uint16_t product = r.products[static_cast<size_t>(c.op->index)];
  if (w.touched[product]) state_->report(Finding::registers_unfenced, Space::shared, actor_of(c), nullptr, 0, 0);
  w.multiplying[product] = number;
  w.any_multiplying = true;
}

void Checker::wgmma_fence(const Context& c) {
  WarpState& w = warp_state(c);
  std::fill(w.touched.begin(), w.touched.end(), 0);
}

// PTX ISA 9.7.19.5: all warps of a warpgroup execute the same setmaxnreg, and "must synchronize explicitly before
// executing subsequent setmaxnreg instructions".
void Checker::change_registers(const Context& c) {
  WarpState& w = warp_state(c);
  const size_t done = w.register_changes.size();
  Clock room;
  const Clock& known = together(w, room);
  const uint32_t first = w.id / 4 * 4;
  for (uint32_t i = first; done > 0 && i < first + 4 && i < c.cta.warps.size(); i++) {
    const WarpState& other = *c.cta.warps[i]->checked;
    if (&other == &w) continue;
    const auto& changes = other.register_changes;
    if (changes.size() >= done) {
      const WarpState::Change& before = changes[done - 1];
      if (known.knows(state_->agents[other.agent], epoch(other.agent, before.clock, before.op->index))) continue;
    }
    state_->report(Finding::setmaxnreg_unordered, Space::shared, actor_of(c), nullptr, 0, 0,
                   "\n    warp " + std::to_string(i) + " of its warpgroup may not have executed the one before it");
    break;
  }
  w.register_changes.push_back({c.op, w.now});
}

void Checker::registers_changed(const Cta& cta) {
  for (size_t first = 0; first < cta.warps.size(); first += 4) {
    const size_t end = std::min(first + 4, cta.warps.size());
    const WarpState* most = cta.warps[first]->checked;
    for (size_t i = first; i < end; i++)
      if (cta.warps[i]->checked->register_changes.size() > most->register_changes.size()) most = cta.warps[i]->checked;
    for (size_t i = first; i < end; i++) {
      const size_t done = cta.warps[i]->checked->register_changes.size();
      if (done == most->register_changes.size()) continue;
      const Actor actor{most->register_changes[done].op, {cta.index[0], cta.index[1], cta.index[2]}, most->id};
      state_->report(Finding::setmaxnreg, Space::shared, actor, nullptr, 0, 0,
                     "\n    warp " + std::to_string(i) + " of its warpgroup does not");
    }
  }
}

}  // namespace ptx
