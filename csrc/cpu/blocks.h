// Attention in blocks of query rows and keys, for processors with AVX-512: numbers of 16 and 32 bits, pages or plain
// caches, products and sums in float32.
#pragma once

#include <cstdint>
#include <vector>

namespace attnkit {

enum class Number : int { kFloat32, kBfloat16, kFloat16 };

// What follows from a signature. Steps are in elements.
struct Blocks {
  int64_t Hq, Hkv, D, Dv;
  Number number;
  float scale;
  bool causal, among;           // among: a query before the first key sees nothing, causal or not
  int64_t window, sink_tokens;  // window below 0: none
  int64_t q[2], k[2], v[2];     // from token to token, and from head to head
  int64_t page, pages, k_page, v_page;  // keys of a page, or 0; pages of the caches, and steps between them
};

// Of T queries the last stands at key S - 1; they see keys of [start, end). The table names pages, where there are any.
struct Sequence {
  const void *q, *k, *v;
  void* out;   // (T, Hq, Dv)
  float* lse;  // (T, Hq)
  const int32_t* table;
  int64_t T, S, start, end;
};

// Whether this processor, and the system on it, has what the kernel is made for.
bool blocks_run_here();

// sink (Hq) or null. False where a result would not be finite, and where a page is none.
bool attention(const Blocks& b, const std::vector<Sequence>& sequences, const float* sink, int threads);

}  // namespace attnkit
