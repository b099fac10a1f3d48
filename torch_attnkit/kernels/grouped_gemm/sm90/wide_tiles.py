"""Wide work tiles by ``mma.sync``: how a stage holds them, how they are multiplied, what becomes of them, and which
experts have them (wide.py). Imports cutlass.

The weights of a stage are decoded once for up to 64 tokens, whose sums take the registers that two chains of sums take
otherwise. Up to 32 tokens have two chains, too.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed, Ring

from .arguments import Scalars, Tensors, chosen
from .config import CONSUMERS, SPAN, WARP_ROWS, Config
from .epilogue import Combine
from .mainloop import Mainloop, meet, row_of
from .routing import Sort
from .schedule import Tiles, WorkTile, width_of
from .shared import ROW_BYTES, Shared, box_layout, clear
from .wide import WideConfig, stage_bytes


class Stages(Fixed):
    """Shared memory in which a stage is one piece, that work tiles of either kind lay out as they need."""

    def __init__(self, config: Config, wide: WideConfig, memory: Any):
        self.step, self.count = stage_bytes(config, wide), config.stages
        layout = cute.make_layout(self.step * self.count)
        self.sStages = memory.allocate_tensor(Uint8, layout, 1024, swizzle=cute.make_swizzle(3, 4, 3))
        results = max(config.result_bytes, wide.result_bytes)
        self.results = memory.allocate(results, 128).toint() if results else Int32(0)


class View(Shared):
    """Stages as work tiles of ``config`` have them: factors, weights, tokens."""

    def __init__(self, config: Config, stages: Stages):
        self.c, self.stages = config, stages
        self.sums, self.results = Int32(0), stages.results

    def boxes(self, config: Config) -> cute.Tensor:
        """(rows, bytes, boxes of all stages)"""
        steps = (config.rows * ROW_BYTES, self.stages.step)
        boxes = cute.make_layout((config.boxes, self.stages.count), stride=steps)
        first = self.stages.sStages.iterator + self.c.factor_bytes
        return cute.make_tensor(first, cute.append(box_layout(config), boxes))

    def _stage(self, stage: Int32) -> Int32:
        return self.stages.sStages.iterator.toint() + stage * self.stages.step

    def clear_tokens(self) -> None:
        """And what is tokens in a view of the other kind."""
        clear(self.stages.sStages.iterator.toint(), self.stages.step * self.stages.count)

    def factors(self, stage: Int32) -> Int32:
        return self._stage(stage)

    def weights(self, stage: Int32) -> Int32:
        return self._stage(stage) + self.c.factor_bytes

    def tokens(self, stage: Int32) -> Int32:
        return self._stage(stage) + (self.c.factor_bytes + self.c.weight_bytes)


class WideMainloop(Mainloop):
    """A lane's results have one chain for each group of 8 tokens; of up to half of the tokens those of the others are
    the second ones."""

    def sums(self) -> cute.Tensor:
        """(4, groups of 8 tokens, 1)"""
        return cute.make_rmem_tensor(cute.make_layout((4, self.c.columns // 8, 1)), Float32)

    @cute.jit
    def run(self, rSum: cute.Tensor, columns: Int32, spans: Int32, n: Int32, ring: Ring, shared: View, warp: Int32):
        """As ``Mainloop.run``; both chains are joined."""
        c, each = self.c, const_expr(self.c.stage // SPAN)
        room = width_of(c, columns)
        rSum.fill(0.0)
        for width in cutlass.range_constexpr(len(c.widths)):
            groups = const_expr(c.widths[width])
            if room == 8 * groups:
                chains = const_expr(2 if 16 * groups <= c.columns else 1)
                step = const_expr(4 * groups if chains == 2 else 0)
                rChains = cute.make_tensor(rSum.iterator, cute.make_layout((4, groups, 2), stride=(1, 4, step)))
                for k in cutlass.range(spans // each, unroll=1):
                    ring.wait(n + k)
                    place = self._place(shared, ring.slot(n + k), warp)
                    for span in cutlass.range_constexpr(each):
                        self._span(rChains, groups, place, span)
                    self._release(ring, n + k)
                for k in cutlass.range(spans // each, (spans + each - 1) // each, unroll=1):
                    ring.wait(n + k)
                    self._span(rChains, groups, self._place(shared, ring.slot(n + k), warp), 0)
                    self._release(ring, n + k)
                if const_expr(chains == 2):
                    for group in cutlass.range_constexpr(groups):
                        for x in cutlass.range_constexpr(4):
                            rChains[x, group, 0] = rChains[x, group, 0] + rChains[x, group, 1]


class CombineTogether(Combine):
    """Tokens' results of a wide work tile. So many would keep a combining warp long beyond the next work tile, so all
    consumers add them up, each those of some tokens."""

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Scalars, rSum: cute.Tensor, tile: WorkTile, tiles: Tiles, turn: Int32,
        shared: View, warp: Int32,
    ):  # fmt: skip
        lane = cute.arch.lane_idx()
        top_k = Int32(tensors.indices.shape[1])
        flags, weights = scalars.down, tensors.down
        features = Int32(weights.codes.shape[1])
        first = tile.row * self.c.rows + warp * WARP_ROWS + row_of(lane)
        factor = tiles.factor(turn)
        bias = [Float32(0.0), Float32(0.0)]
        for part in cutlass.range_constexpr(2):
            if (flags.bias != 0) & (first + 8 * part < features):
                bias[part] = Float32(weights.bias[tile.expert, first + 8 * part])
        for group in cutlass.range_constexpr(self.c.columns // 8):
            for j in cutlass.range_constexpr(2):
                column = 8 * group + lane % 4 * 2 + j
                if column < tile.columns:
                    slot = tensors.order[tile.first + column]
                    weight = tensors.weights[slot // top_k, slot % top_k]
                    for part in cutlass.range_constexpr(2):
                        if first + 8 * part < features:
                            y = rSum[j + 2 * part, group, 0] * factor + bias[part]
                            tensors.partial[slot, first + 8 * part] = y * weight
        meet()
        self._combine(tensors, tile, warp, lane)

    @cute.jit
    def _combine(self, tensors: Tensors, tile: WorkTile, warp: Int32, lane: Int32):
        """A lane has a token, a warp every eighth."""
        top_k = Int32(tensors.indices.shape[1])
        column = lane * CONSUMERS + warp
        token, whole = Int32(0), Int32(0)
        if column < tile.columns:
            token = tensors.order[tile.first + column] // top_k
            choices = Int32(0)
            for k in cutlass.range(top_k, unroll=4):
                choices += cutlass.select_(chosen(tensors, token, k) >= 0, Int32(1), Int32(0))
            at = Int64(token) * tensors.count.stride[0] + tile.row
            if op.add_acq_rel(tensors.count.iterator.toint() + at * 4, Int32(1)) + 1 == choices:
                tensors.count[token, tile.row] = Int32(0)
                whole = Int32(1)
        cute.arch.sync_warp()  # what a lane acquired is there for all
        rest = cute.arch.vote_ballot_sync(whole != 0)
        while rest != 0:
            at_lane = cute.arch.popc((rest & -rest) - 1)
            rest = rest & (rest - 1)
            self._add_up(tensors, cute.arch.shuffle_sync(token, at_lane), tile.row * self.c.rows, lane * 4)


class SortByCount(Sort):
    """Experts of more tokens than ``columns`` have work tiles of up to ``wide``."""

    def __init__(self, wide: int, columns: int, experts: int, threads: int):
        super().__init__(columns, experts, threads)
        self.wide = wide

    def _tiles_of(self, count: Int32) -> Int32:
        most = cutlass.select_(count > self.columns, Int32(self.wide), Int32(self.columns))
        return (count + most - 1) // most

    @cute.jit
    def tiles(
        self, tensors: Tensors, sCount: cute.Tensor, sSum: cute.Tensor, thread: Int32, experts: Int32,
        write: cutlass.Boolean,
    ):  # fmt: skip
        each = (experts + self.threads - 1) // self.threads
        begin, end = cutlass.min(thread * each, experts), cutlass.min((thread + 1) * each, experts)
        slots, tiles = Int32(0), Int32(0)
        for e in cutlass.range(begin, end, unroll=1):
            slots += sCount[e]
            tiles += self._tiles_of(sCount[e])
        first, line = self._before(sSum, thread, slots, tiles)
        if thread == self.threads - 1:
            tensors.tiles[0, 0] = line + tiles
        for e in cutlass.range(begin, end, unroll=1):
            count = sCount[e]
            sCount[e] = first
            parts = self._tiles_of(count)
            for part in cutlass.range(parts, unroll=1):
                columns = (count + parts - 1 - part) // parts  # the first ones have one more
                line += 1
                tensors.tiles[line, 0] = Int32(e)
                tensors.tiles[line, 1] = first
                tensors.tiles[line, 2] = columns
                first += columns
