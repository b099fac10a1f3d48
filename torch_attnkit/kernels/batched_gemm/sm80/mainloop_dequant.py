"""Mainloop of the FP4 batched GEMM by ``mma.sync`` of bf16: both operands are dequantised in registers.

Lane 4 g + t has 16 bytes, 32 elements of K, of row g of every 8: quarter t of a stage's row. A word of it is operands
of two m16n8k16, in an order of K that is the same for x and for the weights. Codes times scales have at most six
significant bits, so bf16 holds them. Weights are too small by 2^LOWERED (``cuda/fp4_weights.py``), and so is x in
NVFP4; x in MXFP4 is multiplied twice instead, and has any scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint8, Uint16, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda import fp4
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.asm import asm
from torch_attnkit.cuda.fp4_weights import LOWERED, both, both_of_two, decode, factors_of_e4m3, factors_of_e8m0

from ...grouped_gemm.sm120.config import ROW_BYTES
from ...grouped_gemm.sm120.mainloop import first_rows
from ...grouped_gemm.weight_scales import load_words
from ..plan import Fp4Config

_TWO_TO_126 = 0x7E807E80  # in bf16, twice: by which codes become their values
_MINUS_ZERO = 0x80008000


@dsl_user_op
def _multiply(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two products of bf16, rounded to nearest; targets before sm_90 have them as sums with -0 alone."""
    return asm(Uint32, [a, b, Uint32(_MINUS_ZERO)], "fma.rn.bf16x2 $0, $1, $2, $3;", loc=loc, ip=ip)


class Offsets(NamedTuple):
    """Where a lane reads a stage: rows of x and of weights, and their scales."""

    x: Int32
    w: Int32
    x_scales: Int32
    w_scales: Int32


class DequantMainloop:
    def __init__(self, config: Fp4Config):
        self.c = config
        lowered = LOWERED[config.format]
        self.output_scale = 2.0 ** (2 * lowered if config.format == "nvfp4" else lowered)

    def offsets(self) -> Offsets:
        """Of this lane."""
        c, lane = self.c, cute.arch.lane_idx()
        row, quarter = lane >> 2, lane & 3
        x_row, w_row = (first + row for first in first_rows(c))
        chunk = (quarter ^ ((row >> 1) & 3)) * 16
        scales = c.scales_at + quarter * self._scale_kind.width // 8
        return Offsets(
            x_row * ROW_BYTES + chunk, w_row * ROW_BYTES + chunk, scales + x_row * c.scale_bytes,
            scales + w_row * c.scale_bytes,
        )  # fmt: skip

    @cute.jit
    def multiply(self, rSum: cute.Tensor, stage: Int32, own: Offsets):
        """Add this warp's part of the products of a stage."""
        x = [load_words(stage + own.x + 8 * i * ROW_BYTES, 4) for i in range(2 * self.c.m_tiles)]
        w = [load_words(stage + own.w + 8 * i * ROW_BYTES, 4) for i in range(self.c.n_tiles)]
        x_factors = [self._x_factors(self._scales(stage + own.x_scales, i)) for i in range(2 * self.c.m_tiles)]
        w_factors = [self._factors(self._scales(stage + own.w_scales, i)) for i in range(self.c.n_tiles)]
        for word in cutlass.range_constexpr(4):
            rX = [self._x_pairs(x[i][word], x_factors[i][word // 2]) for i in range(2 * self.c.m_tiles)]
            rW = [decode(w[i][word], w_factors[i][word // 2]) for i in range(self.c.n_tiles)]
            for i in cutlass.range_constexpr(0, 4, 2):  # pairs of a step along K
                for m in cutlass.range_constexpr(self.c.m_tiles):
                    low, high = rX[2 * m], rX[2 * m + 1]
                    a = [Int32(pair) for pair in (low[i], high[i], low[i + 1], high[i + 1])]
                    for n in cutlass.range_constexpr(self.c.n_tiles):
                        b = [Int32(rW[n][i]), Int32(rW[n][i + 1])]
                        new = op.mma_m16n8k16(BFloat16, a, b, [rSum[j, n, m] for j in range(4)])
                        for j in cutlass.range_constexpr(4):
                            rSum[j, n, m] = new[j]

    @property
    def _scale_kind(self) -> Any:
        """A lane has two bytes of a row's scales in NVFP4, one in MXFP4."""
        return Uint16 if self.c.format == "nvfp4" else Uint8

    def _scales(self, at: Int32, i: int) -> Uint32:
        """The lane's of row 8 i."""
        return Uint32(load_words(at + 8 * i * self.c.scale_bytes, 1, self._scale_kind)[0])

    def _factors(self, scales: Uint32) -> tuple[Uint32, Uint32]:
        """Of the first and of the last two words."""
        if self.c.format == "nvfp4":
            return both_of_two(factors_of_e4m3(scales)[0])
        one = both(factors_of_e8m0(scales)[0])
        return one, one

    def _x_factors(self, scales: Uint32) -> tuple[Uint32, Uint32]:
        """The same of x; in MXFP4 the scale itself."""
        if self.c.format == "nvfp4":
            return self._factors(scales)
        scale = fp4.ue8m0_value(Int32(scales))
        one = Uint32(op.pack(BFloat16, scale, scale))
        return one, one

    def _x_pairs(self, word: Uint32, factor: Uint32) -> list[Uint32]:
        if self.c.format == "nvfp4":
            return decode(word, factor)
        return [_multiply(pair, factor) for pair in decode(word, Uint32(_TWO_TO_126))]
