// gated_rmsnorm in one pass over each row.
#include <cmath>

#include "kernels.h"
#include "numbers.h"

namespace attnkit {

// y, z, out (rows, N), w (N).
ATTNKIT_KERNEL void gated_rmsnorm(const float* y, const float* z, const float* w, float* out, int64_t rows, int64_t N,
                                  float eps) {
  for (int64_t row = 0; row < rows; row++, y += N, z += N, out += N) {
    const float r = 1.0f / std::sqrt(dot(y, y, N) / float(N) + eps);
    for (int64_t i = 0; i < N; i++) out[i] = y[i] * r * w[i] * silu(z[i]);
  }
}

}  // namespace attnkit
