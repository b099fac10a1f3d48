// 8x8 matrices held by a simdgroup: lane l holds the elements (row, col) and (row, col + 1) below. The products are in
// float for every model dtype, so nothing is rounded between the load and the store.
//
// The Metal Shading Language Specification leaves open which lane holds what. The map is that of Apple's MLX
// (github.com/ml-explore/mlx, mlx/backend/metal/kernels/steel/gemm/mma.h: BaseMMAFrag<T, 8, 8>::get_coord);
// known_answer.metal tries it before other results are believed.

struct Lane {
  int row;
  int col;
};

inline Lane fragment_lane(uint lane) {
  Lane at;
  at.row = int(((lane / 4) & 4) + (lane / 2) % 4);
  at.col = int(((lane / 4) & 2) * 2 + (lane % 2) * 2);
  return at;
}

// sum += a b
inline void multiply_add(thread float2& sum, float2 a, float2 b) {
  simdgroup_matrix<float, 8, 8> ma, mb, mc;
  reinterpret_cast<thread float2&>(ma.thread_elements()) = a;
  reinterpret_cast<thread float2&>(mb.thread_elements()) = b;
  reinterpret_cast<thread float2&>(mc.thread_elements()) = sum;
  simdgroup_multiply_accumulate(mc, ma, mb, mc);
  sum = reinterpret_cast<thread float2&>(mc.thread_elements());
}

// Over the eight rows, for each of the lane's two columns.
inline float2 column_max(float2 x) {
  x = max(x, simd_shuffle_xor(x, ushort(2)));
  x = max(x, simd_shuffle_xor(x, ushort(4)));
  return max(x, simd_shuffle_xor(x, ushort(16)));
}

inline float2 column_sum(float2 x) {
  x += simd_shuffle_xor(x, ushort(2));
  x += simd_shuffle_xor(x, ushort(4));
  return x + simd_shuffle_xor(x, ushort(16));
}
