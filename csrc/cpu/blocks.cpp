#include "blocks.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iterator>
#include <limits>
#include <memory>
#include <numeric>
#include <system_error>
#include <thread>

// By hand, function by function: wheels are linked by clang, which leaves the question of the processor to a runtime.
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define ATTNKIT_BLOCKS 1
#include <cpuid.h>
#include <immintrin.h>
#define ATTNKIT_512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")))
#define ATTNKIT_512_MEMBER inline __attribute__((always_inline, target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")))
#define ATTNKIT_512_INSIDE static ATTNKIT_512_MEMBER
#endif

namespace attnkit {

#ifndef ATTNKIT_BLOCKS

bool blocks_run_here() { return false; }
bool attention(const Blocks&, const std::vector<Sequence>&, const float*, int) { return false; }

#else

namespace {

constexpr int64_t kKeys = 64;     // of a block
constexpr int64_t kVectors = 4;   // of 16 keys each
constexpr int64_t kLong = 512;    // of one that is not rearranged: so long a stream is
constexpr int64_t kAhead = 16;    // keys that memory is asked for before they are read
constexpr int64_t kTile = 6;      // rows whose sums are in registers: with 4 vectors each 24 of 32
constexpr int64_t kRows = 192;    // of an item, at most: their sums and scores stay in a second-level cache
constexpr int64_t kFew = 16;      // rows
constexpr int64_t kWorthAThread = 1 << 21;  // products: some 0.05 ms
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

// e^x for x up to 0, within an ulp or two: 2^n times a polynomial, for x = n ln 2 + r. NaN stays.
ATTNKIT_512_INSIDE __m512 exp_of(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  const __m512 high = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  const __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), high);
  __m512 p = _mm512_set1_ps(1.0f / 5040);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 720));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

// Sixteen numbers, or those that the mask has and zeros.
template <Number N>
ATTNKIT_512_INSIDE __m512 load(const void* from, int64_t at, __mmask16 mask) {
  if (N == Number::kFloat32) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(from) + at);
  const __m256i bits = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(from) + at);
  if (N == Number::kFloat16) return _mm512_cvtph_ps(bits);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// To the nearest, ties to even; of finite numbers.
template <Number N>
ATTNKIT_512_INSIDE void store(void* to, int64_t at, __mmask16 mask, __m512 x) {
  if (N == Number::kFloat32) return _mm512_mask_storeu_ps(static_cast<float*>(to) + at, mask, x);
  __m256i bits;
  if (N == Number::kFloat16) {
    bits = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  } else {
    const __m512i whole = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(whole, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(whole, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    bits = _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
  }
  _mm256_mask_storeu_epi16(static_cast<uint16_t*>(to) + at, mask, bits);
}

ATTNKIT_512_INSIDE __mmask16 first(int64_t n) { return n >= 16 ? 0xffff : __mmask16((1u << n) - 1); }

inline const void* element(Number n, const void* base, int64_t at) {
  return static_cast<const char*>(base) + at * (n == Number::kFloat32 ? 4 : 2);
}

ATTNKIT_512_INSIDE void transpose(__m512 (&r)[16]) {
  __m512 t[16];
  for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      const __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
      r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88), t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88), t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88), r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88), r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Rows (n, D) to columns (D, 64) of a block, zeros for the keys that it lacks.
template <Number N>
ATTNKIT_512_INSIDE void columns(const void* from, const int64_t* rows, int64_t n, int64_t D, float* to) {
  for (int64_t j = 0; j < padded(n); j += 16)
    for (int64_t d = 0; d < D; d += 16) {
      __m512 r[16];
      for (int64_t i = 0; i < 16; i++)
        r[i] = j + i < n ? load<N>(from, rows[j + i] + d, first(D - d)) : _mm512_setzero_ps();
      transpose(r);
      for (int64_t i = 0; i < 16 && d + i < D; i++) _mm512_storeu_ps(to + (d + i) * kKeys + j, r[i]);
    }
}

// c (rows, 16 V) = alpha (rows) c + a (rows, depth) b (depth, 16 V); without alpha c is what it was not.
template <int R, int V>
ATTNKIT_512_INSIDE void multiply(const float* a, int64_t a_row, const float* b, int64_t b_row, int64_t depth, float* c,
                                 int64_t c_row, const float* alpha) {
  __m512 sums[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++)
      sums[r][v] = alpha ? _mm512_mul_ps(_mm512_set1_ps(alpha[r]), _mm512_loadu_ps(c + r * c_row + 16 * v))
                         : _mm512_setzero_ps();
  for (int64_t i = 0; i < depth; i++) {
    __m512 line[V];
    for (int v = 0; v < V; v++) line[v] = _mm512_loadu_ps(b + i * b_row + 16 * v);
    for (int r = 0; r < R; r++) {
      const __m512 one = _mm512_set1_ps(a[r * a_row + i]);
      for (int v = 0; v < V; v++) sums[r][v] = _mm512_fmadd_ps(one, line[v], sums[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) _mm512_storeu_ps(c + r * c_row + 16 * v, sums[r][v]);
}

template <int V>
ATTNKIT_512 void product(int64_t rows, const float* a, int64_t a_row, const float* b, int64_t b_row, int64_t depth,
                         float* c, int64_t c_row, const float* alpha) {
  for (int64_t r = 0; r < rows; r += kTile, a += kTile * a_row, c += kTile * c_row, alpha += alpha ? kTile : 0)
    switch (std::min(kTile, rows - r)) {
      case 1: multiply<1, V>(a, a_row, b, b_row, depth, c, c_row, alpha); break;
      case 2: multiply<2, V>(a, a_row, b, b_row, depth, c, c_row, alpha); break;
      case 3: multiply<3, V>(a, a_row, b, b_row, depth, c, c_row, alpha); break;
      case 4: multiply<4, V>(a, a_row, b, b_row, depth, c, c_row, alpha); break;
      case 5: multiply<5, V>(a, a_row, b, b_row, depth, c, c_row, alpha); break;
      default: multiply<6, V>(a, a_row, b, b_row, depth, c, c_row, alpha);
    }
}

void product(int64_t vectors, int64_t rows, const float* a, int64_t a_row, const float* b, int64_t b_row, int64_t depth,
             float* c, int64_t c_row, const float* alpha) {
  for (int64_t v = 0; v < vectors; v += kVectors, b += 16 * kVectors, c += 16 * kVectors)
    switch (std::min(kVectors, vectors - v)) {
      case 1: product<1>(rows, a, a_row, b, b_row, depth, c, c_row, alpha); break;
      case 2: product<2>(rows, a, a_row, b, b_row, depth, c, c_row, alpha); break;
      case 3: product<3>(rows, a, a_row, b, b_row, depth, c, c_row, alpha); break;
      default: product<4>(rows, a, a_row, b, b_row, depth, c, c_row, alpha);
    }
}

// Where a thread works, for so many rows; as it comes, for what the system gives anew costs more than what is done in it.
struct Room {
  std::unique_ptr<float[]> memory;
  float *q, *k, *v, *scores, *out, *top, *total, *alpha;

  Room(const Blocks& b, int64_t rows) {
    const int64_t sizes[] = {rows * b.D, b.D * kKeys, kKeys * padded(b.Dv), rows * kLong, rows * padded(b.Dv), rows, rows, rows};
    float** const parts[] = {&q, &k, &v, &scores, &out, &top, &total, &alpha};
    memory.reset(new float[size_t(std::accumulate(std::begin(sizes), std::end(sizes), int64_t(0)))]);
    float* at = memory.get();
    for (size_t i = 0; i < std::size(sizes); i++) *parts[i] = at, at += sizes[i];
  }
};

struct Range {
  int64_t begin, end;
};

// The keys that a query at ``position`` sees, beside those below the second end.
struct Sight {
  Range near;
  int64_t sinks;
};

Sight sight(const Blocks& b, const Sequence& s, int64_t position) {
  if (b.among && position < 0) return {{0, 0}, 0};
  Range near{s.start, s.end};
  int64_t sinks = 0;
  if (b.causal) near.end = std::min(near.end, position + 1);
  const int64_t last = near.end;
  if (b.window >= 0) {
    near.begin = std::max(near.begin, position - b.window + 1);
    if (!b.causal) near.end = std::min(near.end, position + b.window);
    sinks = std::min(b.sink_tokens > last - s.start ? last : s.start + b.sink_tokens, last);
  }
  near.end = std::max(near.end, near.begin);
  return {near, sinks};
}

ATTNKIT_512_INSIDE __mmask16 between(__m512i key, int64_t low, int64_t high) {
  return __mmask16(_mm512_cmpge_epi32_mask(key, _mm512_set1_epi32(int32_t(low))) &
                   _mm512_cmplt_epi32_mask(key, _mm512_set1_epi32(int32_t(high))));
}

// The scores of a row in a block of keys from ``begin`` on to weights, with the row's maximum and sum.
ATTNKIT_512_INSIDE void soften(float* scores, float scale, int64_t begin, int64_t n, const Sight& seen, int64_t start, float& top,
                               float& total, float& alpha) {
  __m512 s[kVectors], most = _mm512_set1_ps(-kInfinity);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const auto within = [](int64_t x) { return int32_t(std::clamp<int64_t>(x, 0, kKeys)); };
  const int64_t from = within(seen.near.begin - begin), to = within(seen.near.end - begin);
  const int64_t sinks_from = within(start - begin), sinks_to = within(std::min(seen.sinks, begin + n) - begin);
  const int64_t vectors = (n + 15) / 16;
  for (int64_t v = 0; v < vectors; v++) {
    const __m512i key = _mm512_add_epi32(lane, _mm512_set1_epi32(int32_t(16 * v)));
    const __mmask16 keep = (between(key, from, to) | between(key, sinks_from, sinks_to)) & first(n - 16 * v);
    s[v] = _mm512_mask_mul_ps(_mm512_set1_ps(-kInfinity), keep, _mm512_loadu_ps(scores + 16 * v), _mm512_set1_ps(scale));
    // NaN stays: the maximum of it and a number is the second operand.
    most = _mm512_max_ps(most, s[v]);
  }
  const float now = std::max(top, _mm512_reduce_max_ps(most));
  const __m512 base = _mm512_set1_ps(now == -kInfinity ? 0.0f : now);
  alpha = top == -kInfinity ? 0.0f : _mm512_cvtss_f32(exp_of(_mm512_set1_ps(top - now)));
  __m512 sum = _mm512_setzero_ps();
  for (int64_t v = 0; v < vectors; v++) {
    const __mmask16 none = _mm512_cmp_ps_mask(s[v], _mm512_set1_ps(-kInfinity), _CMP_EQ_OQ);
    const __m512 weight = _mm512_mask_mov_ps(exp_of(_mm512_sub_ps(s[v], base)), none, _mm512_setzero_ps());
    _mm512_storeu_ps(scores + 16 * v, weight);
    sum = _mm512_add_ps(sum, weight);
  }
  total = total * alpha + _mm512_reduce_add_ps(sum);
  top = now;
}

// Queries [t0, t1) of a sequence, with the heads [g0, g1) of each group, those of the KV heads [h0, h1): few queries take
// several, for these lie side by side in most caches.
struct Item {
  const Sequence* sequence;
  int64_t h0, h1, t0, t1, g0, g1;
};

// Of keys from ``begin`` on: in elements, those of the first KV head.
struct Places {
  int64_t begin, n, k[kLong], v[kLong];
};

template <Number N>
struct Tile {
  const Blocks& b;
  const Sequence& s;
  const Item& item;
  Room& room;
  int64_t heads, rows, wide;  // rows of a KV head
  std::vector<Sight> seen;

  Tile(const Blocks& blocks, const Item& i, Room& r)
      : b(blocks), s(*i.sequence), item(i), room(r), heads(i.g1 - i.g0), rows((i.t1 - i.t0) * heads),
        wide(padded(blocks.Dv)) {
    for (int64_t t = item.t0; t < item.t1; t++) seen.push_back(sight(b, s, s.S - s.T + t));
  }

  int64_t all() const { return (item.h1 - item.h0) * rows; }
  int64_t token(int64_t r) const { return item.t0 + r % rows / heads; }
  int64_t head(int64_t r) const { return (item.h0 + r / rows) * (b.Hq / b.Hkv) + item.g0 + r % heads; }

  ATTNKIT_512 void begin() {
    for (int64_t r = 0; r < all(); r++) {
      const void* q = element(N, s.q, token(r) * b.q[0] + head(r) * b.q[1]);
      for (int64_t d = 0; d < b.D; d += 16) {
        const __mmask16 there = first(b.D - d);
        _mm512_mask_storeu_ps(&room.q[r * b.D + d], there, load<N>(q, d, there));
      }
    }
    std::fill_n(room.top, all(), -kInfinity);
    std::fill_n(room.total, all(), 0.0f);
    std::fill_n(room.out, all() * wide, 0.0f);
  }

  // Where keys [begin, end) are, at most 512. False for a page that is none.
  bool find(int64_t begin, int64_t end, Places& to) const {
    to.begin = begin, to.n = std::max<int64_t>(0, end - begin);
    for (int64_t i = 0; i < to.n; i++) {
      int64_t key = begin + i, k_page = 0, v_page = 0;
      if (b.page) {
        const int64_t page = s.table[key / b.page];
        if (page < 0 || page >= b.pages) return false;
        k_page = page * b.k_page, v_page = page * b.v_page, key %= b.page;
      }
      to.k[i] = k_page + key * b.k[0], to.v[i] = v_page + key * b.v[0];
    }
    return true;
  }

  bool blocks(Range keys) {
    Places now;
    for (int64_t at = keys.begin; at < keys.end; at += kLong) {
      if (!find(at, std::min(at + kLong, keys.end), now)) return false;
      if (rows > 1)
        for (int64_t j = 0; j < now.n; j += kKeys)
          for (int64_t h = item.h0; h < item.h1; h++) head_block(h, now, j);
      else if (b.D % 16 || b.Dv % 16)
        straight<false>(now);
      else
        straight<true>(now);
    }
    return true;
  }

  // Asks memory for a row of a KV head.
  void ahead(const void* from, int64_t at, int64_t size) const {
    constexpr int64_t kLine = 64 / (N == Number::kFloat32 ? 4 : 2);
    for (int64_t d = 0; d < size; d += kLine) __builtin_prefetch(element(N, from, at + d));
  }

  // Many keys with one row for each KV head, which is not worth a rearrangement: rows about in the order of memory, four
  // at a time.
  template <bool Whole>
  ATTNKIT_512 void straight(const Places& at) {
    const int64_t heads_here = item.h1 - item.h0;
    for (int64_t i = 0; i < at.n; i += 4)
      for (int64_t h = 0; h < heads_here; h++) score<Whole>(at, i, h);
    for (int64_t j = 0; j < at.n; j += kKeys) {
      const int64_t n = std::min(kKeys, at.n - j);
      for (int64_t h = 0; h < heads_here; h++) {
        float& alpha = room.alpha[h];
        soften(room.scores + h * kLong + j, b.scale, at.begin + j, n, seen[0], s.start, room.top[h], room.total[h], alpha);
        for (int64_t d = 0; alpha != 1 && d < wide; d += 16) {
          float* out = room.out + h * wide + d;
          _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_loadu_ps(out), _mm512_set1_ps(alpha)));
        }
      }
      for (int64_t i = j; i < j + n; i += 4)
        for (int64_t h = 0; h < heads_here; h++) add<Whole>(at, i, std::min(i + 4, j + n), h);
    }
  }

  // The scores of four keys, or of the last one in place of those that there are not.
  template <bool Whole>
  ATTNKIT_512_MEMBER void score(const Places& at, int64_t i, int64_t h) {
    const int64_t head = (item.h0 + h) * b.k[1];
    const float* q = room.q + h * b.D;
    const void* rows_of[4];
    __m512 sums[4];
    for (int64_t j = 0; j < 4; j++) {
      if (i + j + kAhead < at.n) ahead(s.k, at.k[i + j + kAhead] + head, b.D);
      rows_of[j] = element(N, s.k, at.k[std::min(i + j, at.n - 1)] + head);
      sums[j] = _mm512_setzero_ps();
    }
    for (int64_t d = 0; d < b.D; d += 16) {
      const __mmask16 there = Whole ? __mmask16(0xffff) : first(b.D - d);
      const __m512 of_q = _mm512_maskz_loadu_ps(there, q + d);
      for (int64_t j = 0; j < 4; j++) sums[j] = _mm512_fmadd_ps(of_q, load<N>(rows_of[j], d, there), sums[j]);
    }
    const __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(sums[0], sums[1]), _mm512_unpackhi_ps(sums[0], sums[1]));
    const __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(sums[2], sums[3]), _mm512_unpackhi_ps(sums[2], sums[3]));
    const __m512d l = _mm512_castps_pd(low), u = _mm512_castps_pd(high);
    const __m512 four = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(l, u)), _mm512_castpd_ps(_mm512_unpackhi_pd(l, u)));
    const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
    _mm_storeu_ps(room.scores + h * kLong + i, _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
  }

  // Values [i, end), at most four, by their weights.
  template <bool Whole>
  ATTNKIT_512_MEMBER void add(const Places& at, int64_t i, int64_t end, int64_t h) {
    const int64_t head = (item.h0 + h) * b.v[1];
    const void* rows_of[4];
    __m512 weights[4];
    for (int64_t j = 0; j < 4; j++) {
      if (i + j + kAhead < at.n) ahead(s.v, at.v[i + j + kAhead] + head, b.Dv);
      rows_of[j] = element(N, s.v, at.v[std::min(i + j, end - 1)] + head);
      weights[j] = _mm512_set1_ps(i + j < end ? room.scores[h * kLong + i + j] : 0.0f);
    }
    for (int64_t d = 0; d < b.Dv; d += 16) {
      const __mmask16 there = Whole ? __mmask16(0xffff) : first(b.Dv - d);
      float* out = room.out + h * wide + d;
      __m512 sum = _mm512_loadu_ps(out);
      for (int64_t j = 0; j < 4; j++) sum = _mm512_fmadd_ps(weights[j], load<N>(rows_of[j], d, there), sum);
      _mm512_storeu_ps(out, sum);
    }
  }

  // Up to 64 keys of one KV head, from the j-th on.
  ATTNKIT_512 void head_block(int64_t h, const Places& at, int64_t j) {
    const int64_t n = std::min(kKeys, at.n - j), row = (h - item.h0) * rows;
    const void *const keys = element(N, s.k, h * b.k[1]), *const values = element(N, s.v, h * b.v[1]);
    float *const top = room.top + row, *const total = room.total + row, *const alpha = room.alpha + row;
    // With few queries a block is worked on for less time than memory takes.
    for (int64_t i = j; rows <= kFew && i < j + n; i++) ahead(values, at.v[i], b.Dv);
    columns<N>(keys, at.k + j, n, b.D, room.k);
    product(padded(n) / 16, rows, room.q + row * b.D, b.D, room.k, kKeys, b.D, room.scores, kKeys, nullptr);
    for (int64_t i = j + kKeys; rows <= kFew && i < std::min(j + 2 * kKeys, at.n); i++) ahead(keys, at.k[i], b.D);
    for (int64_t r = 0; r < rows; r++)
      soften(room.scores + r * kKeys, b.scale, at.begin + j, n, seen[r / heads], s.start, top[r], total[r], alpha[r]);
    for (int64_t i = 0; i < n; i++)
      for (int64_t d = 0; d < b.Dv; d += 16)
        _mm512_storeu_ps(room.v + i * wide + d, load<N>(values, at.v[j + i] + d, first(b.Dv - d)));
    product(wide / 16, rows, room.scores, kKeys, room.v, wide, n, room.out + row * wide, wide, alpha);
  }

  // Results to their places. False where one is not finite.
  ATTNKIT_512 bool finish(const float* sink) {
    __m512 wrong = _mm512_setzero_ps();  // times 0, infinity and NaN are NaN
    bool finite = true;
    for (int64_t r = 0; r < all(); r++) {
      const int64_t at = token(r) * b.Hq + head(r);
      const float total = room.total[r], lse = total == 0 ? -kInfinity : room.top[r] + std::log(total);
      finite &= total == 0 || std::isfinite(lse);
      s.lse[at] = lse;
      const float share = total == 0 ? 0.0f : (sink ? 1.0f / (1.0f + std::exp(sink[head(r)] - lse)) : 1.0f) / total;
      for (int64_t d = 0; d < b.Dv; d += 16) {
        const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(&room.out[r * wide + d]), _mm512_set1_ps(share));
        wrong = _mm512_add_ps(wrong, _mm512_mul_ps(x, _mm512_setzero_ps()));
        store<N>(s.out, at * b.Dv + d, first(b.Dv - d), x);
      }
    }
    return finite && _mm512_reduce_add_ps(wrong) == 0;
  }

  bool run(const float* sink) {
    Range hull{std::numeric_limits<int64_t>::max(), 0};
    int64_t sinks = 0;
    for (const auto& one : seen) {
      if (one.near.begin < one.near.end)
        hull = {std::min(hull.begin, one.near.begin), std::max(hull.end, one.near.end)};
      sinks = std::max(sinks, one.sinks);
    }
    // Keys of sinks behind all that is near: where a query may stand before them.
    if (hull.begin < sinks && hull.begin < hull.end) hull.end = std::max(hull.end, sinks);
    begin();
    if (!blocks({s.start, std::min(sinks, hull.begin)})) return false;
    return blocks(hull) && finish(sink);
  }
};

// Items of about equal rows: more of them than threads, where there are so many rows.
std::vector<Item> items_of(const Blocks& b, const std::vector<Sequence>& sequences, int threads) {
  const int64_t group = b.Hq / b.Hkv;
  int64_t rows = 0;
  for (const auto& s : sequences) rows += s.T * b.Hq;
  const int64_t most = std::clamp<int64_t>(rows / (4 * threads), threads > 1 ? 1 : kRows, kRows);
  const int64_t heads = std::min(group, most), step = most / heads;
  std::vector<Item> items;
  for (const auto& s : sequences) {
    if (s.T == 0) continue;
    const bool apart = b.k[1] > b.k[0];  // the heads of a key, in memory
    const int64_t beside = apart ? 1 : std::max<int64_t>(1, most / (std::min(step, s.T) * group));
    for (int64_t h = 0; h < b.Hkv; h += beside)
      for (int64_t t = 0; t < s.T; t += step)
        for (int64_t g = 0; g < group; g += heads)
          items.push_back({&s, h, std::min(h + beside, b.Hkv), t, std::min(t + step, s.T), g, std::min(g + heads, group)});
  }
  return items;
}

template <Number N>
bool all(const Blocks& b, const std::vector<Sequence>& sequences, const float* sink, int threads) {
  int64_t products = 0;
  for (const auto& s : sequences) products += s.T * b.Hq * (s.end - s.start) * (b.D + b.Dv);
  const int workers = int(std::clamp<int64_t>(products / kWorthAThread, 1, std::max(threads, 1)));
  const auto items = items_of(b, sequences, workers);
  std::atomic<size_t> next{0};
  std::atomic<bool> taken{true};
  int64_t rows = 0;
  for (const auto& i : items) rows = std::max(rows, (i.h1 - i.h0) * (i.t1 - i.t0) * (i.g1 - i.g0));
  const auto work = [&] {
    Room room(b, rows);
    for (size_t i; taken && (i = next++) < items.size();)
      if (!Tile<N>(b, items[i], room).run(sink)) taken = false;
  };
  std::vector<std::thread> others;
  for (int w = 1; w < workers; w++) {
    try {
      others.emplace_back(work);
    } catch (const std::system_error&) {  // the system has no more threads to give
      break;
    }
  }
  work();
  for (auto& other : others) other.join();
  return taken;
}

}  // namespace

bool blocks_run_here() {
  static const bool here = [] {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1) || !(c >> 12 & 1) || !(c >> 29 & 1)) return false;
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));  // what the system keeps of the registers
    if ((low & 0xe6) != 0xe6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const unsigned wanted = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // AVX512F, DQ, BW, VL
    return (b & wanted) == wanted;
  }();
  return here;
}

bool attention(const Blocks& b, const std::vector<Sequence>& sequences, const float* sink, int threads) {
  switch (b.number) {
    case Number::kFloat32: return all<Number::kFloat32>(b, sequences, sink, threads);
    case Number::kBfloat16: return all<Number::kBfloat16>(b, sequences, sink, threads);
    default: return all<Number::kFloat16>(b, sequences, sink, threads);
  }
}

#endif

}  // namespace attnkit
