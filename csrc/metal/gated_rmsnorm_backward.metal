// Gradients of out = w * y * rsqrt(mean(y^2) + eps) * silu(z), for rows of N elements, float inside and one rounding at
// the store. With u = y r, gate = silu(z), h = grad w gate: dy = r (h - u mean(h u)), dz = grad w u silu'(z); dw is the
// sum over rows of grad u gate, in an order that the grid alone decides. grad, y, z pass once where a row is kept.
//
// Grid of gated_rmsnorm_backward: a threadgroup is ROWS * SIMDS simdgroups and works on ROWS rows side by side, of which
// SIMDS simdgroups share each, then on the next ROWS that are its own: PARTS threadgroups along x, of which each leaves
// ROWS rows of sums. With ROWS > 1, SIMDS must be 1: the barrier is for one row. A thread has the same columns in every
// row: it adds up its shares of dw in registers for its first KEPT vectors of WIDTH elements, and in its own places of
// the sums for those beyond. WIDTH 4 needs N, every step and every storage offset to be a multiple of 4.
// Grid of gated_rmsnorm_sums: a threadgroup of SUM_SIMDS simdgroups has 32 columns of the sums, one a lane;
// ceil(N / 32) threadgroups along x.
//
// Defined by the host: Y_TYPE, Z_TYPE, W_TYPE, WIDTH, ROWS, SIMDS, KEPT, RANK, SUM_SIMDS.

#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"

#if WIDTH == 1
typedef float Wide;
#else
typedef float4 Wide;
#endif

struct Axis {
  long size;
  long grad_step;  // elements
  long y_step;
  long z_step;
};

struct Shape {
  long n;
  long rows;
  long parts;       // threadgroups
  Axis axes[RANK];  // the batch axes, outermost first
};

// One row of each input.
struct Row {
  const device Z_TYPE* grad;
  const device Y_TYPE* y;
  const device Z_TYPE* z;
};

// What a vector of grad, z and w makes of the gradients: of u, of z over u, and of w over u.
struct Products {
  Wide h;
  Wide slope;
  Wide share;
};

inline Products products(Row row, const device W_TYPE* weights, int at) {
  Wide g, z, w;
  read(row.grad + at, g);
  read(row.z + at, z);
  read(weights + at, w);
  const Wide s = 1.0f / (1.0f + exp(-z));
  const Wide other = 1.0f / (1.0f + exp(z));
  const Wide gate = z * s;
  Products made;
  made.h = g * w * gate;
  made.slope = g * w * (s * (1.0f + z * other));
  made.share = g * gate;
  return made;
}

// h - u mean(h u). Of a row of one element that is h (1 - u^2), of which rounding would leave nothing: it is h eps r^2.
inline Wide centred(Wide h, Wide u, float mean, int n, float eps, float scale) {
  return n == 1 ? h * (eps * scale * scale) : h - u * mean;
}

// Stores dy and dz of one vector of a row; returns the row's share of dw.
inline Wide finished(Row in, const device W_TYPE* w, int at, int n, float eps, float scale, float mean,
                     device Y_TYPE* to_y, device Z_TYPE* to_z) {
  Wide a;
  read(in.y + at, a);
  const Products made = products(in, w, at);
  const Wide u = a * scale;
  write(to_y + at, scale * centred(made.h, u, mean, n, eps, scale));
  write(to_z + at, made.slope * u);
  return made.share * u;
}

[[kernel, max_total_threads_per_threadgroup(32 * ROWS * SIMDS)]] void gated_rmsnorm_backward(
    const device Z_TYPE* grads [[buffer(0)]],
    const device Y_TYPE* ys [[buffer(1)]],
    const device Z_TYPE* zs [[buffer(2)]],
    const device W_TYPE* w [[buffer(3)]],
    device Y_TYPE* dy [[buffer(4)]],
    device Z_TYPE* dz [[buffer(5)]],
    device float* sums [[buffer(6)]],  // (parts * ROWS, n)
    constant Shape& shape [[buffer(7)]],
    constant float& eps [[buffer(8)]],
    uint group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float squares[2][SIMDS];  // of this row and of the next, so that one barrier a row is enough
  threadgroup float dots[2][SIMDS];
  const int n = int(shape.n);
  const int slot = int(simd) / SIMDS;
  const int stride = SIMDS * 32 * WIDTH;
  const int first = int((simd % SIMDS) * 32 + lane) * WIDTH;
  device float* mine = sums + (long(group) * ROWS + slot) * shape.n;

  Wide kept[KEPT];
  ATTNKIT_UNROLL
  for (int i = 0; i < KEPT; i++) {
    kept[i] = Wide(0.0f);
  }
  for (int at = first + KEPT * stride; at < n; at += stride) {
    write(mine + at, Wide(0.0f));
  }

  int turn = 0;
  for (long start = long(group) * ROWS; start < shape.rows; start += shape.parts * ROWS) {
    const long row = start + slot;
    const bool live = row < shape.rows;
    Row in = {grads, ys, zs};
    long rest = live ? row : 0;
    for (int axis = RANK - 1; axis >= 0; axis--) {
      const long at = rest % shape.axes[axis].size;
      rest /= shape.axes[axis].size;
      in.grad += at * shape.axes[axis].grad_step;
      in.y += at * shape.axes[axis].y_step;
      in.z += at * shape.axes[axis].z_step;
    }

    float square = 0.0f;
    float dot = 0.0f;
    if (live) {
      for (int at = first; at < n; at += stride) {
        Wide a;
        read(in.y + at, a);
        square += sum_of(a * a);
        dot += sum_of(products(in, w, at).h * a);
      }
    }
    square = simd_sum(square);
    dot = simd_sum(dot);
    if (SIMDS > 1) {
      if (lane == 0) {
        squares[turn][simd] = square;
        dots[turn][simd] = dot;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      square = simd_sum(int(lane) < SIMDS ? squares[turn][lane] : 0.0f);
      dot = simd_sum(int(lane) < SIMDS ? dots[turn][lane] : 0.0f);
      turn = 1 - turn;
    }

    const float scale = rsqrt(square / float(n) + eps);
    const float mean = dot / float(n) * scale;  // of h u
    if (live) {
      device Y_TYPE* to_y = dy + row * shape.n;
      device Z_TYPE* to_z = dz + row * shape.n;
      ATTNKIT_UNROLL
      for (int i = 0; i < KEPT; i++) {
        const int at = first + i * stride;
        if (at < n) {
          kept[i] += finished(in, w, at, n, eps, scale, mean, to_y, to_z);
        }
      }
      for (int at = first + KEPT * stride; at < n; at += stride) {
        Wide share;
        read(mine + at, share);
        write(mine + at, share + finished(in, w, at, n, eps, scale, mean, to_y, to_z));
      }
    }
  }
  ATTNKIT_UNROLL
  for (int i = 0; i < KEPT; i++) {
    if (first + i * stride < n) {
      write(mine + first + i * stride, kept[i]);
    }
  }
}

struct Sums {
  long n;
  long parts;  // rows of sums
};

[[kernel, max_total_threads_per_threadgroup(32 * SUM_SIMDS)]] void gated_rmsnorm_sums(
    const device float* sums [[buffer(0)]],  // (parts, n)
    device W_TYPE* dw [[buffer(1)]],
    constant Sums& shape [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float totals[SUM_SIMDS][32];
  const long at = long(group) * 32 + lane;
  float total = 0.0f;
  if (at < shape.n) {
    for (long part = simd; part < shape.parts; part += SUM_SIMDS) {
      total += sums[part * shape.n + at];
    }
  }
  totals[simd][lane] = total;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd == 0 && at < shape.n) {
    float whole = 0.0f;
    ATTNKIT_UNROLL
    for (int s = 0; s < SUM_SIMDS; s++) {
      whole += totals[s][lane];
    }
    dw[at] = W_TYPE(whole);
  }
}
