"""What becomes of a tile's rows when their last key is through: LSE, sink and scales, and a store from registers.

With one head a tile a method of ``Epilogue``, for rows of a KV head's query heads ``store``.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import finite
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm90 import softmax
from torch_attnkit.cuda.warp_ops import exp2

from ..types import Inputs, Outputs
from .config import Config, GroupScalars, OutputRows, RowOutputs
from .mainloop import Consumer, Mainloop
from .seqlen import WorkTile

Q, K, V = range(3)  # in ``Inputs.scales``


def has_scale(c: Config, *which: int) -> bool:
    return any(c.scales[i : i + 1] == (True,) for i in which)


def descale(c: Config, ins: Any, batch: Int32, head: Int32, *which: int) -> Float32:
    """The product of these scales of E4M3 for a sequence and a query head.

    What lies behind the last packed sequence has that one's.
    """
    by = Float32(1.0)
    for i in which:
        if const_expr(has_scale(c, i)):
            table = ins.scales[i]  # (sequences, Hkv)
            heads_of_one = Int32(ins.q.shape[-2]) // Int32(table.shape[1])
            by *= Float32(table[cutlass.min(batch, Int32(table.shape[0]) - 1), head // heads_of_one])
    return by


def with_descales(c: Config, ins: Any, scalars: Any, batch: Int32, head: Int32) -> Any:
    """The scalars of a work tile's scores, which are products of what q and k hold: with their scales."""
    if const_expr(not has_scale(c, Q, K)):
        return scalars
    name = "cap_slope" if c.softcap else "scale_log2"
    return scalars._replace(**{name: getattr(scalars, name) * descale(c, ins, batch, head, Q, K)})


class Epilogue(Fixed):
    """Of tiles whose rows are queries of one head."""

    def __init__(self, config: Config, mainloop: Mainloop):
        self.c, self.mainloop, self.columns = config, mainloop, config.dim_v

    def _index(self, at: OutputRows, token: Int32) -> tuple:
        return (at.q0 + token, at.head) if self.c.varlen else (at.batch, token, at.head)

    @cute.jit
    def store(self, w: Consumer, ins: Inputs, outs: Outputs, at: OutputRows):
        """Divide by the row sums and write out, 16 bytes of out per lane."""
        c = self.c
        sums = [softmax.quad_sum(w.row_sum[r]) for r in range(2)]
        factors = []
        for r in cutlass.range_constexpr(2):
            lse, factor = self.row_result(w, ins, at.head, r, sums[r])
            factors.append(factor)
            self.store_stats(w, outs, at, r, lse, sums[r])
        if const_expr(not c.normalize):
            factors = [Float32(2.0**-c.p_offset) for _ in factors]
        if const_expr(has_scale(c, V)):
            scale = descale(c, ins, at.batch, at.head, V)  # of a sequence without keys it may be nan
            factors = [factors[r] * cutlass.select_(sums[r] == 0.0, Float32(1.0), scale) for r in range(2)]
        if const_expr(c.normalize or c.p_offset):
            softmax.rescale(w.rO, factors)
        self.store_rows(w, outs, at, 0)

    def row_result(self, w: Consumer, ins: Inputs, head: Int32, r: int, row_sum: Float32) -> tuple[Float32, Float32]:
        """Of a lane's row r the LSE, and what its output is to be multiplied by."""
        c = self.c
        row_max = cutlass.select_(w.row_max[r] == -Float32.inf, Float32(0.0), w.row_max[r]) * w.scalars.scale_log2
        if c.p_offset:
            row_max -= Float32(c.p_offset)
        lse = (row_max + cute.math.log2(row_sum, fastmath=True)) * Float32(op.LN_2)
        lse = cutlass.select_(row_sum == 0.0, -Float32.inf, lse)
        weight = row_sum
        if c.sink:
            weight += exp2(Float32(ins.sink[head]) * Float32(op.LOG2_E) - row_max)
        return lse, cute.arch.rcp_approx(cutlass.select_(row_sum == 0.0, Float32(1.0), weight))

    @cute.jit
    def store_stats(
        self, w: Consumer, outs: Outputs, at: OutputRows, r: cutlass.Constexpr, lse: Float32, row_sum: Float32
    ):
        token = at.row + 8 * r
        if (w.lane % 4 == 0) & (token < at.tokens):
            outs.lse[self._index(at, token)] = lse
            if const_expr(not self.c.normalize):
                outs.row_sum[self._index(at, token)] = row_sum * Float32(2.0**-self.c.p_offset)

    @cute.jit
    def store_rows(self, w: Consumer, outs: Outputs, at: OutputRows, first: Int32 | int):
        """A lane's two rows, ``columns`` of each from ``first`` on."""
        c = self.c
        for r in cutlass.range_constexpr(2):
            token = at.row + 8 * r
            for g in cutlass.range_constexpr(self.columns // 32):
                words = row_words(c, w, g, r)
                if token < at.tokens:
                    column = first + 32 * g + w.lane % 4 * 8
                    address = outs.out[(*self._index(at, token), None)].iterator + column
                    copies.store_words(address.toint(), words)


def row_words(c: Config, w: Consumer, g: int, r: int, factor: Float32 | None = None) -> list:
    """Of a lane's row r 8 of columns 32 g to 32 g + 31, those from 8 (lane % 4) on, as words of the output's dtype."""
    times = lambda x: x if factor is None else x * factor
    pairs = [(16 * g + 4 * j + 2 * r) for j in range(4)]
    words = [op.pack(c.out_dtype, times(w.rO[i]), times(w.rO[i + 1])) for i in pairs]
    return softmax.transpose_quads(words, w.lane % 4)


# Of tiles whose rows a KV head's query heads share.


def row_sums(c: Config, w: Consumer, positions: tuple) -> list:
    """The sums of a lane's two rows; 0 for a query before a cache's first key, which attends nothing.

    Then its output is 0 too: what it holds may be nan, which no factor removes.
    """
    sums = []
    for r in range(2):
        row_sum = softmax.quad_sum(w.row_sum[r])
        sums.append(cutlass.select_(positions[r] < 0, Float32(0.0), row_sum) if c.ends_at_kv_len else row_sum)
    for i in range(cute.size(w.rO)):
        w.rO[i] = cutlass.select_(sums[i // 2 % 2] == 0.0, Float32(0.0), w.rO[i])
    return sums


@cute.jit
def lse_and_factor(ins: Any, scalars: GroupScalars, head: Int32, row_max: Float32, row_sum: Float32):
    """The LSE of a row with maximum ``row_max``, in powers of two, and what its sums are to be multiplied by."""
    lse = (finite(row_max) + op.log2(row_sum)) * Float32(op.LN_2)
    weight = row_sum
    if scalars.has_sink != 0:
        weight += exp2(Float32(ins.sink[head]) * Float32(op.LOG2_E) - finite(row_max))
    nothing = row_sum == 0.0
    inverse = cute.arch.rcp_approx(cutlass.select_(nothing, Float32(1.0), weight))
    return cutlass.select_(nothing, -Float32.inf, lse), cutlass.select_(nothing, Float32(0.0), inverse)


@cute.jit
def store(c: cutlass.Constexpr, w: Consumer, ins: Any, outs: RowOutputs, tile: WorkTile, sums, maxima=None):
    """Divide by the row sums and write out straight from registers, 16 bytes a lane; ``maxima`` in powers of two, where
    they are not the consumer's."""
    nbytes = const_expr(c.out_dtype.width // 8)
    for r in cutlass.range_constexpr(2):
        row = w.row + 8 * r
        token, head = tile.token_and_head(cutlass.max(cutlass.min(row, tile.rows - 1), 0))
        row_max = w.row_max[r] * w.scalars.scale_log2 if const_expr(maxima is None) else maxima[r]
        lse, factor = lse_and_factor(ins, w.scalars, head, row_max, sums[r])
        if (w.lane % 4 == 0) & (row < tile.rows):
            outs.lse[tile.batch, token, head] = lse
        address = outs.out[tile.batch, token, head, None].iterator.toint() + w.lane % 4 * (8 * nbytes)
        for g in cutlass.range_constexpr(c.dim_v // 32):
            words = row_words(c, w, g, r, factor)
            if row < tile.rows:
                copies.store_words(address + 32 * nbytes * g, words)
