"""Mainloop of the FP4 batched GEMM by block-scaled ``mma.sync``: codes by ``ldmatrix``, scales by words.

A 16 x 64 tile of codes is 16 rows of 32 bytes, so ``ldmatrix`` on 16-bit elements brings it as m16n8k16 wants one of
bf16. A lane loads the scales of a stage for both steps along K at once (``cuda/mma_block_scaled.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from torch_attnkit.cuda import mma_block_scaled as scaled
from torch_attnkit.cuda import warp_ops as op

from ...grouped_gemm.weight_scales import load_words
from ..plan import FP4_K_TILE, FP4_ROW, Fp4Config
from ..sm80.mainloop_dequant import first_rows

_STEPS = FP4_K_TILE // scaled.K


class Offsets(NamedTuple):
    """Where a lane reads a stage: rows of x and of weights for each step along K, and scales of both."""

    x: list[Int32]
    w: list[Int32]
    x_scales: Int32
    w_scales: Int32


class BlockScaledMainloop:
    output_scale = 1.0

    def __init__(self, config: Fp4Config):
        self.c, self.format = config, scaled.FORMATS[config.format]
        self.m_tiles = config.tokens // config.warps[0] // 16  # of a warp
        self.n_tiles = config.n // config.warps[1] // 8

    def offsets(self) -> Offsets:
        """Of this lane."""
        c, lane = self.c, cute.arch.lane_idx()
        x_first, w_first = first_rows(c)
        # Lane l addresses row l % 8 of the 8-row tile l // 8. Of x the tiles go down the tokens first, of the weights
        # along K.
        x_row = x_first + ((lane >> 3) & 1) * 8 + (lane & 7)
        w_row = w_first + (lane >> 4) * 8 + (lane & 7)
        swizzle = (lane >> 1) & 3
        return Offsets(
            [x_row * FP4_ROW + ((2 * k + (lane >> 4)) ^ swizzle) * 16 for k in range(_STEPS)],
            [w_row * FP4_ROW + ((2 * k + ((lane >> 3) & 1)) ^ swizzle) * 16 for k in range(_STEPS)],
            *(
                c.rows * FP4_ROW + (first + ((lane & 3) * 8 + (lane >> 2)) % min(rows, 32)) * c.scale_bytes
                for first, rows in ((x_first, self.m_tiles * 16), (w_first, self.n_tiles * 8))
            ),
        )

    @cute.jit
    def multiply(self, rSum: cute.Tensor, stage: Int32, own: Offsets):
        """Add this warp's part of the products of a stage."""
        x_scales = self._scales(stage + own.x_scales, self.m_tiles * 16)
        w_scales = self._scales(stage + own.w_scales, self.n_tiles * 8)
        for k in cutlass.range_constexpr(_STEPS):
            x, w = stage + own.x[k], stage + own.w[k]
            rX = [op.ldmatrix_x4(x + 16 * m * FP4_ROW) for m in range(self.m_tiles)]
            rW = [op.ldmatrix_x4(w + 16 * n * FP4_ROW) for n in range(self.n_tiles // 2)]
            at = const_expr(k * self.format.scale_bytes)  # in a row's scales of the stage
            for m in cutlass.range_constexpr(self.m_tiles):
                for n in cutlass.range_constexpr(self.n_tiles):
                    words = x_scales[m // scaled.A_TILES][at // 4], w_scales[n // scaled.B_TILES][at // 4]
                    new = scaled.mma(
                        self.format, rX[m], rW[n // 2][2 * (n % 2) : 2 * (n % 2) + 2],
                        [rSum[i, n, m] for i in range(4)], words, (m % scaled.A_TILES, n % scaled.B_TILES), at % 4,
                    )  # fmt: skip
                    for i in cutlass.range_constexpr(4):
                        rSum[i, n, m] = new[i]

    def _scales(self, at: Int32, rows: int) -> list[cute.Tensor]:
        """The lane's words of every 32 rows; of fewer rows some lanes have the same."""
        c = self.c
        return [load_words(at + 32 * i * c.scale_bytes, c.scale_bytes // 4) for i in range(-(-rows // 32))]
