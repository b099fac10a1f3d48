// What the checker says: one report for each kind of finding and pair of instructions, with how often it was seen.
#include <cstdio>

#include "check/state.h"

namespace ptx {

namespace {
constexpr size_t kMostReports = 500;  // of different pairs; a broken kernel can have very many

// In the order of Finding.
constexpr const char* kNames[kFindings] = {
    "read_after_write", "write_after_read", "write_after_write", "proxy_fence", "map_fence", "uninitialised", "exited",
    "in_flight", "barrier_init", "barrier_visible", "registers_unfenced", "registers_pending", "barrier_overwritten",
    "not_started", "not_constant", "setmaxnreg", "setmaxnreg_unordered", "barrier_read", "foreign_lanes", "same_value",
    "operand_uninitialised", "tensor_fence", "lingering", "registers_loading"};

const char* headline(Finding f) {
  switch (f) {
    case Finding::read_after_write: return "data race (read after write)";
    case Finding::write_after_read: return "data race (write after read)";
    case Finding::write_after_write: return "data race (write after write)";
    case Finding::proxy_fence:
      return "missing fence.proxy.async: a write through the generic proxy met by the async proxy";
    case Finding::map_fence: return "missing fence.proxy.tensormap: a tensor map was changed and then used";
    case Finding::uninitialised: return "read of uninitialised memory";
    case Finding::exited: return "access to the memory of a CTA that has exited";
    case Finding::in_flight: return "a CTA exits before this access to its memory is known to be over";
    case Finding::barrier_init: return "use of an mbarrier that is not ordered after its mbarrier.init";
    case Finding::barrier_visible: return "missing fence.mbarrier_init or fence.proxy.async after mbarrier.init";
    case Finding::registers_unfenced:
      return "missing wgmma.fence: registers of this wgmma were used since the last one";
    case Finding::registers_pending: return "missing wgmma.wait_group: registers of a pending wgmma are used";
    case Finding::barrier_overwritten: return "write over an mbarrier that is in use";
    case Finding::not_started: return "access to the memory of a CTA that is not known to have started";
    case Finding::not_constant: return "ld.global.nc of data that the kernel has written";
    case Finding::setmaxnreg: return "setmaxnreg by a part of a warpgroup";
    case Finding::setmaxnreg_unordered:
      return "two setmaxnreg between which the warps of a warpgroup do not synchronise";
    case Finding::barrier_read: return "read of an mbarrier that is in use, as if it were data";
    case Finding::registers_loading: return "missing tcgen05.wait::ld: registers of a pending tcgen05.ld are used";
    case Finding::foreign_lanes:
      return "tcgen05.ld or .st in lanes of another warp (PTX ISA 9.7.16.8.1: \"a lane of the Tensor Memory can be "
             "accessed by a single warp in the warpgroup\")";
    case Finding::same_value: return "data race that writes the value that is there";
    case Finding::operand_uninitialised: return "the tensor cores read uninitialised memory";
    case Finding::lingering:
      return "a CTA exits before this arrival, or this read by a bulk store, is known to be over";
    case Finding::tensor_fence: return "not ordered by tcgen05.fence::before_thread_sync and ::after_thread_sync";
  }
  return "";
}

std::string number(const char* format, unsigned long long v) {
  char text[64];
  std::snprintf(text, sizeof text, format, v);
  return text;
}

std::string coordinates(const uint32_t* i) {
  return "(" + std::to_string(i[0]) + "," + std::to_string(i[1]) + "," + std::to_string(i[2]) + ")";
}

std::string where(const Launch& launch, Space space, const CtaState* owner, uint64_t at) {
  std::string of = owner ? " of CTA " + coordinates(owner->index) : "";
  if (space == Space::shared) return "shared memory" + of + (at ? number(" at offset %#llx", at) : "");
  if (space == Space::tensor)
    return "tensor memory" + of + number(" at lane %llu", at / kTmemColumns) +
           number(", column %llu", at % kTmemColumns);
  for (const Range& r : launch.ranges)
    if (r.begin <= at && at < r.end) return number("global memory at byte %llu of ", at - r.begin) + r.name;
  return number("global memory at %#llx", at);
}

std::string quote(const Launch& launch, const Op* op) {
  if (!op || !op->from) return "";
  const Statement& s = *op->from;
  std::string text = "line " + std::to_string(s.line) + ": " + s.text.substr(0, 200);
  auto file = launch.program->module->files.find(s.file);
  if (s.source_line > 0 && file != launch.program->module->files.end())
    text += " [" + file->second + ":" + std::to_string(s.source_line) + "]";
  return text;
}

std::string lanes_named(Epoch e) {
  const unsigned lanes = lanes_of(e);
  if (lanes == kWhole) return "the warp";
  if (lanes == kEach) return "several lanes";
  std::string text;
  for (Mask left = mask_of(lanes); left != 0; left &= left - 1)
    text += (text.empty() ? "lane " : " or ") + std::to_string(__builtin_ctz(left));
  return text;
}

const char* completion(Agent::Kind kind) {
  switch (kind) {
    case Agent::warp: return "";
    case Agent::load_queue: return ", complete at tcgen05.wait::ld";
    case Agent::store_queue: return ", complete at tcgen05.wait::st";
    case Agent::pipe: return ", in the tensor pipe";
    case Agent::operation: return ", asynchronous";
  }
  return "";
}
}  // namespace

std::string Checker::State::describe(const Actor& a) const {
  return quote(launch, a.op) + "\n      by warp " + std::to_string(a.warp) + " of CTA " + coordinates(a.cta);
}

std::string Checker::State::describe(Epoch e) const {
  const Agent& a = agents[agent_of(e)];
  size_t statement = statement_of(e);
  Actor actor;
  if (statement < launch.program->ops.size()) actor.op = &launch.program->ops[statement];
  std::copy(a.cta, a.cta + 3, actor.cta);
  actor.warp = a.id;
  return describe(actor) + completion(a.kind);
}

void Checker::State::count(const Key& key, const std::string& text, bool quiet) {
  auto at = reports.find(key);
  if (at == reports.end()) {
    if (reports.size() >= kMostReports) return;
    const bool waives = waived[static_cast<size_t>(key[0])];
    const char* kind = quiet ? "note: " : waives ? "note: waived: " : "";
    at = reports.emplace(key, Report{kind + text, 0, quiet || waives}).first;
  }
  at->second.count++;
}

void Checker::State::report(Finding f, Space space, const Actor& actor, const CtaState* owner, Epoch earlier,
                            uint64_t at, const std::string& more) {
  Key key{static_cast<int>(f), static_cast<int>(space), actor.op ? actor.op->index : -1,
          earlier ? static_cast<int>(statement_of(earlier)) : -1};
  auto known = reports.find(key);
  std::string text;
  if (known == reports.end()) {
    text = std::string(headline(f)) + ", kernel " + launch.program->function->name + ", " +
           where(launch, space, owner, at) + "\n    " + describe(actor);
    if (earlier) text += "\n    after " + describe(earlier);
    text += more;
  }
  count(key, text, quiet(f));
}

// Of two lanes of one warp a report names the lanes, too.
std::string Checker::State::describe_lanes(const Access& a, Epoch earlier) const {
  if (agent_of(earlier) != a.agent() || agents[a.agent()].kind != Agent::warp) return "";
  return "\n    by lanes of one warp, with nothing in between that orders them: " + lanes_named(a.mark) + " after " +
         lanes_named(earlier);
}

void Checker::State::report(Finding f, const Access& a, Epoch earlier, uint64_t at) {
  // Of a warp's stores, and of copies into global memory: a copy into shared memory fills a place that others use.
  const Agent::Kind kind = agents[a.agent()].kind;
  const bool stores = kind == Agent::warp ? a.space != Space::tensor
                                          : kind == Agent::operation && a.space == Space::global;
  const bool plain = a.write && stores && !a.strong() &&
                     (f == Finding::write_after_write || f == Finding::write_after_read);
  if (!plain) {
    report(f, a.space, a.actor, a.owner, earlier, at, describe_lanes(a, earlier));
    return;
  }
  Doubt doubt{
      {static_cast<int>(f), static_cast<int>(a.space), a.actor.op->index, static_cast<int>(statement_of(earlier))}, ""};
  if (!reports.count(doubt.key))
    doubt.text = ", kernel " + launch.program->function->name + ", " + where(launch, a.space, a.owner, at) + "\n    " +
                 describe(a.actor) + "\n    after " + describe(earlier) + describe_lanes(a, earlier);
  doubts.push_back(std::move(doubt));
}

static const uint8_t* bytes_of(const Checker::State::Store& s) {
  return s.space == Space::shared ? s.owner->cta->shared + s.begin : reinterpret_cast<const uint8_t*>(s.begin);
}

// The bytes that a store with a doubt is about to replace.
void Checker::State::keep(const Access& a, uint64_t begin, uint64_t end) {
  doubtful.push_back({a.space, a.owner, begin, a.mark, {}});
  const uint8_t* from = bytes_of(doubtful.back());
  doubtful.back().was.assign(from, from + (end - begin));
}

// The hooks come before the bytes move, so a doubt is decided when the next instruction calls one.
void Checker::State::settle(const AsyncRef& ref) {
  const uint64_t operation = static_cast<uint64_t>(ref->agent) << 32 | ref->writes;
  if (operation != doubt_operation) settle(static_cast<const Context*>(nullptr));
  doubt_operation = operation;
}

void Checker::State::settle(const Context* c) {
  if (doubts.empty() || (c && doubt_operation == 0 && doubt_warp == &c->warp && doubt_op == c->op)) return;
  bool same = true;
  for (const Store& s : doubtful) same &= std::memcmp(bytes_of(s), s.was.data(), s.was.size()) == 0;
  for (const Store& s : doubtful)
    for (uint64_t piece = s.begin / 4; same && piece < (s.begin + s.was.size() + 3) / 4; piece++) {
      Epoch& written = s.space == Space::shared ? s.owner->written[piece] : page(piece / 1024).written[piece % 1024];
      if (((written ^ s.mark) & ~kLaneBits) == 0) written |= kSilent;
    }
  for (const Doubt& d : doubts) {
    Key key = d.key;
    Finding f = same ? Finding::same_value : static_cast<Finding>(key[0]);
    key[0] = static_cast<int>(f);
    if (!reports.count(key) && d.text.empty()) continue;  // the loud twin stands already
    count(key, headline(f) + d.text, quiet(f));
  }
  doubts.clear();
  doubtful.clear();
}

std::vector<std::string> finding_names() { return {kNames, kNames + kFindings}; }

std::vector<std::string> Checker::reports() const {
  state_->settle(nullptr);
  std::vector<std::string> result;
  if (!state_->launch.options.waived.empty()) {
    result.push_back("note: waived:");
    for (size_t i = 0; i < kFindings; i++) {
      if (!state_->waived[i]) continue;
      uint64_t seen = 0;
      for (const auto& r : state_->reports)
        if (r.first[0] == static_cast<int>(i)) seen += r.second.count;
      result[0] += std::string(result[0].back() == ':' ? " " : ", ") + kNames[i] + " (seen " + std::to_string(seen) +
                   (seen == 1 ? " time)" : " times)");
    }
  }
  for (bool quiet : {false, true})
    for (const auto& r : state_->reports)
      if (r.second.quiet == quiet)
        result.push_back(r.second.text + "\n    seen " + std::to_string(r.second.count) +
                         (r.second.count == 1 ? " time" : " times"));
  return result;
}

}  // namespace ptx
