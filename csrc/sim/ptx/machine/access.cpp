#include "machine/access.h"

#include <algorithm>

#include "check/check.h"

namespace ptx {

namespace {

// Wavefronts of a shared-memory access: lanes in groups that fill 128 bytes, and in a group as many passes as the
// busiest bank has different words. Accesses of 8 and 16 bytes take two and four neighbouring banks.
void count_banks(Counters& count, const uint64_t* address, Mask mask, unsigned bytes) {
  const unsigned unit = std::min(16u, std::max(4u, bytes)), lanes = 128 / unit;
  count.shared_accesses++;
  for (unsigned first = 0; first < kLanes; first += lanes) {
    const Mask group = mask >> first & (lanes == 32 ? kAll : (1u << lanes) - 1);
    if (group == 0) continue;
    uint64_t seen[32][kLanes];
    uint8_t used[32] = {};
    unsigned passes = 1;
    for (Mask left = group; left != 0; left &= left - 1) {
      const uint64_t word = address[first + static_cast<unsigned>(__builtin_ctz(left))] / unit;
      const unsigned bank = word % lanes;
      unsigned i = 0;
      while (i < used[bank] && seen[bank][i] != word) i++;
      if (i < used[bank]) continue;
      seen[bank][used[bank]++] = word;
      passes = std::max<unsigned>(passes, i + 1);
    }
    count.shared_wavefronts += passes;
    count.shared_least_wavefronts++;
  }
}

void count_sectors(Counters& count, const uint64_t* address, Mask mask, unsigned bytes) {
  uint64_t sectors[kLanes];
  unsigned n = 0;
  bool sorted = true;
  for (; mask != 0; mask &= mask - 1) {
    const uint64_t s = address[__builtin_ctz(mask)] / 32;
    if (n > 0 && sectors[n - 1] == s) continue;
    if (n > 0 && sectors[n - 1] > s) sorted = false;
    sectors[n++] = s;
  }
  if (!sorted) {
    std::sort(sectors, sectors + n);
    n = static_cast<unsigned>(std::unique(sectors, sectors + n) - sectors);
  }
  count.global_sectors += n * std::max(1u, bytes / 32);
}

void tell(Context& c, const Access& a, Space space, Cta* owner, const uint64_t* address, Mask mask, unsigned bytes,
          bool write, bool atomic) {
  if (!atomic && !a.order.strong) {
    c.check->lanes(c, space, owner, address, mask, bytes, write, a.constant);
    return;
  }
  c.check->atomic(c, space, owner, address, mask, bytes, a.order.acquire, a.order.release, write,
                  static_cast<Reach>(a.order.reach));
}

void reach_shared(Context& c, const Access& a, const uint64_t* address, Mask mask, unsigned bytes, bool write,
                  bool atomic, uint8_t** pointer) {
  uint64_t offset[kLanes] = {};
  for (Mask left = mask; left != 0; left &= left - 1) {
    const unsigned l = static_cast<unsigned>(__builtin_ctz(left));
    const uint32_t at = static_cast<uint32_t>(address[l]);
    offset[l] = at & kOffsetMask;
    // The lanes of an access mostly stay in one CTA.
    if (at >> kRankShift == c.cta.rank && offset[l] % bytes == 0 && offset[l] >= kSharedBase &&
        offset[l] + bytes <= c.cta.shared_bytes)
      pointer[l] = c.cta.shared + offset[l];
    else pointer[l] = shared_bytes(c, at, bytes, bytes);
  }
  count_banks(c.count, offset, mask, bytes);
  if (c.check == nullptr) return;
  while (mask != 0) {
    Cta& owner = shared_owner(c, static_cast<uint32_t>(address[__builtin_ctz(mask)]));
    Mask here = 0;
    for (Mask left = mask; left != 0; left &= left - 1)
      if (static_cast<uint32_t>(address[__builtin_ctz(left)]) >> kRankShift == owner.rank) here |= left & -left;
    tell(c, a, Space::shared, &owner, offset, here, bytes, write, atomic);
    mask &= ~here;
  }
}

[[noreturn]] void misaligned(Context& c, uint64_t address, unsigned bytes) {
  char text[96];
  snprintf(text, sizeof text, "global address %#llx is not a multiple of %u", static_cast<unsigned long long>(address),
           bytes);
  c.fail(text);
}

void reach_global(Context& c, const Access& a, const uint64_t* address, Mask mask, unsigned bytes, bool write,
                  bool atomic, uint8_t** pointer) {
  uint64_t low = ~0ull, high = 0, bits = 0;
  for (Mask left = mask; left != 0; left &= left - 1) {
    const unsigned l = static_cast<unsigned>(__builtin_ctz(left));
    low = std::min(low, address[l]);
    high = std::max(high, address[l]);
    bits |= address[l];
    pointer[l] = reinterpret_cast<uint8_t*>(address[l]);
  }
  if (bits % bytes != 0)
    for (Mask left = mask; left != 0; left &= left - 1)
      if (address[__builtin_ctz(left)] % bytes != 0) misaligned(c, address[__builtin_ctz(left)], bytes);
  if (!c.launch.inside_one_range(low, high + bytes, write))
    for (Mask left = mask; left != 0; left &= left - 1) c.launch.global(c, address[__builtin_ctz(left)], bytes, write);
  if (a.window == Window::param || a.window == Window::constant) return;
  count_sectors(c.count, address, mask, bytes);
  if (c.check != nullptr) tell(c, a, Space::global, nullptr, address, mask, bytes, write, atomic);
}

void reach_local(Context& c, const uint64_t* address, Mask mask, unsigned bytes, uint8_t** pointer) {
  const uint32_t size = c.launch.program->local_bytes;
  for (; mask != 0; mask &= mask - 1) {
    const unsigned l = static_cast<unsigned>(__builtin_ctz(mask));
    const uint64_t offset = address[l] & (kGenericLocal - 1);
    if (offset % bytes != 0)
      c.fail("local offset " + std::to_string(offset) + " is not a multiple of " + std::to_string(bytes));
    if (offset + bytes > size)
      c.fail(std::to_string(bytes) + " bytes at local offset " + std::to_string(offset) + "; a lane has " +
             std::to_string(size));
    pointer[l] = c.warp.local.data() + static_cast<uint64_t>(l) * size + offset;
  }
}

}  // namespace

void reach(Context& c, const Access& a, const uint64_t* address, unsigned bytes, bool read, bool write, bool atomic,
           uint8_t** pointer) {
  Mask shared = 0, local = 0;
  if (a.window == Window::shared) shared = c.mask;
  if (a.window == Window::local) local = c.mask;
  if (a.window == Window::generic)
    for (Mask left = c.mask; left != 0; left &= left - 1) {
      const uint64_t at = address[__builtin_ctz(left)];
      if (at >> 56 == kGenericShared >> 56) shared |= left & -left;
      if (at >> 57 == kGenericLocal >> 57) local |= left & -left;
    }
  const Mask global = c.mask & ~shared & ~local;
  if (shared != 0) {
    reach_shared(c, a, address, shared, bytes, write, atomic, pointer);
    const uint64_t moved = static_cast<uint64_t>(bytes) * static_cast<unsigned>(__builtin_popcount(shared));
    c.count.shared_read += read ? moved : 0;
    c.count.shared_written += write ? moved : 0;
  }
  if (local != 0) reach_local(c, address, local, bytes, pointer);
  if (global != 0) {
    reach_global(c, a, address, global, bytes, write, atomic, pointer);
    if (a.window == Window::param || a.window == Window::constant) return;
    const uint64_t moved = static_cast<uint64_t>(bytes) * static_cast<unsigned>(__builtin_popcount(global));
    c.count.global_read += read ? moved : 0;
    c.count.global_written += write ? moved : 0;
  }
}

Window take_window(Modifiers& m, Window fallback) {
  if (m.take("global")) return Window::global;
  if (m.take("shared") || m.take("shared::cta") || m.take("shared::cluster")) return Window::shared;
  if (m.take("local")) return Window::local;
  if (m.take("param") || m.take("param::entry") || m.take("param::func")) return Window::param;
  if (m.take("const")) return Window::constant;
  return fallback;
}

Order take_order(Decoder& d, Modifiers& m) {
  Order o;
  const std::string kind =
      m.take_optional({"weak", "volatile", "mmio", "relaxed", "acquire", "release", "acq_rel"}, "weak");
  if (kind == "weak") return o;
  o.strong = true;
  o.acquire = kind == "acquire" || kind == "acq_rel";
  o.release = kind == "release" || kind == "acq_rel";
  if (kind == "volatile") {  // as .relaxed.sys, PTX ISA 8.4
    o.reach = 3;
    return o;
  }
  if (kind == "mmio" && !m.take("relaxed")) d.fail("'.mmio' goes with '.relaxed'");
  const std::string scope = m.take_one({"cta", "cluster", "gpu", "sys"});
  o.reach = scope == "cta" ? 0 : scope == "cluster" ? 1 : scope == "gpu" ? 2 : 3;
  return o;
}

void set_address(Decoder& d, Op& op, const Operand& memory, Access& a, Slot& slot) {
  slot = d.address(memory, op, a.address_bytes);
  const Operand& base = memory.parts[0];
  if (memory.parts.size() != 1) d.fail("one address is expected in the brackets");
  if (base.kind != Operand::symbol) {
    if (a.address_bytes == 4 && a.window != Window::shared && a.window != Window::local)
      d.fail("an address of 32 bits reaches shared memory only");
    return;
  }
  const Home home = home_of(d.program, base.name);
  if (a.window == Window::param && home == Home::local) a.window = Window::local;  // .param declared in the body
  const Home wanted[] = {Home::none, Home::global, Home::shared, Home::local, Home::param, Home::constant};
  if (a.window == Window::generic || home != wanted[static_cast<int>(a.window)])
    d.fail("'" + base.name + "' does not live in the state space that the instruction names");
}

}  // namespace ptx
