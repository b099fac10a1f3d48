// The TOPK experts of each row of logits with the largest keys, ties to the lowest index, and their weights. logits
// (rows, experts) of TYPE, bias (experts) float; weights (rows, TOPK) float and indices (rows, TOPK) int.
//
// A simdgroup has a row, lane l the experts l, l + 32 and so on, KEPT of them as keys in registers; with KEPT 0 the row
// is read again for every choice. A round takes the largest key of all lanes and the lowest index that has it. Lane k
// then weighs the expert of round k, k + 32 and so on; of more than 32 choices, all wait in the outputs meanwhile.
//
// Grid: at least ``rows`` simdgroups along x, in threadgroups of any number of simdgroups.
//
// Defined by the host: TYPE, TOPK, KEPT, SOFTMAX (else sqrt(softplus)), BIAS, OVER_ALL, RENORMALIZE.

struct Shape {
  long rows;
  long experts;
  long step;  // elements from one row of logits to the next
};

constant constexpr bool FEW = TOPK <= 32;

// What experts are compared by.
inline int key_of(const device TYPE* logits, const device float* bias, int expert) {
  const uint bits = bits_of(logits[expert]);
  if (SOFTMAX) {
    return ordered(bits);
  }
  const float s = sqrt_softplus(as_type<float>(bits));
  return ordered(as_type<uint>(BIAS ? s + bias[expert] : s));
}

// The experts of a row, one a call.
struct Choice {
  int key;  // of the last one
  int expert;
#if KEPT
  int keys[KEPT];
#endif
};

inline void begin(
    thread Choice& c, const device TYPE* logits, const device float* bias, int experts, int lane) {
  c.key = NO_EXPERT;
  c.expert = -1;
#if KEPT
  ATTNKIT_UNROLL
  for (int j = 0; j < KEPT; j++) {
    const int expert = j * 32 + lane;
    c.keys[j] = expert < experts ? key_of(logits, bias, expert) : NONE;
  }
#endif
}

inline void next(
    thread Choice& c, const device TYPE* logits, const device float* bias, int experts, int lane) {
  int best = NONE, at = NO_EXPERT;
#if KEPT
  ATTNKIT_UNROLL
  for (int j = 0; j < KEPT; j++) {
    const int expert = j * 32 + lane;
    c.keys[j] = expert == c.expert ? NONE : c.keys[j];
    at = c.keys[j] > best ? expert : at;
    best = max(best, c.keys[j]);
  }
#else
  for (int expert = lane; expert < experts; expert += 32) {
    const int key = key_of(logits, bias, expert);
    const bool left = key < c.key || (key == c.key && expert > c.expert);
    at = left && key > best ? expert : at;
    best = left ? max(best, key) : best;
  }
#endif
  c.key = simd_max(best);
  c.expert = simd_min(best == c.key ? at : NO_EXPERT);
}

inline float number(const device TYPE* logits, int expert) {
  return as_type<float>(bits_of(logits[expert]));
}

kernel void route_rows(
    const device TYPE* logits [[buffer(0)]],
    const device float* bias [[buffer(1)]],
    device float* weights [[buffer(2)]],
    device int* indices [[buffer(3)]],
    constant Shape& shape [[buffer(4)]],
    constant float& route_scale [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]],
    uint simds [[simdgroups_per_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const long row = long(group) * simds + simd;
  if (row >= shape.rows) {
    return;
  }
  const int experts = int(shape.experts);
  logits += row * shape.step;
  weights += row * TOPK;
  indices += row * TOPK;

  Choice choice;
  begin(choice, logits, bias, experts, int(lane));
  int first = 0, mine = 0;
  for (int k = 0; k < TOPK; k++) {
    next(choice, logits, bias, experts, int(lane));
    first = k == 0 ? choice.expert : first;
    if (k % 32 == int(lane)) {
      mine = choice.expert;
      if (!FEW) {
        indices[k] = mine;
      }
    }
  }

  // Nothing is subtracted of a row that is nothing but -inf.
  const float top = number(logits, first), base = isinf(top) ? 0.0f : top;
  float weight = 0.0f, sum = 0.0f;
  for (int k = int(lane); k < TOPK; k += 32) {
    const float x = number(logits, FEW ? mine : indices[k]);
    weight = SOFTMAX ? exponential(x - base) : sqrt_softplus(x);
    sum += weight;
    if (!FEW) {
      weights[k] = weight;
    }
  }
  sum = simd_sum(sum);
  float total = 1.0f;
  if (SOFTMAX) {
    total = sum;
    if (OVER_ALL) {
      total = 0.0f;
      for (int expert = int(lane); expert < experts; expert += 32) {
        total += exponential(number(logits, expert) - base);
      }
      total = simd_sum(total);
    }
    total = total == 0.0f ? 1.0f : total;
  }
  // The softmax first, and what the chosen have of it is what they may be divided by once more.
  const float over = RENORMALIZE ? sum / total + TINY : 1.0f;
  for (int k = int(lane); k < TOPK; k += 32) {
    weights[k] = (FEW ? weight : weights[k]) / total / over * route_scale;
    if (FEW) {
      indices[k] = mine;
    }
  }
}
