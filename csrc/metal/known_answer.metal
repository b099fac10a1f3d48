// What a GPU must compute before anything else that it computes is worth a look: threadgroup memory behind a barrier,
// exchange between lanes, 8x8 products in float and bfloat, rounding to half and bfloat, 64-bit arguments. Virtual GPUs have got each of
// these wrong, without an error. x (n) float, out (ANSWERS, n) float; n = 128 * threadgroups.
//
// Grid: any number of threadgroups along x, of 4 simdgroups each.

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#include "attnkit/fragment.h"

struct Known {
  long n;
  long large;  // beyond 32 bits
};

[[kernel, max_total_threads_per_threadgroup(128)]] void known_answer(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    constant Known& shape [[buffer(2)]],
    constant float& scale [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float shared[128];
  const int t = int(simd * 32 + lane);
  const long i = long(group) * 128 + t, n = shape.n;
  const float mine = x[i];
  shared[t] = mine;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = shared[127 - t];
  out[n + i] = simd_sum(mine);
  out[2 * n + i] = simd_max(mine);
  out[3 * n + i] = simd_shuffle_xor(mine, ushort(5));

  // a[r][c] = r + 2 c and b[r][c] = 3 r - c, each times the threadgroup's number and one.
  const Lane at = fragment_lane(lane);
  const float by = float(group + 1), row = float(at.row), col = float(at.col);
  float2 sum = float2(mine, -mine);
  multiply_add(sum, by * float2(row + 2.0f * col, row + 2.0f * col + 2.0f),
               float2(3.0f * row - col, 3.0f * row - col - 1.0f));
  out[4 * n + i] = sum.x;
  out[5 * n + i] = sum.y;
  out[6 * n + i] = float(half(mine * scale));
  out[7 * n + i] = float(bfloat(mine * scale));
  out[8 * n + i] = float(shape.large / (i + 1) % 1000);
  out[9 * n + i] = exp(mine * scale);

  // The same product of bfloat operands, into float: all of a and b are small integers, which bfloat has.
  simdgroup_matrix<bfloat, 8, 8> narrow_a, narrow_b;
  simdgroup_matrix<float, 8, 8> wide;
  narrow_a.thread_elements()[0] = bfloat(row + 2.0f * col);
  narrow_a.thread_elements()[1] = bfloat(row + 2.0f * col + 2.0f);
  narrow_b.thread_elements()[0] = bfloat(3.0f * row - col);
  narrow_b.thread_elements()[1] = bfloat(3.0f * row - col - 1.0f);
  wide.thread_elements()[0] = mine;
  wide.thread_elements()[1] = -mine;
  simdgroup_multiply_accumulate(wide, narrow_a, narrow_b, wide);
  out[10 * n + i] = wide.thread_elements()[0];
  out[11 * n + i] = wide.thread_elements()[1];
  const bfloat small = bfloat(mine * scale);
  out[12 * n + i] = float(small) * float(small) + mine;
}
