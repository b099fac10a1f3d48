"""Routed experts with FP4 weights for few tokens an expert on Hopper: weights are the first operand of ``mma.sync``.

    8 warps        decode, multiply (mainloop.py), and what becomes of the sums (epilogue.py)
    1 warp         weights of a stage by TMA
    1 warp         tokens of a stage, a bulk copy each, from rows that prepare.py made
    1 warp         knows work tiles ahead (schedule.py)
    2 warps        in the second product: add up tokens' results
    3 warps        scales of a stage, turned into factors (factors.py)

All stages of a block stand in one ring; a block takes work tiles until none is left. The second product's weights are
on their way while blocks of the first still run (programmatic dependent launch).
docs/kernels/grouped_gemm.md has what limits it. Imports cutlass.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from torch_attnkit.cuda import copies, memory_ops
from torch_attnkit.cuda.ring import Ring, rings

from .arguments import Flags, Matrices, Scalars, Tensors
from .config import CODES, COMBINERS, CONSUMERS, FACTORS, SCHEDULER, SPAN, TILES, TOKENS, WARPS, Config
from .epilogue import Activation, Combine, raised
from .factors import Factors, Lines, prefetch_biases
from .mainloop import Mainloop
from .prepare import Prepare
from .schedule import Tiles, Work, work
from .shared import ROW_BYTES, Loads, Shared, box_rows, loads

# Of a thread in the warpgroups behind the consumers, which keep their 128: scales take most.
_REGISTERS = (96, 160)
assert SCHEDULER + COMBINERS == CONSUMERS + 4  # a combining warp in either


class Product:
    """One product: its kernel, by roles."""

    def __init__(self, config: Config, epilogue: Any):
        self.c, self.epilogue = config, epilogue
        self.factors, self.mainloop = Factors(config), Mainloop(config)

    def of(self, tensors: Tensors, scalars: Scalars) -> tuple[Flags, Matrices]:
        """What of the arguments this product is about."""
        if self.c.paired:
            return scalars.up, tensors.up
        return scalars.down, tensors.down

    @cute.jit
    def launch(self, tensors: Tensors, source: cute.Tensor, scalars: Scalars, blocks: Int32, stream: Any):
        """``source``: (rows, whole stages) of bf16, those of x or of h."""
        self.kernel(tensors, source, scalars, loads(self.c, *self.of(tensors, scalars))).launch(
            grid=[blocks, 1, 1], block=[32 * WARPS, 1, 1], stream=stream, min_blocks_per_mp=1,
            preferred_smem_carveout=100, use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, tensors: Tensors, source: cute.Tensor, scalars: Scalars, loads: Loads):
        c = self.c
        flags, weights = self.of(tensors, scalars)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator()
        readers = const_expr(CONSUMERS + 1 + (0 if c.paired else 1))
        table = (
            ("stages", c.stages, 3, CONSUMERS), ("tiles", TILES, 1, readers), ("done", COMBINERS, CONSUMERS, 1),
        )  # fmt: skip
        made = rings(memory, warp, table)
        ring, done, tiles = made["stages"], made["done"], Tiles(made["tiles"], memory)
        shared = Shared(c, memory)
        lines = Lines(c, memory, warp) if const_expr(c.line_bytes) else None
        if warp == CODES:
            cpasync.prefetch_descriptor(loads.atom)
        shared.clear_tokens()
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        if const_expr(c.paired):
            # Only now may the next launch begin: what it then reads without waiting, the sort's work tiles, is there.
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        share = work(tensors, (Int32(weights.codes.shape[1]) + c.rows - 1) // c.rows)
        spans = (Int32(weights.codes.shape[2]) * 2 + SPAN - 1) // SPAN
        steps = (spans + c.stage // SPAN - 1) // (c.stage // SPAN)
        if warp < CONSUMERS:
            self._consume(tensors, scalars, share, spans, steps, ring, tiles, done, shared, warp)
        elif warp < CONSUMERS + 4:
            cute.arch.setmaxregister_decrease(_REGISTERS[0])
            if warp == CODES:
                self._load_codes(tensors, loads, share, steps, ring, shared)
            elif warp == TOKENS:
                self._load_tokens(tensors, source, share, steps, ring, tiles, shared)
            elif warp == SCHEDULER:
                for turn in cutlass.range(share.count, unroll=1):
                    tile = share.tile(tensors, turn)
                    factor = raised(c, flags, weights, tile.expert)
                    tiles.publish(tensors, turn, tile, factor, combined=not c.paired)
            elif const_expr(not c.paired):
                self.epilogue.combine(tensors, share, tiles, done, Int32(0))
        else:
            cute.arch.setmaxregister_increase(_REGISTERS[1])
            if warp > SCHEDULER + COMBINERS:
                part = warp - SCHEDULER - COMBINERS - 1
                self._load_factors(tensors, flags, weights, share, steps, ring, shared, lines, part)
            elif const_expr(not c.paired):
                self.epilogue.combine(tensors, share, tiles, done, Int32(1))

    @cute.jit
    def _load_codes(self, tensors: Tensors, loads: Loads, share: Work, steps: Int32, ring: Ring, shared: Shared):
        c = self.c
        n = Int32(0)
        for turn in cutlass.range(share.count, unroll=1):
            tile = share.tile(tensors, turn)
            share.prefetch(tensors, turn + 1)  # for all roles: this one is the first to need it
            gW = cute.local_tile(loads.rows[None, None, tile.expert], (box_rows(c), ROW_BYTES), (None, None))
            tWs, tWg = copies.tma_partition(loads.atom, 0, 1, shared.sW, gW)
            for k in cutlass.range(steps, unroll=1):
                full = ring.acquire(n, c.weight_bytes)
                for box in cutlass.range_constexpr(c.boxes):
                    from_, to = tWg[None, tile.row, k * c.boxes + box], tWs[None, ring.slot(n) * c.boxes + box]
                    cute.copy(loads.atom, from_, to, tma_bar_ptr=full)
                n += 1

    @cute.jit
    def _load_tokens(
        self, tensors: Tensors, source: cute.Tensor, share: Work, steps: Int32, ring: Ring, tiles: Tiles,
        shared: Shared,
    ):  # fmt: skip
        """A lane has a token, or a part of it, or two."""
        c = self.c
        if const_expr(not c.paired):  # weights may come before h is there
            cute.arch.griddepcontrol_wait()
        lane = cute.arch.lane_idx()
        top_k = Int32(tensors.indices.shape[1])
        n = Int32(0)
        for turn in cutlass.range(share.count, unroll=1):
            tile = tiles.wait(turn)
            count = tile.columns * c.parts
            starts = []
            for start in cutlass.range_constexpr(0, c.columns * c.parts, 32):
                line = start + lane
                row = tile.first * c.parts + line
                if const_expr(c.paired):
                    row = tiles.slot(turn, line // c.parts) // top_k * c.parts + line % c.parts
                starts.append(source.iterator.toint() + Int64(row) * source.stride[0] * 2)
            cute.arch.sync_warp()
            tiles.release(turn)
            for k in cutlass.range(steps, unroll=1):
                full = ring.acquire(n, count * (c.stage * 2))
                cute.arch.sync_warp()  # announced before it begins
                for i in cutlass.range_constexpr(len(starts)):
                    line = 32 * i + lane
                    if line < count:
                        to = shared.tokens(ring.slot(n)) + line * c.token_row_bytes
                        memory_ops.bulk_load(to, starts[i] + Int64(k) * (c.stage * 2), Int32(c.stage * 2), full.toint())
                n += 1

    @cute.jit
    def _load_factors(
        self, tensors: Tensors, flags: Flags, weights: Matrices, share: Work, steps: Int32, ring: Ring, shared: Shared,
        lines: Any, part: Int32,
    ):  # fmt: skip
        """Every ``FACTORS``-th stage's: its scales are on their way before its place in the ring is free."""
        lane = cute.arch.lane_idx()
        n = Int32(0)
        for turn in cutlass.range(share.count, unroll=1):
            tile = share.tile(tensors, turn)
            if part == 0:
                prefetch_biases(self.c, flags, weights, tile, lane)
            if const_expr(lines is not None):
                starts = self.factors.bring(flags, weights, tile, turn, part, lane, lines)
            else:
                starts = self.factors.rows(flags, weights, tile, lane)
            for k in cutlass.range((part + n * (FACTORS - 1)) % FACTORS, steps, FACTORS, unroll=1):
                rS = self.factors.read(flags, weights, tile, starts, k)
                full = ring.await_empty(n + k)
                self.factors.store(rS, lane, shared.factors(ring.slot(n + k)))
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(full)
            if const_expr(lines is not None):
                cute.arch.sync_warp()
                lines.ring.release(turn)
            n += steps

    @cute.jit
    def _consume(
        self, tensors: Tensors, scalars: Scalars, share: Work, spans: Int32, steps: Int32, ring: Ring, tiles: Tiles,
        done: Ring, shared: Shared, warp: Int32,
    ):  # fmt: skip
        rSum = self.mainloop.sums()
        n = Int32(0)
        for turn in cutlass.range(share.count, unroll=1):
            tile = tiles.wait(turn)
            self.mainloop.run(rSum, tile.columns, spans, n, ring, shared, warp)
            self.mainloop.join_slices(rSum, shared, warp)
            self.epilogue.run(tensors, scalars, rSum, tile, tiles, turn, shared, warp)
            cute.arch.sync_warp()
            tiles.release(turn)
            if const_expr(not self.c.paired):
                full = done.await_empty(turn)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(full)
            n += steps


class Experts:
    """The launches of a call."""

    def __init__(self, up: Config, down: Config, experts: int, rounded: Any):
        self.prepare = Prepare(up, down, experts, rounded)
        self.up = Product(up, Activation(up, rounded))
        self.down = Product(down, Combine(down))

    @cute.jit
    def __call__(
        self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, blocks: Int32, up_blocks: Int32, down_blocks: Int32,
        stream: Any,
    ):  # fmt: skip
        """``x``: (parts of tokens, whole stages), to be written, as ``Tensors.h`` is."""
        self.prepare.launch(tensors, x, scalars, blocks, stream)
        self.up.launch(tensors, x, scalars, up_blocks, stream)
        self.down.launch(tensors, tensors.h, scalars, down_blocks, stream)
