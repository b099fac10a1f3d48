// fp4_moe for few tokens: a row of weights is read back into the cache once, and multiplied there with every token of
// its expert. Nothing that was read back is kept.
#include <algorithm>
#include <cmath>
#include <limits>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels.h"
#include "numbers.h"

namespace attnkit {

namespace {

constexpr int64_t kWorthAThread = 1 << 21;  // weights: some 0.3 ms, ten times what a thread costs

// The slots (pairs of a token and an expert) that have an expert, sorted by it: those of experts[i] begin at first[i].
struct Slots {
  std::vector<int64_t> slots, experts, first;

  Slots(Integers indices, int64_t count) {
    for (int64_t s = 0; s < count; s++)
      if (indices[s] >= 0) slots.push_back(s);
    std::stable_sort(slots.begin(), slots.end(), [&](int64_t a, int64_t b) { return indices[a] < indices[b]; });
    for (size_t i = 0; i < slots.size(); i++)
      if (!i || indices[slots[i]] != experts.back()) experts.push_back(indices[slots[i]]), first.push_back(int64_t(i));
    first.push_back(int64_t(slots.size()));
  }
};

// Codes (columns / 2) as numbers (columns). Twice a code is a small integer, and one of bytes: many fit into a vector.
ATTNKIT_INSIDE void read(const uint8_t* codes, const uint8_t* scales, const float* scale_of, float over, int64_t block,
                         int64_t columns, int8_t* twice, float* numbers) {
  for (int64_t i = 0; i < columns / 2; i++) {
    for (int high = 0; high < 2; high++) {
      const uint8_t code = high ? codes[i] >> 4 : codes[i] & 15;
      const uint8_t m = code & 7;  // 0 1 2 3 4 5 6 7 stand for half of 0 1 2 3 4 6 8 12
      const uint8_t size = uint8_t(m + (m > 4 ? m - 4 : 0) + 2 * (m > 6 ? m - 6 : 0));
      const int8_t sign = int8_t(-(code >> 3));
      twice[2 * i + high] = int8_t((int8_t(size) ^ sign) - sign);
    }
  }
  for (int64_t at = 0; at < columns; at += block, twice += block, numbers += block) {
    const float scale = scale_of[*scales++] / over;
    for (int64_t i = 0; i < block; i++) numbers[i] = 0.5f * float(twice[i]) * scale;
  }
}

// Where a thread reads a row back (columns).
struct Row {
  std::vector<int8_t> twice;
  std::vector<float> numbers;
};

// Rows [begin, end) of the i-th expert times its slots' x (slots, columns): into out (slots, rows).
ATTNKIT_KERNEL void multiply(const Matrices& m, const Experts& experts, const Slots& slots, size_t i, int64_t begin,
                             int64_t end, const float* x, float* out, Row& room) {
  int8_t* twice = room.twice.data();
  float* numbers = room.numbers.data();
  const int64_t e = slots.experts[i];
  const float over = m.global ? m.global[e] : 1.0f;
  for (int64_t row = begin; row < end; row++) {
    const uint8_t* codes = m.codes + e * m.codes_expert + row * m.codes_row;
    const uint8_t* scales = m.scales + e * m.scales_expert + row * m.scales_row;
    if (experts.block == 32)
      read(codes, scales, experts.scale_of, over, 32, m.columns, twice, numbers);
    else
      read(codes, scales, experts.scale_of, over, 16, m.columns, twice, numbers);
    const float bias = m.bias ? m.bias[e * m.rows + row] : 0.0f;
    for (int64_t s = slots.first[i]; s < slots.first[i + 1]; s++)
      out[s * m.rows + row] = dot(numbers, x + s * m.columns, m.columns) + bias;
  }
}

// All of it, the rows of all experts dealt out to threads in equal parts.
void products(const Matrices& m, const Experts& experts, const Slots& slots, const float* x, float* out, int threads) {
  const int64_t total = int64_t(slots.experts.size()) * m.rows;
  const int64_t parts = std::clamp<int64_t>(total * m.columns / kWorthAThread, 1, threads);
  const auto part = [&](int64_t p) {
    Row room{std::vector<int8_t>(m.columns), std::vector<float>(m.columns)};
    for (int64_t at = total * p / parts, end = total * (p + 1) / parts; at < end;) {
      const int64_t i = at / m.rows, row = at % m.rows, rows = std::min(m.rows - row, end - at);
      multiply(m, experts, slots, size_t(i), row, row + rows, x, out, room);
      at += rows;
    }
  };
  std::vector<std::thread> others;
  for (int64_t p = 1; p < parts; p++) {
    try {
      others.emplace_back(part, p);
    } catch (const std::system_error&) {  // the system has no more threads to give
      part(p);
    }
  }
  part(0);
  for (auto& other : others) other.join();
}

// To the nearest number of the type, ties to even.
ATTNKIT_INSIDE float rounded(float x, Rounding to) {
  const auto bits = __builtin_bit_cast(uint32_t, x);
  if (to == Rounding::kNone || !(std::fabs(x) <= 3.402823466e38f)) return x;
  if (to == Rounding::kBfloat16) return __builtin_bit_cast(float, (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
  // Below 2^-14 float16 has steps of 2^-24, as float32 has between 0.5 and 1.
  if (std::fabs(x) < 0x1p-14f) return x < 0 ? -((0.5f - x) - 0.5f) : (x + 0.5f) - 0.5f;
  const float found = __builtin_bit_cast(float, (bits + 0xfff + (bits >> 13 & 1)) & 0xffffe000u);
  return std::fabs(found) < 65536.0f ? found : std::copysign(std::numeric_limits<float>::infinity(), x);
}

// Gate and up (2M) to the gated unit (M).
ATTNKIT_KERNEL void gated(const Experts& e, const float* both, int64_t M, float* h) {
  for (int64_t i = 0; i < M; i++) {
    float gate = both[e.interleaved ? 2 * i : i], up = both[e.interleaved ? 2 * i + 1 : M + i];
    gate = gate > e.limit ? e.limit : gate;  // NaN stays
    up = up > e.limit ? e.limit : up;
    up = up < -e.limit ? -e.limit : up;
    h[i] = e.gptoss ? gate / (1.0f + exp_of(-e.alpha * gate)) * (up + 1.0f) : silu(gate) * up;
  }
  if (e.rounding != Rounding::kNone)
    for (int64_t i = 0; i < M; i++) h[i] = rounded(h[i], e.rounding);
}

// Whether the global numbers of the experts that are chosen are accepted; those of the others may be anything.
bool within(const float* global, const Integers& indices, int64_t slots, float most) {
  for (int64_t s = 0; global && s < slots; s++)
    if (indices[s] >= 0 && !(global[indices[s]] > 0 && global[indices[s]] <= most)) return false;
  return true;
}

}  // namespace

bool fp4_moe(const Experts& experts, const float* x, const float* weights, Integers indices, float* out, int64_t T,
             int64_t K, int64_t E, int threads) {
  const Matrices &up = experts.up, &down = experts.down;
  const int64_t N = up.columns, M = down.columns;
  for (int64_t s = 0; s < T * K; s++)
    if (indices[s] < -1 || indices[s] >= E) return false;
  for (const Matrices* each : {&up, &down})
    if (!within(each->global, indices, T * K, experts.most_global)) return false;
  const Slots slots(indices, T * K);
  const auto n = int64_t(slots.slots.size());
  std::vector<float> tokens(n * N), both(n * 2 * M), h(n * M), y(n * N);
  for (int64_t s = 0; s < n; s++) std::copy_n(x + slots.slots[s] / K * N, N, &tokens[s * N]);
  products(up, experts, slots, tokens.data(), both.data(), threads);
  for (int64_t s = 0; s < n; s++) gated(experts, &both[s * 2 * M], M, &h[s * M]);
  products(down, experts, slots, h.data(), y.data(), threads);
  // In the order of k, whatever the order of experts.
  std::vector<int64_t> place(T * K, -1);
  for (int64_t s = 0; s < n; s++) place[slots.slots[s]] = s;
  std::fill_n(out, T * N, 0.0f);
  for (int64_t slot = 0; slot < T * K; slot++) {
    if (place[slot] < 0) continue;
    const float *from = &y[place[slot] * N], weight = weights[slot];
    float* to = out + slot / K * N;
    for (int64_t i = 0; i < N; i++) to[i] += from[i] * weight;
  }
  return true;
}

}  // namespace attnkit
