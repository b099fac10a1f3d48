"""Copies of a stage by ``cp.async``, of packed weights and rows of tokens; factors of weights; tokens of a tile.

Weights and tokens lie in shared memory as Hopper's kernel has them (sm90/load_weights.py, sm90/mainloop_mma.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.smem import CHUNK

from ..arguments import Flags, Matrices, Tensors, chosen
from ..sm90.config import CODE_ALIGNMENT, CONSUMERS, MOST_COLUMNS, Config
from ..sm90.load_weights import ROW_BYTES, ScaleLoader, copy_8_async, weight_row
from ..sm90.mainloop_mma import MmaSmem
from ..sm90.tile_scheduler import DOWN
from ..work_tiles import WorkTile

_THREADS = 32 * CONSUMERS


class Sources(NamedTuple):
    """Where a thread's copies of a work tile begin: of weights, tokens and scales."""

    weights: list[Int64]  # of its rows of a box
    tokens: list[Int64]
    scales: list[Int64]


class StageLoader(Fixed):
    """All threads of a CTA, ``code_alignment`` bytes of weights and 16 of tokens at a time. Scales are a warp's work:
    each has every ``CONSUMERS``-th stage, whose scales it reads as soon as those before are factors."""

    def __init__(self, config: Config):
        self.c, self.scales = config, ScaleLoader(config)
        self.each = config.code_alignment
        self.lanes = ROW_BYTES // self.each  # that have a row of a box
        self.rows = _THREADS // self.lanes  # of a box, that are copied at once
        self.chunks = config.stage * 2 // CHUNK  # of a token's row
        self.lines = config.columns * config.parts * self.chunks // _THREADS  # of tokens, that a thread has a chunk of

    def held(self) -> list[cute.Tensor]:
        """Registers for the scales of a warp's next stage."""
        return copies.fragments(self.c.rows // 32, self.c.scales // 4, cutlass.Uint32)

    @cute.jit
    def sources(self, flags: Flags, weights: Matrices, tokens: cute.Tensor, starts: list[Int32], tile: WorkTile):
        """``starts``: rows of ``tokens`` as ``token_rows`` finds them."""
        c, thread = self.c, cute.arch.thread_idx()[0]
        rows, packed = Int32(weights.packed.shape[1]), weights.packed
        base = packed.iterator.toint() + Int64(tile.expert) * packed.stride[0]
        of_weights = []
        for first in cutlass.range_constexpr(0, c.rows, self.rows):
            row = weight_row(c, flags, tile, first + thread // self.lanes, rows)
            of_weights.append(base + Int64(cutlass.min(row, rows - 1)) * packed.stride[1])
        at = tokens.iterator.toint() + thread % self.chunks * CHUNK
        of_tokens = [at + Int64(row) * tokens.stride[0] * 2 for row in starts]
        return Sources(of_weights, of_tokens, self.scales.rows(flags, weights, tile, cute.arch.lane_idx()))

    @cute.jit
    def token_rows(self, tensors: Tensors, tile: WorkTile, which: cutlass.Constexpr):
        """The rows of x or h of which this thread copies a chunk; beyond the tile's tokens those of its first."""
        parts = const_expr(self.c.parts)
        found = []
        for n in cutlass.range_constexpr(self.lines):
            line = self._line(n)
            column = cutlass.select_(line < tile.columns * parts, line // parts, Int32(0))
            row = tile.first + column
            if const_expr(which != DOWN):
                row = tensors.order[row] // Int32(tensors.indices.shape[1])
            found.append(row * parts + line % parts)
        return found

    def _line(self, n: int) -> Int32:
        """The row of a stage's tokens, of which a thread's n-th copy is."""
        return cute.arch.thread_idx()[0] // self.chunks + n * (_THREADS // self.chunks)

    @cute.jit
    def load(self, weights: Matrices, tile: WorkTile, sources: Sources, k: Int32, slot: Int32, shared: MmaSmem):
        """Start the copies of stage k to a slot of the ring. Behind a row's end, and for tokens that the tile does not
        have, are zeros; nothing is read for them."""
        c, thread, each = self.c, cute.arch.thread_idx()[0], const_expr(self.each)
        nbytes, part = Int32(weights.packed.shape[2]), thread % self.lanes
        to = shared.weights(slot)
        for box in cutlass.range_constexpr(c.boxes):
            column = (k * c.boxes + box) * ROW_BYTES + part * each
            valid = cutlass.select_(column < nbytes, Int32(each), Int32(0))
            column = cutlass.min(column, nbytes - each)
            for n in cutlass.range_constexpr(len(sources.weights)):
                row = n * self.rows + thread // self.lanes
                chunk = part * each // CHUNK
                offset = (box * c.rows + row) * ROW_BYTES + (chunk ^ (row & 7)) * CHUNK + part * each % CHUNK
                if const_expr(each == CODE_ALIGNMENT):
                    op.copy_16_async(to + offset, sources.weights[n] + column, valid)
                else:
                    copy_8_async(to + offset, sources.weights[n] + column, valid)
        to = shared.tokens(slot) + thread % self.chunks * CHUNK
        for n in cutlass.range_constexpr(self.lines):
            line = self._line(n)
            valid = cutlass.select_(line < tile.columns * c.parts, Int32(CHUNK), Int32(0))
            op.copy_16_async(to + line * c.token_row_bytes, sources.tokens[n] + Int64(k) * (c.stage * 2), valid)

    @cute.jit
    def read_scales(
        self, flags: Flags, weights: Matrices, tile: WorkTile, sources: Sources, k: Int32, held: list[cute.Tensor]
    ):  # fmt: skip
        """Those of stage k into registers."""
        new = self.scales.read(flags, weights, tile, sources.scales, k)
        for i in cutlass.range_constexpr(len(held)):
            for j in cutlass.range_constexpr(cute.size(held[i])):
                held[i][j] = new[i][j]

    def store_factors(self, held: list[cute.Tensor], slot: Int32, shared: MmaSmem) -> None:
        """By a warp, for the slot of the ring that its stage has."""
        self.scales.store(held, cute.arch.lane_idx(), shared.factors(slot))


_WORDS = 3  # of a token in shared memory: slot, weight, how many choices the token has


class TileTokens(Fixed):
    """The factor of a work tile's accumulators, and slots, weights and counts of its tokens, for its epilogue. Of two
    tiles in turn: the next one's come early."""

    def __init__(self, memory: Any):
        layout = cute.make_layout((MOST_COLUMNS, _WORDS, 2))
        self.sWords = memory.allocate_tensor(Int32, layout, 16)
        self.sFactor = memory.allocate_tensor(Float32, cute.make_layout(2), 16)

    @cute.jit
    def load(self, tensors: Tensors, tile_idx: Int32, tile: WorkTile, factor: Float32, which: cutlass.Constexpr):
        """By a warp, a token a lane, zeros behind the last. What is written is read behind the barriers of the tile's
        stages."""
        lane, top_k = cute.arch.lane_idx(), Int32(tensors.indices.shape[1])
        if lane == 0:
            self.sFactor[tile_idx & 1] = factor
        if const_expr(which == DOWN):
            slot, weight, choices = Int32(0), Float32(0.0), Int32(0)
            if lane < tile.columns:
                slot = tensors.order[tile.first + lane]
                token = slot // top_k
                weight = Float32(tensors.weights[token, slot % top_k])
                for k in cutlass.range(top_k, unroll=4):
                    choices += cutlass.select_(chosen(tensors, token, k) >= 0, Int32(1), Int32(0))
            for i, word in enumerate((slot, weight.bitcast(Int32), choices)):
                self.sWords[lane, i, tile_idx & 1] = word

    def factor(self, tile_idx: Int32) -> Float32:
        return self.sFactor[tile_idx & 1]

    def slot(self, tile_idx: Int32, column: Int32) -> Int32:
        return self.sWords[column, 0, tile_idx & 1]

    def weight(self, tile_idx: Int32, column: Int32) -> Float32:
        return self.sWords[column, 1, tile_idx & 1].bitcast(Float32)

    def choices(self, tile_idx: Int32, column: Int32) -> Int32:
        """How many results a token has."""
        return self.sWords[column, 2, tile_idx & 1]
