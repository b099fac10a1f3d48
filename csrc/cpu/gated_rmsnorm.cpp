// gated_rmsnorm in one pass over each row.
#include <cmath>

#include "kernels.h"
#include "numbers.h"

namespace attnkit {

ATTNKIT_KERNEL void gated_rmsnorm(const Norm& n, const float* y, const float* z, const float* w, float* out) {
  const int64_t N = n.N;
  for (int64_t row = 0; row < n.rows; row++, y += N, z += N, out += N) {
    const float r = 1.0f / std::sqrt(dot(y, y, N) / float(N) + n.eps);
    for (int64_t i = 0; i < N; i++) out[i] = y[i] * r * w[i] * silu(z[i]);
  }
}

}  // namespace attnkit
