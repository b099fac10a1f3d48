"""Routed experts with FP4 weights on Hopper, few tokens an expert: a persistent grouped GEMM by ``mma.sync``, swap-AB.

    8 warps        consumers: dequantise, multiply (mainloop_mma.py), epilogue (epilogue_mma.py)
    1 warp         weights of a stage by TMA, or by cp.async (load_weights.py)
    1 warp         activations of a stage, a bulk copy a token, from rows of permute.py or of the first GEMM
    1 warp         dynamic scheduler: takes work tiles by atomics, publishes them ahead (tile_scheduler.py)
    2 warps        signal that a part of h is written; in the second GEMM reduce tokens over top-k
    3 warps        scales of a stage to bf16 factors, a stage each in turn

    ring         producers (arrivals)                           consumers (arrivals)
    stages       weights (1 by TMA, 32), activations 1, scales 1   8 consumer warps
    announced    scheduler 1                                    weights 1, scale warps
    tiles        scheduler 1                                    8 consumer warps, activations 1, a reducing warp 1
    done         8 consumer warps                               a reducing warp 1

Of little work both GEMMs are one launch (``one_launch``): all tiles of the first are scheduled before those of the
second, and all stages of a CTA are in one ring. Of more work each is a launch. The second starts as CTAs of the first
exit (PDL): its weights are in flight before h is written, for which only the activation warp waits. With few slots
(``by_warp``) every CTA sorts them itself. docs/kernels/grouped_gemm.md has what limits it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from torch_attnkit.cuda import copies, fake, memory_ops
from torch_attnkit.cuda.ring import Ring, rings

from ..arguments import Flags, Matrices, Scalars, Tensors, arguments
from ..problem import SPAN
from ..quantize_act import FAKE_QUANTIZE
from ..work_tiles import SortByWarp, WorkTile
from .config import COMBINERS, CONSUMERS, SCHEDULER, TILES, TOKENS, WARPS, WEIGHTS, Config
from .epilogue_mma import SwigluEpilogue, TopkEpilogue, output_scale
from .load_weights import (
    ROW_BYTES,
    BulkScales,
    ScaleLoader,
    TmaLoads,
    await_copies,
    box_rows,
    copy_packed,
    prefetch_biases,
    weight_tma,
)
from .mainloop_mma import MmaMainloop, MmaSmem
from .permute import PrepareTokens
from .tile_scheduler import DOWN, NONE, UP, DynamicScheduler, RowTiles, TileRing, await_h, end_tickets, signal_h, take

# Of a thread in the warpgroups behind the consumers, which keep their 128: scales take most.
_REGISTERS = (96, 160)
assert SCHEDULER + COMBINERS == CONSUMERS + 4  # a combining warp in either


class StageFills(NamedTuple):
    """Which tile of the CTA, and which fills of the ring are its stages."""

    tile_idx: Int32
    first: Int32
    steps: Int32


class MmaGemm:
    """One GEMM's own part. ``factor_warps`` as in ``Config``, of the ring that both share."""

    def __init__(self, config: Config, epilogue: Any, factor_warps: int):
        self.c, self.epilogue, self.factors, self.factor_warps = config, epilogue, ScaleLoader(config), factor_warps

    def of(self, tensors: Tensors, scalars: Scalars) -> tuple[Flags, Matrices]:
        """The flags and weights of this GEMM."""
        if self.c.paired:
            return scalars.up, tensors.up
        return scalars.down, tensors.down

    def row_tiles(self, weights: Matrices) -> Int32:
        return (Int32(weights.packed.shape[1]) + self.c.rows - 1) // self.c.rows

    def spans(self, weights: Matrices) -> Int32:
        """Of a row."""
        return (Int32(weights.packed.shape[2]) * 2 + SPAN - 1) // SPAN

    def steps(self, weights: Matrices) -> Int32:
        """Stages of a work tile."""
        each = self.c.stage // SPAN
        return (self.spans(weights) + each - 1) // each

    @cute.jit
    def load_weights(self, loads: TmaLoads, ring: Ring, shared: MmaSmem, tile: WorkTile, fills: StageFills):
        c = self.c
        gW = cute.local_tile(loads.rows[None, None, tile.expert], (box_rows(c), ROW_BYTES), (None, None))
        tWs, tWg = copies.tma_partition(loads.atom, 0, 1, shared.boxes(c), gW)
        for k in cutlass.range(fills.steps, unroll=1):
            n = fills.first + k
            full = ring.acquire(n, c.weight_bytes)
            for box in cutlass.range_constexpr(c.boxes):
                from_, to = tWg[None, tile.row, k * c.boxes + box], tWs[None, ring.slot(n) * c.boxes + box]
                cute.copy(loads.atom, from_, to, tma_bar_ptr=full)

    @cute.jit
    def copy_packed(
        self, flags: Flags, weights: Matrices, ring: Ring, shared: MmaSmem, tile: WorkTile, fills: StageFills
    ):
        """The same by cp.async, where rows start or end amid 16 bytes."""
        for k in cutlass.range(fills.steps, unroll=1):
            n = fills.first + k
            full = ring.await_empty(n)
            copy_packed(self.c, flags, weights, tile, k, shared.weights(ring.slot(n)), full)

    @cute.jit
    def load_factors(
        self, flags: Flags, weights: Matrices, part: Int32, bulk: Any, ring: Ring, shared: MmaSmem, tile: WorkTile,
        fills: StageFills,
    ):  # fmt: skip
        """Scale warps have a stage each in turn: its scales are in flight before its slot of the ring is empty."""
        lane, warps = cute.arch.lane_idx(), const_expr(self.factor_warps)
        if part == 0:
            prefetch_biases(self.c, flags, weights, tile, lane)
        if const_expr(bulk is not None):
            starts = self.factors.load_bulk(flags, weights, tile, fills.tile_idx, part, lane, bulk)
        else:
            starts = self.factors.rows(flags, weights, tile, lane)
        for k in cutlass.range((part + fills.first * (warps - 1)) % warps, fills.steps, warps, unroll=1):
            n = fills.first + k
            rS = self.factors.read(flags, weights, tile, starts, k)
            full = ring.await_empty(n)
            self.factors.store(rS, lane, shared.factors(ring.slot(n)))
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(full)
        if const_expr(bulk is not None):
            cute.arch.sync_warp()
            bulk.ring.release(fills.tile_idx)


class MmaExperts:
    """The launches of a call: ``prepare``, and the GEMMs, by warp roles."""

    def __init__(self, up: Config, down: Config, experts: int, rounded: Any, by_warp: bool, one_launch: bool):
        self.by_warp, self.prepare = by_warp, PrepareTokens(up, down, experts, rounded, by_warp)
        self.launches = ((UP, DOWN),) if one_launch else ((UP,), (DOWN,))
        self.up = MmaGemm(up, SwigluEpilogue(up, rounded), up.factor_warps)
        self.down = MmaGemm(down, TopkEpilogue(down), up.factor_warps)
        self.c, self.mainloop = up, MmaMainloop(up)  # for both: their work tiles differ in the number of steps alone

    @cute.jit
    def __call__(
        self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, prepare_blocks: Int32, blocks: Int32, stream: Any
    ):
        """``x``: (parts of tokens, whole stages), to be written, as ``Tensors.h`` is."""
        self.prepare.launch(tensors, x, scalars, prepare_blocks, stream)
        up_loads, down_loads = (
            weight_tma(p.c, *p.of(tensors, scalars)) if self.c.by_tma else None for p in (self.up, self.down)
        )
        for which in self.launches:
            self.kernel(tensors, x, scalars, up_loads, down_loads, which).launch(
                grid=[blocks, 1, 1], block=[32 * WARPS, 1, 1], stream=stream, min_blocks_per_mp=1,
                preferred_smem_carveout=100, use_pdl=True,
            )  # fmt: skip

    @cute.kernel
    def kernel(
        self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, up_loads: TmaLoads, down_loads: TmaLoads,
        which: cutlass.Constexpr,
    ):  # fmt: skip
        """``which``: the GEMMs of this launch. An absent one has no row tiles."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator()
        table = (
            ("stages", self.c.stages, self.c.code_arrivals + 2, CONSUMERS),
            ("announced", TILES, 1, 1 + self.c.factor_warps),
            ("tiles", TILES, 1, CONSUMERS + 2), ("done", COMBINERS, CONSUMERS, 1),
        )  # fmt: skip
        made = rings(memory, warp, table)
        ring, done, tiles = made["stages"], made["done"], TileRing(made["announced"], made["tiles"], memory)
        shared = MmaSmem(self.c, memory)
        bulk = BulkScales(self.c, memory, warp) if self.c.line_bytes else None
        sort = SortByWarp(self.c.columns, memory) if self.by_warp else None
        if warp == WEIGHTS:
            if const_expr(self.c.by_tma):
                cpasync.prefetch_descriptor(up_loads.atom)
                cpasync.prefetch_descriptor(down_loads.atom)
        ticket = Int32(0)
        if warp == SCHEDULER:  # before all else: every other role waits for it
            ticket = take(tensors, which[-1])
            if const_expr(self.by_warp):
                sort.run(tensors)
        shared.clear_tokens()
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        products = ((self.up, up_loads), (self.down, down_loads))
        up_tiles = self.up.row_tiles(tensors.up) if UP in which else Int32(0)
        rows = RowTiles(up_tiles, self.down.row_tiles(tensors.down) if DOWN in which else Int32(0))
        if warp < CONSUMERS:
            self._consume(tensors, scalars, ring, tiles, done, shared, warp)
        elif warp < CONSUMERS + 4:
            cute.arch.setmaxregister_decrease(_REGISTERS[0])
            if warp == WEIGHTS:
                if const_expr(self.c.by_tma):
                    packed = (partial(p.load_weights, its_loads, ring, shared) for p, its_loads in products)
                    self._load_tiles_ahead(tensors, tiles, *packed)
                else:
                    copied = (partial(p.copy_packed, *p.of(tensors, scalars), ring, shared) for p, _ in products)
                    self._load_tiles_ahead(tensors, tiles, *copied)
                    await_copies()
            elif warp == TOKENS:
                self._load_tokens(tensors, x, rows.up, ring, tiles, shared, which)
            elif warp == SCHEDULER:
                self._schedule(tensors, scalars, rows, tiles, ticket, sort, which)
            else:
                self._combine(tensors, tiles, done, Int32(0), which)
        else:
            cute.arch.setmaxregister_increase(_REGISTERS[1])
            if warp > SCHEDULER + COMBINERS:
                part = warp - SCHEDULER - COMBINERS - 1
                factors = (
                    partial(p.load_factors, *p.of(tensors, scalars), part, bulk, ring, shared) for p, _ in products
                )
                if part < self.c.factor_warps:
                    self._load_tiles_ahead(tensors, tiles, *factors)
            else:
                self._combine(tensors, tiles, done, Int32(1), which)

    @cute.jit
    def _schedule(
        self, tensors: Tensors, scalars: Scalars, rows: RowTiles, tiles: TileRing, taken: Int32, sort: Any,
        which: cutlass.Constexpr,
    ):  # fmt: skip
        """``taken``: the first ticket; the next is always in flight. ``sort``: of this CTA, if it sorts by itself."""
        bulk, order = tensors.tiles, tensors.order
        if const_expr(sort is None):
            if const_expr(UP in which):  # the second launch begins when the first has waited for them
                cute.arch.griddepcontrol_wait()
        else:
            bulk, order = sort.sTiles, sort.sOrder
        scheduler = DynamicScheduler(rows, bulk[0, 0])
        ticket, tile_idx = cute.arch.shuffle_sync(taken, 0), Int32(0)
        product, line, tile = scheduler.work(bulk, ticket)
        while ticket < scheduler.all:
            taken = take(tensors, which[-1])
            tiles.announce(tile_idx, tile, product, line)
            slot = Int32(0)
            if cute.arch.lane_idx() < tile.columns:
                slot = order[tile.first + cute.arch.lane_idx()]
            factor = Float32(0.0)
            if product == UP:
                factor = output_scale(self.up.c, scalars.up, tensors.up, tile.expert)
            else:
                factor = output_scale(self.down.c, scalars.down, tensors.down, tile.expert)
            ticket = cute.arch.shuffle_sync(taken, 0)
            following = scheduler.work(bulk, ticket)  # on its way before what is published is waited for
            tiles.publish(tensors, tile_idx, slot, tile.columns, product, factor)
            product, line, tile = following
            tile_idx += 1
        end_tickets(tensors, scheduler, ticket, which[-1])
        for i in cutlass.range_constexpr(COMBINERS):  # each of which reads every other tile
            tiles.end(tile_idx + i)

    @cute.jit
    def _load_tiles_ahead(self, tensors: Tensors, tiles: TileRing, up: cutlass.Constexpr, down: cutlass.Constexpr):
        """A weight or scale producer warp: ``up`` or ``down`` with a tile as soon as it is announced."""
        up_steps, down_steps = self.up.steps(tensors.up), self.down.steps(tensors.down)
        n, tile_idx = Int32(0), Int32(0)
        product = tiles.await_announced(tile_idx)
        while product != NONE:
            tile = tiles.tile(tile_idx)
            tiles.release_announced(tile_idx)
            if product == UP:
                up(tile, StageFills(tile_idx, n, up_steps))
                n += up_steps
            else:
                down(tile, StageFills(tile_idx, n, down_steps))
                n += down_steps
            tile_idx += 1
            product = tiles.await_announced(tile_idx)

    @cute.jit
    def _load_tokens(
        self, tensors: Tensors, x: cute.Tensor, parts_of_h: Int32, ring: Ring, tiles: TileRing, shared: MmaSmem,
        which: cutlass.Constexpr,
    ):  # fmt: skip
        """A lane has a token, or a part of it, or two."""
        c = self.c
        cute.arch.griddepcontrol_wait()
        # Only now may the second GEMM's launch begin: what it then reads without waiting, the work tiles, is there.
        cute.arch.griddepcontrol_launch_dependents()
        lane = cute.arch.lane_idx()
        top_k = Int32(tensors.indices.shape[1])
        up_steps, down_steps = self.up.steps(tensors.up), self.down.steps(tensors.down)
        n, tile_idx = Int32(0), Int32(0)
        product = tiles.wait(tile_idx)
        while product != NONE:
            tile, line_of_h = tiles.tile(tile_idx), tiles.line(tile_idx)
            down = product == DOWN
            steps = cutlass.select_(down, down_steps, up_steps)
            count = tile.columns * c.parts
            starts = []
            for start in cutlass.range_constexpr(0, c.columns * c.parts, 32):
                line = start + lane
                of_x = tiles.slot(tile_idx, line // c.parts) // top_k * c.parts + line % c.parts
                of_h = tile.first * c.parts + line
                from_x = x.iterator.toint() + Int64(of_x) * x.stride[0] * 2
                from_h = tensors.h.iterator.toint() + Int64(of_h) * tensors.h.stride[0] * 2
                starts.append(cutlass.select_(down, from_h, from_x))
            tiles.release(tile_idx)
            if const_expr(UP in which):
                if down:
                    await_h(tensors, line_of_h, parts_of_h)
            for k in cutlass.range(steps, unroll=1):
                full = ring.acquire(n, count * (c.stage * 2))
                cute.arch.sync_warp()  # announced before it begins
                for i in cutlass.range_constexpr(len(starts)):
                    line = 32 * i + lane
                    if line < count:
                        to = shared.tokens(ring.slot(n)) + line * c.token_row_bytes
                        memory_ops.bulk_load(to, starts[i] + Int64(k) * (c.stage * 2), Int32(c.stage * 2), full.toint())
                n += 1
            tile_idx += 1
            product = tiles.wait(tile_idx)

    @cute.jit
    def _consume(
        self, tensors: Tensors, scalars: Scalars, ring: Ring, tiles: TileRing, done: Ring, shared: MmaSmem, warp: Int32
    ):
        rSum = self.mainloop.sums()
        up_spans, down_spans = self.up.spans(tensors.up), self.down.spans(tensors.down)
        n, tile_idx = Int32(0), Int32(0)
        product = tiles.wait(tile_idx)
        while product != NONE:
            tile = tiles.tile(tile_idx)
            spans = cutlass.select_(product == UP, up_spans, down_spans)
            bias = [Float32(0.0), Float32(0.0)]  # on its way while the tile is multiplied
            if product == UP:
                bias = self.up.epilogue.lane_bias(tensors, scalars, tile, warp)
            else:
                bias = self.down.epilogue.lane_bias(tensors, scalars, tile, warp)
            self.mainloop.run(rSum, tile.columns, spans, n, ring, shared, warp)
            self.mainloop.reduce_slices(rSum, shared, warp)
            if product == UP:
                self.up.epilogue.run(tensors, scalars, rSum, bias, tile, tiles, tile_idx, shared, warp)
            else:
                self.down.epilogue.run(tensors, scalars, rSum, bias, tile, tiles, tile_idx, shared, warp)
            tiles.release(tile_idx)
            full = done.await_empty(tile_idx)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(full)
            n += (spans + self.c.stage // SPAN - 1) // (self.c.stage // SPAN)
            tile_idx += 1
            product = tiles.wait(tile_idx)

    @cute.jit
    def _combine(self, tensors: Tensors, tiles: TileRing, done: Ring, first: Int32, which: cutlass.Constexpr):
        """By a reducing warp: every ``COMBINERS``-th tile, while the next ones are multiplied."""
        tile_idx = first
        product = tiles.wait(tile_idx)
        while product != NONE:
            if product == UP:
                line = tiles.line(tile_idx)
                tiles.release(tile_idx)
                done.wait(tile_idx)
                if const_expr(DOWN in which):
                    signal_h(tensors, line)
                done.release(tile_idx)
            else:
                self.down.epilogue.combine(tensors, tiles, done, tile_idx)
            tile_idx += COMBINERS
            product = tiles.wait(tile_idx)


def trace(
    arch: str, *, dtype: str, index_dtype: str, activations: str, experts: int, scale_vectors: tuple[int, int],
    code_alignment: int, by_warp: bool, one_launch: bool, **config: Any,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """``experts``: at least so many; ``scale_vectors``: of both products the bytes of scales that a load takes;
    ``by_warp``: whether slots are few enough for ``SortByWarp``; ``one_launch``: of both GEMMs; the others as in
    ``Config``."""
    config |= dict(source=dtype, activations=activations, code_alignment=code_alignment)
    up, down = (
        Config(paired=paired, scale_vector=vector, **config)
        for paired, vector in zip((True, False), scale_vectors, strict=True)
    )
    tensors, scalars, prepare_blocks, blocks, stream = arguments(dtype, index_dtype, code_alignment)
    x = fake.tensor("bf16", (None, None), (fake.dim(8), 1))
    made = MmaExperts(up, down, experts, FAKE_QUANTIZE[activations], by_warp, one_launch)
    return made, [tensors, x, scalars, prepare_blocks, blocks, stream]
