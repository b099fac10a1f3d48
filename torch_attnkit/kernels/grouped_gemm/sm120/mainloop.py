"""Mainloop of FP4 by block-scaled ``mma.sync``: codes by ``ldmatrix``, scales by words.

A 16 x 64 tile of codes is 16 rows of 32 bytes, so ``ldmatrix`` on 16-bit elements brings it as m16n8k16 wants one of
bf16. A lane loads the scales of a stage for both steps along K at once (``cuda/mma_block_scaled.py``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from torch_attnkit.cuda import mma_block_scaled as scaled
from torch_attnkit.cuda import warp_ops as op

from ..weight_scales import load_words
from .config import K_TILE, ROW_BYTES

_STEPS = K_TILE // 64  # of FP4 by FP4
_FP4_BITS = 0x3C3C3C3C  # of four bytes


class Offsets(NamedTuple):
    """Where a lane reads a stage: rows of x and of weights for each step along K, or for two, and scales of both."""

    x: list[Int32]
    w: list[Int32]
    x_scales: Int32
    w_scales: Int32


def first_rows(config: Any) -> tuple[Int32, Int32]:
    """Of a warp in a stage: of tokens, and of the weights behind them."""
    c, warp = config, cute.arch.warp_idx()
    along_tokens = c.warps[0].bit_length() - 1  # a power of two
    return (
        (warp & (c.warps[0] - 1)) * (c.tokens // c.warps[0]),
        c.tokens + (warp >> along_tokens) * (c.n // c.warps[1]),
    )


def scale_offsets(config: Any) -> list[Int32]:
    """In a stage, of the word of scales that a lane has first: of tokens, and of weights. Of fewer than 32 rows some
    lanes have the same."""
    c, lane = config, cute.arch.lane_idx()
    rows = c.m_tiles * 16, c.n_tiles * 8
    return [
        c.scales_at + (first + ((lane & 3) * 8 + (lane >> 2)) % min(count, 32)) * c.scale_bytes
        for first, count in zip(first_rows(c), rows, strict=True)
    ]


def load_scales(config: Any, at: Int32, rows: int) -> list[cute.Tensor]:
    """The lane's words of every 32 rows."""
    c = config
    return [load_words(at + 32 * i * c.scale_bytes, c.scale_bytes // 4) for i in range(-(-rows // 32))]


class BlockScaledMainloop:
    """FP4 by FP4. Of ``config`` it takes ``format``, ``tokens`` and ``n`` of a work tile, ``warps`` along both,
    ``m_tiles`` and ``n_tiles`` of a warp, ``scales_at`` in a stage, and ``scale_bytes`` of a row there."""

    output_scale = 1.0

    def __init__(self, config: Any):
        self.c, self.format = config, scaled.FORMATS[config.format]

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
            [x_row * ROW_BYTES + ((2 * k + (lane >> 4)) ^ swizzle) * 16 for k in range(_STEPS)],
            [w_row * ROW_BYTES + ((2 * k + ((lane >> 3) & 1)) ^ swizzle) * 16 for k in range(_STEPS)],
            *scale_offsets(c),
        )

    @cute.jit
    def multiply(self, rSum: cute.Tensor, stage: Int32, own: Offsets):
        """Add this warp's part of the products of a stage."""
        x_scales = load_scales(self.c, stage + own.x_scales, self.c.m_tiles * 16)
        w_scales = load_scales(self.c, stage + own.w_scales, self.c.n_tiles * 8)
        for k in cutlass.range_constexpr(_STEPS):
            x, w = stage + own.x[k], stage + own.w[k]
            rX = [op.ldmatrix_x4(x + 16 * m * ROW_BYTES) for m in range(self.c.m_tiles)]
            rW = [op.ldmatrix_x4(w + 16 * n * ROW_BYTES) for n in range(self.c.n_tiles // 2)]
            at = const_expr(k * self.format.scale_bytes)  # in a row's scales of the stage
            for m in cutlass.range_constexpr(self.c.m_tiles):
                for n in cutlass.range_constexpr(self.c.n_tiles):
                    words = x_scales[m // scaled.A_TILES][at // 4], w_scales[n // scaled.B_TILES][at // 4]
                    new = scaled.mma(
                        self.format, rX[m], rW[n // 2][2 * (n % 2) : 2 * (n % 2) + 2],
                        [rSum[i, n, m] for i in range(4)], words, (m % scaled.A_TILES, n % scaled.B_TILES), at % 4,
                    )  # fmt: skip
                    for i in cutlass.range_constexpr(4):
                        rSum[i, n, m] = new[i]


class Mxfp8Mainloop:
    """E4M3 by FP4, which becomes bytes in registers. Of 32 elements of a token those at even places come first, so that
    a word of codes is operand B as it lies: the low halves of its bytes are of the first 16 of K, the high ones of the
    others. Of ``config`` it takes ``weights_at`` and ``token_bytes`` besides."""

    def __init__(self, config: Any):
        self.c, self.format = config, scaled.FORMATS["mxfp8"]

    def offsets(self) -> Offsets:
        """Of this lane: of x for each of four steps; of weights for two, whose codes are chunks of 16 bytes."""
        c, lane = self.c, cute.arch.lane_idx()
        x_first, w_first = first_rows(c)
        x_row = x_first + ((lane >> 3) & 1) * 8 + (lane & 7)
        w_row = w_first - c.tokens + (lane >> 4) * 8 + (lane & 7)
        return Offsets(
            [x_row * c.token_bytes + ((2 * k + (lane >> 4)) ^ (lane & 7)) * 16 for k in range(K_TILE // 32)],
            [
                c.weights_at + w_row * ROW_BYTES + ((2 * k + ((lane >> 3) & 1)) ^ ((lane >> 1) & 3)) * 16
                for k in range(K_TILE // 64)
            ],
            *scale_offsets(c),
        )

    @cute.jit
    def multiply(self, rSum: cute.Tensor, stage: Int32, own: Offsets):
        """Add this warp's part of the products of a stage."""
        x_scales = load_scales(self.c, stage + own.x_scales, self.c.m_tiles * 16)
        w_scales = load_scales(self.c, stage + own.w_scales, self.c.n_tiles * 8)
        for pair in cutlass.range_constexpr(K_TILE // 64):
            w = stage + own.w[pair]
            rW = [op.ldmatrix_x4(w + 16 * n * ROW_BYTES) for n in range(self.c.n_tiles // 2)]
            for half in cutlass.range_constexpr(2):
                k = const_expr(2 * pair + half)
                x = stage + own.x[k]
                rX = [op.ldmatrix_x4(x + 16 * m * self.c.token_bytes) for m in range(self.c.m_tiles)]
                for n in cutlass.range_constexpr(self.c.n_tiles):
                    word = Int32(rW[n // 2][2 * (n % 2) + half])
                    b = [(word << 2) & _FP4_BITS, (word >> 2) & _FP4_BITS]
                    for m in cutlass.range_constexpr(self.c.m_tiles):
                        words = x_scales[m // scaled.A_TILES][0], w_scales[n // scaled.B_TILES][0]
                        new = scaled.mma(
                            self.format, rX[m], b, [rSum[i, n, m] for i in range(4)], words,
                            (m % scaled.A_TILES, n % scaled.B_TILES), k,
                        )  # fmt: skip
                        for i in cutlass.range_constexpr(4):
                            rSum[i, n, m] = new[i]
