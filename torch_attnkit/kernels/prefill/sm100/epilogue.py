"""The epilogue of a Blackwell prefill kernel: a row's output from tensor memory, its LSE and sum."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm100 import softmax, tmem
from torch_attnkit.cuda.warp_ops import exp2

from ..types import Inputs, Outputs, Scalars
from .rows import CHUNK, scale_of, scaled
from .split import output_batch
from .types import ROW_MAX, ROW_SUM, TRUE_MAX, Config, WorkTile


class Epilogue(Fixed):
    def __init__(self, config: Config, rows: Any):
        self.c, self.rows = config, rows

    def _index(self, ins: Inputs, tile: WorkTile, head: Int32, token: Int32) -> tuple:
        if const_expr(self.c.varlen):
            return tile.q0 + token, head
        return output_batch(self.c, tile, Int32(ins.q.shape[0])), token, head

    @cute.jit
    def store(
        self,
        ins: Inputs,
        outs: Outputs,
        scalars: Scalars,
        tile: WorkTile,
        t: cutlass.Constexpr,
        final: cute.Tensor,  # (3), the row's state after its last key
        warp: Int32,
    ):
        """Divide by the row's sum and write out, LSE and row sum; a thread has its row's consecutive elements."""
        c, row = self.c, self.rows.row()
        head, token = tile.head * c.group + row % c.group, self.rows.token_of(tile, t, row)
        scalars = scaled(c, ins, scalars, tile)
        row_max, row_sum = final[ROW_MAX], final[ROW_SUM]
        shift = cutlass.select_(row_max == -Float32.inf, Float32(0.0), row_max) * scalars.scale_log2
        lse = (shift + cute.math.log2(row_sum, fastmath=True)) * Float32(op.LN_2)
        lse = cutlass.select_(row_sum == 0.0, -Float32.inf, lse)
        weight = row_sum
        if const_expr(c.sink):
            weight += exp2(Float32(ins.sink[head]) * Float32(op.LOG2_E) - shift)
        factor = cute.arch.rcp_approx(cutlass.select_(row_sum == 0.0, Float32(1.0), weight))
        if const_expr(not c.normalize):  # relative to the true maximum
            factor = exp2((row_max - final[TRUE_MAX]) * scalars.scale_log2)
            factor = cutlass.select_(row_sum == 0.0, Float32(1.0), factor)
        valid = token < tile.tokens
        absent = tile.shift + token < 0
        if const_expr(c.ends_at_kv_len):  # a query in front of its sequence attends nothing, whatever its mask says
            lse = cutlass.select_(absent, -Float32.inf, lse)
        if self.rows.writes_stats(valid):
            outs.lse[self._index(ins, tile, head, token)] = lse
            if const_expr(not c.normalize):
                outs.row_sum[self._index(ins, tile, head, token)] = row_sum * factor
        if const_expr(c.codes):
            factor *= 1 / softmax.CODES_UNIT
        if const_expr(len(c.scales) > 0 and c.scales[2]):
            # Of a sequence without keys the scale may be nan.
            factor *= cutlass.select_(row_sum == 0.0, Float32(1.0), scale_of(c, ins, ins.scales[2], tile))
        chunk = const_expr(CHUNK // 2 if c.split else CHUNK)
        for at in cutlass.range_constexpr(0, c.columns, chunk):
            values = softmax.rescaled(tmem.load(tmem.lanes(Int32(c.outputs[t] + at), warp), chunk), factor)
            if const_expr(c.ends_at_kv_len):  # not by a factor of 0: they may be nan
                values = [Float32(cutlass.select_(absent, Float32(0.0), v)) for v in values]
            if valid:
                address = outs.out[(*self._index(ins, tile, head, token), None)].iterator + self.rows.element(at)
                words = [v.bitcast(Int32) for v in values]
                if const_expr(not c.split):
                    kind = cutlass.BFloat16 if c.codes else c.dtype
                    words = [op.pack(kind, values[j], values[j + 1]) for j in range(0, chunk, 2)]
                copies.store_words(address.toint(), words)
