"""Tokens and scales to shared memory, as the products want them. Imports cutlass.

A lane brings 32 numbers of a token at a time, those that its counterpart among the consumers multiplies: the second
operand of ``mma.m16n8k16`` for eight steps, K being in the order in which a word's codes are decoded. What a token's
numbers are rounded to, and how they become bf16, happens on the way.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Ring

from .arguments import Flags, Matrices, Tensors
from .config import GATHERERS, SPAN, Config
from .factors import Factors
from .schedule import Work, WorkTile, width_of
from .shared import Shared

_EACH = 32  # numbers of a token that a lane brings
_CHUNK = 8  # of them under a word of codes
_UPPER = 0xFFFF0000  # half of a word


def operands(rV: cute.Tensor, parts: int) -> list[list[Any]]:
    """32 numbers as words of bf16, 4 for each chunk of 8: numbers i and i + 4. Two lists if they are sums of two bf16,
    of which infinities and NaN are the first alone."""
    if rV.element_type is cutlass.BFloat16:
        words = cute.recast_tensor(rV, Uint32)
        return [_pairs_of_words(words)]
    if parts == 1:
        return [_pairs(rV)]
    rX = cute.make_rmem_tensor(_EACH, Float32)
    rX.store(rV.load().to(Float32))
    rHigh = cute.make_rmem_tensor(_EACH, Float32)
    bits, high = cute.recast_tensor(rX, Uint32), cute.recast_tensor(rHigh, Uint32)
    for i in range(_EACH):
        high[i] = bits[i] & Uint32(_UPPER)
        rest = rX[i] - rHigh[i]
        rX[i] = cutlass.select_((high[i] & 0x7F800000) == 0x7F800000, Float32(0.0), rest)
    return [_pairs(rHigh), _pairs(rX)]


def _pairs(rX: cute.Tensor) -> list[Any]:
    x = rX if rX.element_type is Float32 else cute.make_rmem_tensor(_EACH, Float32)
    if x is not rX:
        x.store(rX.load().to(Float32))
    starts = range(0, _EACH, _CHUNK)
    return [op.pack(cutlass.BFloat16, x[s + i], x[s + i + 4]) for s in starts for i in range(4)]


def _pairs_of_words(words: cute.Tensor) -> list[Any]:
    out = []
    for s in range(0, _EACH // 2, 4):
        for i in range(2):
            low, high = words[s + i], words[s + i + 2]
            out += [(low & 0xFFFF) | (high << 16), (low >> 16) | (high & Uint32(_UPPER))]
    return out


class Gather:
    """The warps that bring tokens and scales; each has every ``GATHERERS``-th stage.

    All loads of a stage are on their way before one is used, and before its place in the ring is free.
    """

    def __init__(self, config: Config, rounded: Any):
        self.c = config
        self.factors = Factors(config)
        self.rounded = rounded  # 32 float32 numbers of a row, and a global scale, to what they are multiplied as
        spans = config.stage // SPAN
        units = [(group, span) for group in range(config.columns // 8) for span in range(spans)]
        at_once = config.loads_at_once
        self.batches = [units[i : i + at_once] for i in range(0, len(units), at_once)]

    @cute.jit
    def run(
        self, tensors: Tensors, flags: Flags, weights: Matrices, source: cute.Tensor, work: Work, ring: Ring,
        shared: Shared, warp: Int32,
    ):  # fmt: skip
        """``source``: (tokens, columns) of the up product, (places, columns) of the down product."""
        c = self.c
        lane = cute.arch.lane_idx()
        steps = (Int32(source.shape[1]) + c.stage - 1) // c.stage
        global_scale = Float32(1.0)
        if flags.activation != 0:
            global_scale = weights.activation[0]
        n = Int32(0)
        for turn in cutlass.range(work.count, unroll=1):
            tile = work.tile(tensors, turn)
            rows = [self._row(tensors, tile, lane // 4 + 8 * i) for i in range(c.columns // 8)]
            room = width_of(c, tile.columns)
            for k in cutlass.range((warp - n) & (GATHERERS - 1), steps, GATHERERS, unroll=1):
                rS = self.factors.load(flags, weights, tile, k, lane)
                rV = self._load_tokens(source, rows, self.batches[0], k, lane)
                full = ring.await_empty(n + k)
                stage = ring.slot(n + k)
                self._store_tokens(rV, self.batches[0], lane, global_scale, shared.tokens(stage))
                self.factors.store(rS, lane, shared.factors(stage))
                for batch in cutlass.range_constexpr(1, len(self.batches)):
                    units = const_expr(self.batches[batch])
                    if 8 * units[0][0] < room:
                        rMore = self._load_tokens(source, rows, units, k, lane)
                        self._store_tokens(rMore, units, lane, global_scale, shared.tokens(stage))
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(full)
            n += steps

    @cute.jit
    def _row(self, tensors: Tensors, tile: WorkTile, column: Int32):
        """The row of ``source`` of a work tile's token, -1 beyond the last."""
        row = Int32(-1)
        if column < tile.columns:
            row = tile.first + column
            if const_expr(self.c.paired):
                row = tensors.order[row] // Int32(tensors.indices.shape[1])
        return row

    @cute.jit
    def _load_tokens(self, source: cute.Tensor, rows: list[Int32], units: cutlass.Constexpr, k: Int32, lane: Int32):
        """The lane's numbers of stage k, by unit: one of a group of 8 tokens, a span."""
        columns = Int32(source.shape[1])
        fragments = copies.fragments(len(units), _EACH, source.element_type)
        for i, (group, span) in enumerate(units):
            at = k * self.c.stage + span * SPAN + lane % 4 * _EACH
            fragments[i].fill(0)
            if (rows[group] >= 0) & (at < columns):
                copies.load(source.iterator + (Int64(rows[group]) * source.stride[0] + at), fragments[i])
        return fragments

    @cute.jit
    def _store_tokens(
        self, fragments: list[cute.Tensor], units: cutlass.Constexpr, lane: Int32, global_scale: Float32,
        address: Int32,
    ):  # fmt: skip
        c = self.c
        for i, (group, span) in enumerate(units):
            rV = fragments[i]
            if const_expr(self.rounded is not None):
                rX = cute.make_rmem_tensor(_EACH, Float32)
                rX.store(rV.load().to(Float32))
                self.rounded(rX, global_scale)
                rV = rX
            for part, words in enumerate(operands(rV, c.parts)):
                for chunk in cutlass.range_constexpr(4):
                    line = (span * 4 + chunk) * (c.columns // 8) + group
                    place = address + part * c.part_bytes + line * 512 + lane * 16
                    four = [Int32(w) for w in words[4 * chunk : 4 * chunk + 4]]
                    copies.store_words(place, four, cute.AddressSpace.smem)
