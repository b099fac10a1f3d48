"""Epilogue of the batched GEMM by ``mma.sync``: float32 sums in registers, rounded, to (T, G, N)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from torch_attnkit.cuda import copies

from .plan import Config


class StoreEpilogue:
    """``even``: two neighbouring results of a token are stored at once."""

    def __init__(self, config: Config, even: bool):
        self.c, self.even = config, even

    @cute.jit
    def run(self, rSum: cute.Tensor, mOut: cute.Tensor, group: Int32, first_t: Int32, first_n: Int32):
        """Round the sums and store those that are results."""
        c = self.c
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        first_t += warp % c.warps[0] * (c.m_tiles * 16) + lane // 4
        first_n += warp // c.warps[0] * (c.n_tiles * 8) + lane % 4 * 2
        width = const_expr(2 if self.even else 1)
        for m in cutlass.range_constexpr(c.m_tiles):
            for half in cutlass.range_constexpr(2):
                token = first_t + m * 16 + half * 8
                out = mOut.iterator + (Int64(token) * mOut.shape[1] + group) * mOut.shape[2]
                for n in cutlass.range_constexpr(c.n_tiles):
                    for i in cutlass.range_constexpr(0, 2, width):
                        at = first_n + n * 8 + i
                        if token < mOut.shape[0] and at < mOut.shape[2]:
                            rOut = cute.make_rmem_tensor(width, mOut.element_type)
                            for j in cutlass.range_constexpr(width):
                                rOut[j] = rSum[2 * half + i + j, n, m].to(mOut.element_type)
                            copies.store(rOut, out + at)
