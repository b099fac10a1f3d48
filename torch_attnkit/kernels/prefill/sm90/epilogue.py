"""The epilogue of the Hopper prefill kernel: row sums, LSE and output straight from a consumer's registers."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm90 import softmax
from torch_attnkit.cuda.warp_ops import exp2

from ..types import Inputs, Outputs
from . import scales
from .mainloop import Consumer
from .types import Config, OutputRows


class Epilogue(Fixed):
    def __init__(self, config: Config):
        self.c = config

    def _index(self, at: OutputRows, token: Int32) -> tuple:
        return (at.q0 + token, at.head) if self.c.varlen else (at.batch, token, at.head)

    @cute.jit
    def store(self, w: Consumer, ins: Inputs, outs: Outputs, at: OutputRows):
        """Divide by the row sums and write out, 16 bytes of out per lane."""
        c = self.c
        sums = [softmax.quad_sum(w.row_sum[r]) for r in range(2)]
        factors = []
        for r in cutlass.range_constexpr(2):
            row_max = cutlass.select_(w.row_max[r] == -Float32.inf, Float32(0.0), w.row_max[r]) * w.scalars.scale_log2
            if const_expr(c.lift):
                row_max -= Float32(c.lift)
            lse = (row_max + cute.math.log2(sums[r], fastmath=True)) * Float32(op.LN_2)
            lse = cutlass.select_(sums[r] == 0.0, -Float32.inf, lse)
            weight = sums[r]
            if const_expr(c.sink):
                weight += exp2(Float32(ins.sink[at.head]) * Float32(op.LOG2_E) - row_max)
            factors.append(cute.arch.rcp_approx(cutlass.select_(sums[r] == 0.0, Float32(1.0), weight)))
            token = at.row + 8 * r
            if (w.lane % 4 == 0) & (token < at.tokens):
                outs.lse[self._index(at, token)] = lse
                if const_expr(not c.normalize):
                    outs.row_sum[self._index(at, token)] = sums[r] * Float32(2.0**-c.lift)
        if const_expr(not c.normalize):
            factors = [Float32(2.0**-c.lift) for _ in factors]
        if const_expr(scales.given(c, scales.V)):
            scale = scales.factor(c, ins, at, scales.V)  # of a sequence without keys it may be nan
            factors = [factors[r] * cutlass.select_(sums[r] == 0.0, Float32(1.0), scale) for r in range(2)]
        if const_expr(c.normalize or c.lift):
            softmax.rescale(w.rO, factors)
        for r in cutlass.range_constexpr(2):
            token = at.row + 8 * r
            for g in cutlass.range_constexpr(c.dim_v // 32):
                pairs = [(16 * g + 4 * j + 2 * r) for j in range(4)]
                words = [op.pack(c.out_dtype, w.rO[i], w.rO[i + 1]) for i in pairs]
                words = softmax.transpose_quads(words, w.lane % 4)
                if token < at.tokens:
                    column = 32 * g + w.lane % 4 * 8
                    address = outs.out[(*self._index(at, token), None)].iterator + column
                    copies.store_words(address.toint(), words)
