"""Routed experts with FP4 weights for few tokens an expert on Hopper: weights are the first operand of ``mma.sync``.

    8 warps        decode, multiply (mainloop.py), and what becomes of the sums (epilogue.py)
    1 warp         weights of a stage by TMA, or where it takes no such rows by cp.async (codes.py)
    1 warp         tokens of a stage, a bulk copy each, from rows that prepare.py made or that the first product left
    1 warp         takes work tiles, and knows them ahead (schedule.py)
    2 warps        say that a part of h is there; in the second product add up tokens' results
    3 warps        scales of a stage, turned into factors (factors.py)

A product is a launch, in which a block takes work tiles until none is left. The second begins as blocks of the first
leave, and its weights are on their way before h is there, for which only the warp that brings tokens waits.

Where slots are few (``by_warp``) every block sorts them for itself and waits for x's rows alone, and both products are
one launch: all work tiles of the first come before those of the second, all stages of a block stand in one ring.
docs/kernels/grouped_gemm.md has what limits it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from torch_attnkit.cuda import copies, memory_ops
from torch_attnkit.cuda.ring import Ring, rings

from .arguments import Flags, Matrices, Scalars, Tensors
from .codes import await_copies, copy_codes
from .config import CODES, COMBINERS, CONSUMERS, SCHEDULER, SPAN, TILES, TOKENS, WARPS, Config
from .epilogue import Activation, Combine, raised
from .factors import Factors, Lines, prefetch_biases
from .mainloop import Mainloop
from .prepare import Prepare
from .routing import SortByWarp
from .schedule import DOWN, NONE, UP, RowTiles, Tickets, Tiles, WorkTile, await_h, end_tickets, h_has_come, take
from .shared import ROW_BYTES, Loads, Shared, box_rows, loads

# Of a thread in the warpgroups behind the consumers, which keep their 128: scales take most.
_REGISTERS = (96, 160)
assert SCHEDULER + COMBINERS == CONSUMERS + 4  # a combining warp in either


class Fills(NamedTuple):
    """Which work tile of the block it is, and which fills of the ring are its stages."""

    turn: Int32
    first: Int32
    steps: Int32


class Product:
    """What is one product's alone. ``factor_warps`` as in ``Config``, of the ring that both have."""

    def __init__(self, config: Config, epilogue: Any, factor_warps: int):
        self.c, self.epilogue, self.factors, self.factor_warps = config, epilogue, Factors(config), factor_warps

    def of(self, tensors: Tensors, scalars: Scalars) -> tuple[Flags, Matrices]:
        """What of the arguments this product is about."""
        if self.c.paired:
            return scalars.up, tensors.up
        return scalars.down, tensors.down

    def row_tiles(self, weights: Matrices) -> Int32:
        return (Int32(weights.codes.shape[1]) + self.c.rows - 1) // self.c.rows

    def spans(self, weights: Matrices) -> Int32:
        """Of a row."""
        return (Int32(weights.codes.shape[2]) * 2 + SPAN - 1) // SPAN

    def steps(self, weights: Matrices) -> Int32:
        """Stages of a work tile."""
        each = self.c.stage // SPAN
        return (self.spans(weights) + each - 1) // each

    @cute.jit
    def load_codes(self, loads: Loads, ring: Ring, shared: Shared, tile: WorkTile, fills: Fills):
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
    def copy_codes(self, flags: Flags, weights: Matrices, ring: Ring, shared: Shared, tile: WorkTile, fills: Fills):
        """The same where rows start or end between those places that TMA takes."""
        for k in cutlass.range(fills.steps, unroll=1):
            n = fills.first + k
            full = ring.await_empty(n)
            copy_codes(self.c, flags, weights, tile, k, shared.weights(ring.slot(n)), full)

    @cute.jit
    def load_factors(
        self, flags: Flags, weights: Matrices, part: Int32, lines: Any, ring: Ring, shared: Shared, tile: WorkTile,
        fills: Fills,
    ):  # fmt: skip
        """Every such warp has a stage in turn: its scales are on their way before its place in the ring is free."""
        lane, warps = cute.arch.lane_idx(), const_expr(self.factor_warps)
        if part == 0:
            prefetch_biases(self.c, flags, weights, tile, lane)
        if const_expr(lines is not None):
            starts = self.factors.bring(flags, weights, tile, fills.turn, part, lane, lines)
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
        if const_expr(lines is not None):
            cute.arch.sync_warp()
            lines.ring.release(fills.turn)


class Experts:
    """The launches of a call: ``prepare``'s, and those of the products, by roles."""

    def __init__(self, up: Config, down: Config, experts: int, rounded: Any, by_warp: bool):
        self.by_warp, self.prepare = by_warp, Prepare(up, down, experts, rounded, by_warp)
        self.launches = ((UP, DOWN),) if by_warp else ((UP,), (DOWN,))
        self.up = Product(up, Activation(up, rounded), up.factor_warps)
        self.down = Product(down, Combine(down), up.factor_warps)
        self.c, self.mainloop = up, Mainloop(up)  # for both: their work tiles differ in the number of steps alone

    @cute.jit
    def __call__(
        self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, prepare_blocks: Int32, blocks: Int32, stream: Any
    ):
        """``x``: (parts of tokens, whole stages), to be written, as ``Tensors.h`` is."""
        self.prepare.launch(tensors, x, scalars, prepare_blocks, stream)
        up_loads, down_loads = (
            loads(p.c, *p.of(tensors, scalars)) if self.c.by_tma else None for p in (self.up, self.down)
        )
        for which in self.launches:
            self.kernel(tensors, x, scalars, up_loads, down_loads, which).launch(
                grid=[blocks, 1, 1], block=[32 * WARPS, 1, 1], stream=stream, min_blocks_per_mp=1,
                preferred_smem_carveout=100, use_pdl=True,
            )  # fmt: skip

    @cute.kernel
    def kernel(
        self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, up_loads: Loads, down_loads: Loads,
        which: cutlass.Constexpr,
    ):  # fmt: skip
        """``which``: the products of this launch. One that it has not has no tiles of rows."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator()
        table = (
            ("stages", self.c.stages, self.c.code_arrivals + 2, CONSUMERS),
            ("announced", TILES, 1, 1 + self.c.factor_warps),
            ("tiles", TILES, 1, CONSUMERS + 2), ("done", COMBINERS, CONSUMERS, 1),
        )  # fmt: skip
        made = rings(memory, warp, table)
        ring, done, tiles = made["stages"], made["done"], Tiles(made["announced"], made["tiles"], memory)
        shared = Shared(self.c, memory)
        lines = Lines(self.c, memory, warp) if self.c.line_bytes else None
        sort = SortByWarp(self.c.columns, memory) if self.by_warp else None
        if warp == CODES:
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
            if warp == CODES:
                if const_expr(self.c.by_tma):
                    codes = (partial(p.load_codes, its_loads, ring, shared) for p, its_loads in products)
                    self._bring(tensors, tiles, *codes)
                else:
                    copied = (partial(p.copy_codes, *p.of(tensors, scalars), ring, shared) for p, _ in products)
                    self._bring(tensors, tiles, *copied)
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
                    partial(p.load_factors, *p.of(tensors, scalars), part, lines, ring, shared) for p, _ in products
                )
                if part < self.c.factor_warps:
                    self._bring(tensors, tiles, *factors)
            else:
                self._combine(tensors, tiles, done, Int32(1), which)

    @cute.jit
    def _schedule(
        self, tensors: Tensors, scalars: Scalars, rows: RowTiles, tiles: Tiles, taken: Int32, sort: Any,
        which: cutlass.Constexpr,
    ):  # fmt: skip
        """``taken``: the first ticket; the next is always on its way. ``sort``: the block's own, where it has one."""
        lines, order = tensors.tiles, tensors.order
        if const_expr(sort is None):
            if const_expr(UP in which):  # the second launch begins when the first has waited for them
                cute.arch.griddepcontrol_wait()
        else:
            lines, order = sort.sTiles, sort.sOrder
        tickets = Tickets(rows, lines[0, 0])
        ticket, turn = cute.arch.shuffle_sync(taken, 0), Int32(0)
        product, line, tile = tickets.work(lines, ticket)
        while ticket < tickets.all:
            taken = take(tensors, which[-1])
            tiles.announce(turn, tile, product, line)
            slot = Int32(0)
            if cute.arch.lane_idx() < tile.columns:
                slot = order[tile.first + cute.arch.lane_idx()]
            factor = Float32(0.0)
            if product == UP:
                factor = raised(self.up.c, scalars.up, tensors.up, tile.expert)
            else:
                factor = raised(self.down.c, scalars.down, tensors.down, tile.expert)
            ticket = cute.arch.shuffle_sync(taken, 0)
            following = tickets.work(lines, ticket)  # on its way before what is published is waited for
            tiles.publish(tensors, turn, slot, tile.columns, product, factor)
            product, line, tile = following
            turn += 1
        end_tickets(tensors, tickets, ticket, which[-1])
        for i in cutlass.range_constexpr(COMBINERS):  # each of which reads every other turn
            tiles.end(turn + i)

    @cute.jit
    def _bring(self, tensors: Tensors, tiles: Tiles, up: cutlass.Constexpr, down: cutlass.Constexpr):
        """What a warp that brings weights does: ``up`` or ``down`` with a work tile as soon as it is announced."""
        up_steps, down_steps = self.up.steps(tensors.up), self.down.steps(tensors.down)
        n, turn = Int32(0), Int32(0)
        product = tiles.await_announced(turn)
        while product != NONE:
            tile = tiles.tile(turn)
            tiles.release_announced(turn)
            if product == UP:
                up(tile, Fills(turn, n, up_steps))
                n += up_steps
            else:
                down(tile, Fills(turn, n, down_steps))
                n += down_steps
            turn += 1
            product = tiles.await_announced(turn)

    @cute.jit
    def _load_tokens(
        self, tensors: Tensors, x: cute.Tensor, parts_of_h: Int32, ring: Ring, tiles: Tiles, shared: Shared,
        which: cutlass.Constexpr,
    ):  # fmt: skip
        """A lane has a token, or a part of it, or two."""
        c = self.c
        cute.arch.griddepcontrol_wait()
        # Only now may the second product's launch begin: what it then reads without waiting, the work tiles, is there.
        cute.arch.griddepcontrol_launch_dependents()
        lane = cute.arch.lane_idx()
        top_k = Int32(tensors.indices.shape[1])
        up_steps, down_steps = self.up.steps(tensors.up), self.down.steps(tensors.down)
        n, turn = Int32(0), Int32(0)
        product = tiles.wait(turn)
        while product != NONE:
            tile, line_of_h = tiles.tile(turn), tiles.line(turn)
            down = product == DOWN
            steps = cutlass.select_(down, down_steps, up_steps)
            count = tile.columns * c.parts
            starts = []
            for start in cutlass.range_constexpr(0, c.columns * c.parts, 32):
                line = start + lane
                of_x = tiles.slot(turn, line // c.parts) // top_k * c.parts + line % c.parts
                of_h = tile.first * c.parts + line
                from_x = x.iterator.toint() + Int64(of_x) * x.stride[0] * 2
                from_h = tensors.h.iterator.toint() + Int64(of_h) * tensors.h.stride[0] * 2
                starts.append(cutlass.select_(down, from_h, from_x))
            tiles.release(turn)
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
            turn += 1
            product = tiles.wait(turn)

    @cute.jit
    def _consume(
        self, tensors: Tensors, scalars: Scalars, ring: Ring, tiles: Tiles, done: Ring, shared: Shared, warp: Int32
    ):
        rSum = self.mainloop.sums()
        up_spans, down_spans = self.up.spans(tensors.up), self.down.spans(tensors.down)
        n, turn = Int32(0), Int32(0)
        product = tiles.wait(turn)
        while product != NONE:
            tile = tiles.tile(turn)
            spans = cutlass.select_(product == UP, up_spans, down_spans)
            self.mainloop.run(rSum, tile.columns, spans, n, ring, shared, warp)
            self.mainloop.join_slices(rSum, shared, warp)
            if product == UP:
                self.up.epilogue.run(tensors, scalars, rSum, tile, tiles, turn, shared, warp)
            else:
                self.down.epilogue.run(tensors, scalars, rSum, tile, tiles, turn, shared, warp)
            tiles.release(turn)
            full = done.await_empty(turn)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(full)
            n += (spans + self.c.stage // SPAN - 1) // (self.c.stage // SPAN)
            turn += 1
            product = tiles.wait(turn)

    @cute.jit
    def _combine(self, tensors: Tensors, tiles: Tiles, done: Ring, first: Int32, which: cutlass.Constexpr):
        """What is left to do with every ``COMBINERS``-th work tile, while the next ones are multiplied."""
        turn = first
        product = tiles.wait(turn)
        while product != NONE:
            if product == UP:
                line = tiles.line(turn)
                tiles.release(turn)
                done.wait(turn)
                if const_expr(DOWN in which):
                    h_has_come(tensors, line)
                done.release(turn)
            else:
                self.down.epilogue.combine(tensors, tiles, done, turn)
            turn += COMBINERS
            product = tiles.wait(turn)
