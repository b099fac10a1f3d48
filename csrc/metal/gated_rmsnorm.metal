// out = w * y * rsqrt(mean(y^2) + eps) * silu(z), for rows of N elements, float inside and one rounding at the store.
// y (rows, N) of Y_TYPE, z and out (rows, N) of Z_TYPE, w (N) of W_TYPE. Bound by memory: y, z and out pass once.
//
// Grid: a threadgroup is ROWS * SIMDS simdgroups and normalises ROWS rows, of which SIMDS simdgroups share each;
// ceil(rows / ROWS) threadgroups along x. With ROWS > 1, SIMDS must be 1: the barrier is for one row.
// A thread keeps KEPT vectors of WIDTH elements of y between the sum and the store and reads what is beyond a second
// time. WIDTH 4 needs N, every step and every storage offset to be a multiple of 4.
//
// Defined by the host: Y_TYPE, Z_TYPE, W_TYPE, WIDTH, ROWS, SIMDS, KEPT, RANK.

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"

#if WIDTH == 4
typedef float4 Wide;
#else
typedef float Wide;
#endif

struct Axis {
  long size;
  long y_step;  // elements
  long z_step;
};

struct Shape {
  long n;
  long rows;
  Axis axes[RANK];  // the batch axes, outermost first
};

[[kernel, max_total_threads_per_threadgroup(32 * ROWS * SIMDS)]] void gated_rmsnorm(
    const device Y_TYPE* y [[buffer(0)]],
    const device Z_TYPE* z [[buffer(1)]],
    const device W_TYPE* w [[buffer(2)]],
    device Z_TYPE* out [[buffer(3)]],
    constant Shape& shape [[buffer(4)]],
    constant float& eps [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float sums[SIMDS];
  const int n = int(shape.n);
  const long row = long(group) * ROWS + simd / SIMDS;
  const bool live = row < shape.rows;
  const int stride = SIMDS * 32 * WIDTH;
  const int first = int((simd % SIMDS) * 32 + lane) * WIDTH;

  // Where the row lies: batch axes that step evenly have been merged by the host, so there is mostly one.
  long rest = live ? row : 0;
  out += rest * shape.n;
  for (int axis = RANK - 1; axis >= 0; axis--) {
    const long at = rest % shape.axes[axis].size;
    rest /= shape.axes[axis].size;
    y += at * shape.axes[axis].y_step;
    z += at * shape.axes[axis].z_step;
  }

  // The sum of squares, of what this thread keeps and of the rest of a long row.
  Wide kept[KEPT];
  float sum = 0.0f;
  ATTNKIT_UNROLL
  for (int i = 0; i < KEPT; i++) {
    kept[i] = Wide(0.0f);
    if (live && first + i * stride < n) {
      read(y + first + i * stride, kept[i]);
    }
    sum += sum_of(kept[i] * kept[i]);
  }
  if (live) {
    for (int at = first + KEPT * stride; at < n; at += stride) {
      Wide a;
      read(y + at, a);
      sum += sum_of(a * a);
    }
  }
  sum = simd_sum(sum);
  if (SIMDS > 1) {
    if (lane == 0) {
      sums[simd] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum = simd_sum(int(lane) < SIMDS ? sums[lane] : 0.0f);
  }

  // The product, from what was kept, or from y again.
  const float scale = rsqrt(sum / float(n) + eps);
  if (live) {
    ATTNKIT_UNROLL
    for (int i = 0; i < KEPT; i++) {
      const int at = first + i * stride;
      if (at < n) {
        Wide g, weight;
        read(z + at, g);
        read(w + at, weight);
        write(out + at, kept[i] * scale * weight * (g / (1.0f + exp(-g))));
      }
    }
    for (int at = first + KEPT * stride; at < n; at += stride) {
      Wide a, g, weight;
      read(y + at, a);
      read(z + at, g);
      read(w + at, weight);
      write(out + at, a * scale * weight * (g / (1.0f + exp(-g))));
    }
  }
}
