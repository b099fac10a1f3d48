"""Routed experts with FP4 weights before Hopper: a persistent grouped GEMM by ``mma.sync``, swap-AB, W4A16.

    8 warps   all alike: cp.async of weights and tokens, in turn a stage's scales to bf16 factors; dequantise,
              multiply (sm90/mainloop_mma.py), epilogue (sm90/epilogue_mma.py)

    ring     producers                                             consumers
    stages   cp.async of all threads, a commit group a stage;      8 warps, behind the CTA barrier of the stage
             a warp's stores of factors

A stage is waited for by cp.async.wait_group and one CTA barrier, behind which the slot of the stage before it is free:
the copies of the stage that takes it go out there. A tile's first stages go out before the epilogue of the tile ahead.
Three launches: rows of x in K order and slots sorted (sm90/permute.py), the GEMM of w13, the GEMM of w2. The CTA that
writes the last of a token's results for some features sums them, in the order of the choices.

Constraints: those of Hopper's kernel; a ring of at least two stages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from torch_attnkit.cuda import fake
from torch_attnkit.cuda import warp_ops as op

from ..arguments import Flags, Matrices, Scalars, Tensors, arguments
from ..problem import SPAN
from ..quantize_act import FAKE_QUANTIZE
from ..sm90.config import CONSUMERS, SHARED_SMALL, Config
from ..sm90.epilogue_mma import SwigluEpilogue, TopkEpilogue, output_scale
from ..sm90.mainloop_mma import MmaMainloop, MmaSmem, sync_consumers
from ..sm90.permute import PrepareTokens
from ..sm90.tile_scheduler import DOWN, UP, width_of
from ..work_tiles import WorkTile
from .load import Sources, StageLoader, TileTokens


def trace(
    arch: str, *, dtype: str, index_dtype: str, activations: str, experts: int, scale_vectors: tuple[int, int],
    code_alignment: int, by_warp: bool, **config: Any,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """As ``sm90/kernel_mma.py``; ``by_warp`` is False."""
    assert not by_warp
    config |= dict(source=dtype, activations=activations, code_alignment=code_alignment, shared=SHARED_SMALL)
    up, down = (
        Config(paired=paired, scale_vector=vector, **config)
        for paired, vector in zip((True, False), scale_vectors, strict=True)
    )
    tensors, scalars, prepare_blocks, blocks, stream = arguments(dtype, index_dtype, code_alignment)
    x = fake.tensor("bf16", (None, None), (fake.dim(8), 1))
    made = Experts(up, down, experts, FAKE_QUANTIZE[activations])
    return made, [tensors, x, scalars, prepare_blocks, blocks, stream]


_GROUP = 8  # tiles of tokens that take a tile of rows one after another: of an expert that has many, it is read once


class TileScheduler(NamedTuple):
    """Static: a CTA has every ``blocks``-th work tile."""

    block: Int32
    blocks: Int32
    row_tiles: Int32
    token_tiles: Int32

    @property
    def count(self) -> Int32:
        """Of this CTA's work tiles."""
        return (self.row_tiles * self.token_tiles - self.block + self.blocks - 1) // self.blocks

    def tile(self, tensors: Tensors, tile_idx: Int32) -> WorkTile:
        unit, each = self.block + tile_idx * self.blocks, self.row_tiles * _GROUP
        first = unit // each * _GROUP
        size, rest = cutlass.min(self.token_tiles - first, _GROUP), unit % each
        expert, row, columns = (tensors.tiles[1 + first + rest % size, i] for i in range(3))
        return WorkTile(expert, row, columns, rest // size)


class Gemm:
    """One of the two."""

    def __init__(self, config: Config, which: int, epilogue: Any):
        assert config.stages > 1
        self.c, self.which, self.epilogue = config, which, epilogue
        self.loader, self.mainloop = StageLoader(config), MmaMainloop(config)

    def of(self, tensors: Tensors, x: cute.Tensor, scalars: Scalars) -> tuple[Flags, Matrices, cute.Tensor]:
        """The flags, weights and rows of tokens of this GEMM."""
        if self.which == DOWN:
            return scalars.down, tensors.down, tensors.h
        return scalars.up, tensors.up, x

    @cute.jit
    def run(self, tensors: Tensors, x: cute.Tensor, scalars: Scalars):
        """All work tiles of a CTA."""
        c, warp = self.c, cute.arch.make_warp_uniform(cute.arch.warp_idx())
        flags, weights, _ = self.of(tensors, x, scalars)
        memory = cutlass.memory.SmemAllocator()
        shared, tokens = MmaSmem(c, memory), TileTokens(memory)
        spans = (Int32(weights.packed.shape[2]) * 2 + SPAN - 1) // SPAN
        steps = (spans + c.stage // SPAN - 1) // (c.stage // SPAN)
        row_tiles = (Int32(weights.packed.shape[1]) + c.rows - 1) // c.rows
        scheduler = TileScheduler(cute.arch.block_idx()[0], cute.arch.grid_dim()[0], row_tiles, tensors.tiles[0, 0])
        rSum, held = self.mainloop.sums(), self.loader.held()
        if scheduler.count > 0:
            tile = scheduler.tile(tensors, Int32(0))
            sources = self._start(tensors, x, scalars, tile, Int32(0), steps, held, shared, tokens, warp)
            for tile_idx in cutlass.range(scheduler.count, unroll=1):
                rSum.fill(0.0)
                for k in cutlass.range(steps, unroll=1):
                    cute.arch.cp_async_wait_group(c.stages - 2)
                    cute.arch.barrier()
                    self._load(flags, weights, tile, sources, k + c.stages - 1, steps, held, shared, warp)
                    self._multiply(rSum, tile.columns, spans - k * (c.stage // SPAN), k % c.stages, shared, warp)
                cute.arch.barrier()  # all slots of the ring are free
                done = tile
                if tile_idx + 1 < scheduler.count:
                    tile = scheduler.tile(tensors, tile_idx + 1)
                    sources = self._start(tensors, x, scalars, tile, tile_idx + 1, steps, held, shared, tokens, warp)
                self.mainloop.reduce_slices(rSum, shared, warp)
                self._end(tensors, scalars, rSum, done, tile_idx, shared, tokens, warp)

    @cute.jit
    def _start(
        self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, tile: WorkTile, tile_idx: Int32, steps: Int32,
        held: list[cute.Tensor], shared: MmaSmem, tokens: TileTokens, warp: Int32,
    ):  # fmt: skip
        """The first stages of a tile, all but one that the ring holds."""
        flags, weights, rows = self.of(tensors, x, scalars)
        starts = self.loader.token_rows(tensors, tile, self.which)
        sources = self.loader.sources(flags, weights, rows, starts, tile)
        if warp < steps:
            self.loader.read_scales(flags, weights, tile, sources, warp, held)
        for k in cutlass.range_constexpr(self.c.stages - 1):
            self._load(flags, weights, tile, sources, Int32(k), steps, held, shared, warp)
        if warp == CONSUMERS - 1:  # which has no scales of the first stages
            tokens.load(tensors, tile_idx, tile, output_scale(self.c, flags, weights, tile.expert), self.which)
        return sources

    @cute.jit
    def _load(
        self, flags: Flags, weights: Matrices, tile: WorkTile, sources: Sources, k: Int32, steps: Int32,
        held: list[cute.Tensor], shared: MmaSmem, warp: Int32,
    ):  # fmt: skip
        """Stage k, if there is one; a commit group all the same."""
        if k < steps:
            slot = k % self.c.stages
            self.loader.load(weights, tile, sources, k, slot, shared)
            if warp == k % CONSUMERS:
                self.loader.store_factors(held, slot, shared)
                if k + CONSUMERS < steps:
                    self.loader.read_scales(flags, weights, tile, sources, k + CONSUMERS, held)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def _multiply(self, rSum: cute.Tensor, columns: Int32, left: Int32, slot: Int32, shared: MmaSmem, warp: Int32):
        """The products of a stage for a work tile of ``columns`` tokens; ``left``: spans of K from the stage on."""
        c, own = self.c, const_expr(self.mainloop.spans)
        padded, ours = width_of(c, columns), left - warp // c.row_warps * own
        addrs = self.mainloop.lane_addrs(shared, slot, warp)
        for width in cutlass.range_constexpr(len(c.widths)):
            groups = const_expr(c.widths[width])
            if padded == 8 * groups:
                if ours >= own:
                    for span in cutlass.range_constexpr(own):
                        self.mainloop.multiply_span(rSum, groups, addrs, span)
                else:
                    for span in cutlass.range(ours, unroll=1):
                        self.mainloop.multiply_span(rSum, groups, addrs, span)

    @cute.jit
    def _end(
        self, tensors: Tensors, scalars: Scalars, rSum: cute.Tensor, tile: WorkTile, tile_idx: Int32, shared: MmaSmem,
        tokens: TileTokens, warp: Int32,
    ):  # fmt: skip
        """The epilogue of a tile; of the second GEMM also the sums of tokens whose last results these are."""
        bias = self.epilogue.lane_bias(tensors, scalars, tile, warp)
        self.epilogue.run(tensors, scalars, rSum, bias, tile, tokens, tile_idx, shared, warp)
        if const_expr(self.which == DOWN):
            sync_consumers()  # all results of the tile are written
            for column in cutlass.range(warp, tile.columns, CONSUMERS, unroll=1):
                self._combine(tensors, tile, tokens.slot(tile_idx, column), tokens.choices(tile_idx, column))

    @cute.jit
    def _combine(self, tensors: Tensors, tile: WorkTile, slot: Int32, choices: Int32):
        """By a warp: count a token's result, and sum the token if it was the last."""
        token, lane, last = slot // Int32(tensors.indices.shape[1]), cute.arch.lane_idx(), Int32(0)
        if lane == 0:
            at = Int64(token) * tensors.count.stride[0] + tile.row
            if op.add_acq_rel(tensors.count.iterator.toint() + at * 4, Int32(1)) + 1 == choices:
                tensors.count[token, tile.row] = Int32(0)
                last = Int32(1)
        cute.arch.sync_warp()  # what lane 0 acquired is there for all
        if cute.arch.shuffle_sync(last, 0) != 0:
            self.epilogue.add_up(tensors, [token], [Int32(1)], tile.row * self.c.rows, lane * 4)


class Experts:
    """The launches of a call."""

    def __init__(self, up: Config, down: Config, experts: int, rounded: Any):
        self.prepare = PrepareTokens(up, down, experts, rounded, by_warp=False)
        self.gemms = (Gemm(up, UP, SwigluEpilogue(up, rounded)), Gemm(down, DOWN, TopkEpilogue(down)))

    @cute.jit
    def __call__(
        self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, prepare_blocks: Int32, blocks: Int32, stream: Any
    ):
        """``x``: (parts of tokens, whole stages), to be written, as ``Tensors.h`` is."""
        self.prepare.launch(tensors, x, scalars, prepare_blocks, stream)
        for which in (UP, DOWN):
            self.kernel(tensors, x, scalars, which).launch(
                grid=[blocks, 1, 1], block=[32 * CONSUMERS, 1, 1], stream=stream, min_blocks_per_mp=1,
                preferred_smem_carveout=100,
            )  # fmt: skip

    @cute.kernel
    def kernel(self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, which: cutlass.Constexpr):
        """One GEMM."""
        self.gemms[which].run(tensors, x, scalars)
