#include "tensor/smem_matrix.h"

#include <algorithm>

namespace ptx {
namespace {

constexpr unsigned kChunk = 16;

// 14 bits of an address or an offset without its low 4 bits ("matrix-descriptor-encode").
uint32_t field(uint64_t descriptor, unsigned at) { return static_cast<uint32_t>(descriptor >> at & 0x3fff) << 4; }

SmemMatrix fields(const Context& c, uint64_t descriptor) {
  // A pattern that does not start at its natural boundary; nothing that compilers emit uses it.
  if (descriptor >> 49 & 7) c.fail("matrix descriptor: base offset " + std::to_string(descriptor >> 49 & 7) +
                                   "; only 0 is supported (patterns aligned to their size)");
  SmemMatrix m;
  m.start = field(descriptor, 0);
  m.leading = field(descriptor, 16);
  m.stride = field(descriptor, 32);
  return m;
}

uint32_t swizzled(uint32_t address, SmemSwizzle mode) {
  switch (mode) {
    case SmemSwizzle::b32: return address ^ (address >> 7 & 1) << 4;
    case SmemSwizzle::b64: return address ^ (address >> 7 & 3) << 4;
    case SmemSwizzle::b128: return address ^ (address >> 7 & 7) << 4;
    case SmemSwizzle::b128_32: return address ^ (address >> 7 & 3) << 5;
    default: return address;
  }
}

unsigned width_of(SmemSwizzle mode) {  // bytes of a row of the swizzle atom
  return mode == SmemSwizzle::none ? 16 : mode == SmemSwizzle::b32 ? 32 : mode == SmemSwizzle::b64 ? 64 : 128;
}

void join(Ranges& ranges) {
  std::sort(ranges.begin(), ranges.end());
  size_t last = 0;
  for (size_t i = 1; i < ranges.size(); i++) {
    if (ranges[i].first <= ranges[last].first + ranges[last].second)
      ranges[last].second = std::max(ranges[last].second, ranges[i].first + ranges[i].second - ranges[last].first);
    else
      ranges[++last] = ranges[i];
  }
  if (!ranges.empty()) ranges.resize(last + 1);
}

}  // namespace

SmemMatrix wgmma_matrix(const Context& c, uint64_t descriptor) {
  SmemMatrix m = fields(c, descriptor);
  constexpr SmemSwizzle modes[] = {SmemSwizzle::none, SmemSwizzle::b128, SmemSwizzle::b64, SmemSwizzle::b32};
  m.swizzle = modes[descriptor >> 62];
  return m;
}

SmemMatrix tcgen05_matrix(const Context& c, uint64_t descriptor) {
  SmemMatrix m = fields(c, descriptor);
  if ((descriptor >> 46 & 7) != 1)
    c.fail("matrix descriptor: bits 46-48 are " + std::to_string(descriptor >> 46 & 7) + ", have to be 0b001");
  if (descriptor >> 52 & 1) c.fail("matrix descriptor: absolute leading dimension address (sm_103a) is not supported");
  switch (descriptor >> 61) {
    case 0: m.swizzle = SmemSwizzle::none; break;
    case 1: m.swizzle = SmemSwizzle::b128_32; break;
    case 2: m.swizzle = SmemSwizzle::b128; break;
    case 4: m.swizzle = SmemSwizzle::b64; break;
    case 6: m.swizzle = SmemSwizzle::b32; break;
    default: c.fail("matrix descriptor: swizzling mode " + std::to_string(descriptor >> 61) + " is invalid");
  }
  return m;
}

// PTX ISA 9.7.16.3.3 "Canonical Layouts", in chunks of 16 bytes. K-major: rows of one atom lie `width` apart, groups of
// 8 rows `stride` apart; along K chunks follow one another inside the swizzle width (without swizzle: `leading` apart).
// MN-major: chunks run along MN inside the swizzle width, k steps lie `width` apart; beyond the atom (8 k steps, 4 with
// 32-byte atomicity) `stride` along K and `leading` along MN; without swizzle the two change roles.
void read_smem_matrix(const Context& c, Cta& owner, const SmemMatrix& m, const SmemExtent& e, uint8_t* out,
                      Ranges* touched) {
  const unsigned width = width_of(m.swizzle), line = (e.mn_major ? e.mn : e.k) * e.bytes;
  const unsigned lines = e.mn_major ? e.k : e.mn, chunks = line / kChunk, across = width / kChunk;
  if (line % kChunk)
    c.fail("matrix in shared memory: a line of " + std::to_string(line) + " bytes is not a multiple of 16");
  const unsigned atom = m.swizzle == SmemSwizzle::b128_32 ? 4 : 8;
  const bool plain = m.swizzle == SmemSwizzle::none;
  const uint32_t line_group = !e.mn_major || !plain ? m.stride : m.leading;
  const uint32_t chunk_group = e.mn_major && plain ? m.stride : m.leading;
  for (unsigned l = 0; l < lines; l++) {
    const uint32_t at = m.start + l % atom * width + l / atom * line_group;
    for (unsigned i = 0; i < chunks; i++) {
      // K-major swizzled: the leading offset is not used, chunks beyond the width go on as addresses do.
      const uint32_t along = !plain && !e.mn_major ? i * kChunk : i % across * kChunk + i / across * chunk_group;
      const uint32_t address = swizzled(at + along, m.swizzle);
      if (address < kSharedBase || address + kChunk > owner.shared_bytes)
        c.fail("matrix in shared memory of CTA " + std::to_string(owner.rank) + ": chunk at " +
               std::to_string(address) + " is outside " + std::to_string(kSharedBase) + " .. " +
               std::to_string(owner.shared_bytes));
      std::memcpy(out + static_cast<size_t>(l) * line + i * kChunk, owner.shared + address, kChunk);
      if (touched) touched->emplace_back(address, kChunk);
    }
  }
  if (touched) join(*touched);
}

}  // namespace ptx
