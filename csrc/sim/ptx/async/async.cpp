// Addresses of the asynchronous units: decoded, and checked when they are used.
#include "async/async.h"

namespace ptx {

std::string hex(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "%#llx", static_cast<unsigned long long>(value));
  return text;
}

Address address_of(Decoder& d, const Operand& memory, In in) {
  Op scratch;   // address() leaves the constant offset in an Op
  Address a;
  a.slot = d.address(memory, scratch, a.bytes);
  a.offset = scratch.offset;
  // A shared variable named without a state space is a shared address all the same.
  a.generic = in == In::generic && a.bytes == 8;
  // A shared address in a 64-bit register: its low word is the address.
  if (in == In::shared && a.bytes == 8) {
    const Operand& base = memory.parts[0];
    a.slot = base.kind == Operand::reg ? a.slot : d.source(base, 4);
  }
  return a;
}

SharedPlace shared_place(const Context& c, uint64_t address, bool generic, uint64_t bytes, uint32_t align, bool own,
                         const char* what) {
  if (generic) {
    const Place p = place_generic(c, address);
    if (p.space != Place::shared) c.fail(std::string(what) + " at " + hex(address) + " is not in shared memory");
    address = p.offset | static_cast<uint64_t>(p.cta->rank) << kRankShift;
  }
  address &= 0xffffffffu;
  const uint32_t rank = static_cast<uint32_t>(address) >> kRankShift, offset = address & kOffsetMask;
  if (rank >= c.cluster.ctas.size())
    c.fail(std::string(what) + " at " + hex(address) + " is in CTA rank " + std::to_string(rank) + " of a cluster of " +
           std::to_string(c.cluster.ctas.size()));
  Cta* cta = c.cluster.ctas[rank].get();
  if (own && cta != &c.cta)
    c.fail(std::string(what) + " at " + hex(address) + " is in CTA rank " + std::to_string(rank) +
           "; the form takes the executing CTA's shared memory only (rank " + std::to_string(c.cta.rank) + ")");
  if (offset % align != 0)
    c.fail(std::string(what) + " at shared offset " + hex(offset) + " is not aligned to " + std::to_string(align) +
           " bytes");
  if (offset < kSharedBase || offset + bytes > cta->shared_bytes)
    c.fail(std::string(what) + " at shared offset " + hex(offset) + ", " + std::to_string(bytes) +
           " bytes, is outside the CTA's shared memory (" + hex(kSharedBase) + " to " + hex(cta->shared_bytes) + ")");
  return {cta, offset};
}

SharedPlace shared_in(const Context& c, SharedPlace p, unsigned rank) {
  if (rank >= c.cluster.ctas.size())
    c.fail("CTA rank " + std::to_string(rank) + " is not in the cluster of " + std::to_string(c.cluster.ctas.size()));
  return {c.cluster.ctas[rank].get(), p.offset};
}

uint8_t* global_place(const Context& c, uint64_t address, uint64_t bytes, uint32_t align, bool write,
                      const char* what) {
  if (address % align != 0)
    c.fail(std::string(what) + " at " + hex(address) + " is not aligned to " + std::to_string(align) + " bytes");
  return c.launch.global(c, address, bytes, write);
}

}  // namespace ptx
