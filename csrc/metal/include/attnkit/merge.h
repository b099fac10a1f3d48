// One row of attention from P partial rows: lse = log sum_p exp(lse_p), out = sum_p exp(lse_p - lse) part_p.
// A simdgroup works on MERGE_SPAN neighbouring elements of one row and reads every partial element and lse once: lane p
// holds the lse of partial p, the running maximum rescales what has been added, as in an online softmax.

constant constexpr int MERGE_SPAN = 128;
constant constexpr int MERGE_CELLS = MERGE_SPAN / 32 / WIDTH;  // vectors of a lane

#if WIDTH == 4
typedef float4 MergeCell;
#else
typedef float MergeCell;
#endif

struct MergeRow {
  int parts;
  int dim;
  long part_step;  // elements from one partial to the next, of the partials, of their lse and of their row sums
  long lse_step;
  long sum_step;
};

// ``weight`` is exp(lse - max) of each partial, divided by its row sum if there is one. A partial whose lse is -inf has
// seen nothing: its elements are not read. With FLASH an lse of +inf says the same, as FlashAttention-2 writes it.
template <bool FLASH, typename In, typename Out>
inline void merge_row(
    const device In* part,
    const device float* lse,
    const device float* row_sum,
    const device float* sink,
    device Out* out,
    device float* lse_out,
    thread const MergeRow& row,
    int first,
    uint lane) {
  MergeCell merged[MERGE_CELLS];
  ATTNKIT_UNROLL
  for (int c = 0; c < MERGE_CELLS; c++) {
    merged[c] = MergeCell(0.0f);
  }
  float lse_max = -INFINITY, sum = 0.0f;
  for (int p0 = 0; p0 < row.parts; p0 += 32) {
    const int mine = p0 + int(lane);
    float l = mine < row.parts ? lse[mine * row.lse_step] : -INFINITY;
    l = FLASH && l == INFINITY ? -INFINITY : l;
    const float new_max = max(lse_max, simd_max(l));
    // Nothing finite is subtracted of an infinity: -inf means no keys, and +inf stays what it is.
    const float base = isinf(new_max) ? 0.0f : new_max;
    const float rescale = exp(lse_max - base);
    float weight = exp(l - base);
    sum = sum * rescale + simd_sum(weight);
    if (row.sum_step >= 0 && l != -INFINITY && mine < row.parts) {
      weight /= row_sum[mine * row.sum_step];
    }
    ATTNKIT_UNROLL
    for (int c = 0; c < MERGE_CELLS; c++) {
      merged[c] *= rescale;
    }
    const int count = min(32, row.parts - p0);
    for (int p = 0; p < count; p++) {
      const float w = simd_shuffle(weight, ushort(p));
      if (simd_shuffle(l, ushort(p)) != -INFINITY) {
        const device In* from = part + (p0 + p) * row.part_step;
        ATTNKIT_UNROLL
        for (int c = 0; c < MERGE_CELLS; c++) {
          const int d = first + (c * 32 + int(lane)) * WIDTH;
          if (d < row.dim) {
            MergeCell x;
            read(from + d, x);
            merged[c] += w * x;
          }
        }
      }
    }
    lse_max = new_max;
  }
  const float log_sum = sum == 0.0f ? -INFINITY : lse_max + log(sum);
  float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
  if (sink != nullptr && sum != 0.0f) {
    scale /= 1.0f + exp(sink[0] - log_sum);
  }
  ATTNKIT_UNROLL
  for (int c = 0; c < MERGE_CELLS; c++) {
    const int d = first + (c * 32 + int(lane)) * WIDTH;
    if (d < row.dim) {
      write(out + d, merged[c] * scale);
    }
  }
  if (first == 0 && lane == 0) {
    lse_out[0] = log_sum;
  }
}
