"""Persistent grouped GEMM on Blackwell by block-scaled ``tcgen05.mma``: E2M1 or E4M3 activations times E2M1 weights.

    4 warps   scales of a stage, of 128 tokens and 128 or 256 rows of weights (load_scales.py)
    1 warp    weights of a stage by TMA; of the second GEMM before h is written
    1 warp    activations by TMA, 32 or 8 rows at a time, as many as the tile has
    1 warp    MMA: copies a stage's scales to tensor memory, issues the MMAs, commits
    4 warps   epilogue (epilogue.py), while the next tile accumulates in the other buffer

    ring      producers (arrivals of each CTA of a pair)   consumers (arrivals)
    stages    weights 1, activations 1, scales 4           tcgen05.commit, 1 of each neighbour
    sums      tcgen05.commit 1                             4 epilogue warps of each CTA of a pair

Tokens are the lanes of tensor memory, so a thread has neighbouring features of one token and quantises a block of h
alone. With few tokens weights are the lanes and tokens the columns, a multiple of eight (swap-AB, epilogue_swap_ab.py).
With many a tile has two row tiles, which share loads of activations. Tiles are scheduled statically, an expert's one
after another. Rows of gate and of up are halves of a row tile, halves of the weights or interleaved: only strides of
the tensor map differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float4E2M1FN, Float32, Int8, Int32, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.ring import Fixed, Ring, rings
from torch_attnkit.cuda.sm100 import block_scaled, tmem
from torch_attnkit.cuda.sm100.block_scaled_fp8 import Fp4ByFp8, Fp8ByFp4
from torch_attnkit.cuda.sm100.products import NEXT_STEP, descriptor

from ..arguments import Flags, Matrices
from .cluster import Cluster, ceil_div
from .config import (
    BITS,
    BUFFERS,
    COLUMN_STEP,
    PRODUCT_WARP,
    RESULT_WARPS,
    ROW_BYTES,
    SCALE_WARPS,
    THREADS,
    TOKEN_WARP,
    WEIGHT_ROWS,
    WEIGHT_WARP,
    Config,
)
from .epilogue import factor_of, load_biases
from .load_scales import ScaleLoader, row_tile


class TmaLoads(NamedTuple):
    """A tensor for TMA."""

    atom: cute.CopyAtom
    rows: cute.Tensor  # (rows, bytes) of tokens; (rows, bytes, E) of weights, rows of gate and up as (M, 2)


@dataclass
class BlockScaledSmem(Fixed):
    """A block's shared memory: a ring of stages, and sums' barriers."""

    stages: Ring
    sums: Ring
    sX: cute.Tensor  # (rows of a box, bytes, boxes of all stages)
    sW: cute.Tensor  # (rows, bytes, row tiles of all stages)
    scales: Int32  # address of (stage, tokens or row tile of weights)
    sBias: cute.Tensor  # (rows of a row tile)
    results: Int32  # address of what ``results`` needs


def swizzled(layout: cute.Layout) -> Any:
    """128 bytes of a row, as TMA and MMA have them."""
    return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, layout)


def weight_tma(config: Config, flags: Flags, weights: Matrices) -> TmaLoads:
    """TMA of a GEMM's packed weights, a stage at a time."""
    packed = weights.packed
    experts, rows, nbytes = packed.shape
    expert_step, row_step, _ = packed.stride
    shape, steps = rows, row_step
    if config.paired:
        # From a gate row to the next, and to its up row.
        interleaved = flags.interleaved != 0
        steps = (
            cute.assume(cutlass.select_(interleaved, 2 * row_step, row_step), divby=16),
            cute.assume(cutlass.select_(interleaved, row_step, rows // 2 * row_step), divby=16),
        )
        shape = (rows // 2, 2)
    layout = cute.make_layout((shape, nbytes, experts), stride=(steps, 1, expert_step))
    box, box_steps = config.box_layout
    tile, op = swizzled(cute.make_layout(box, stride=box_steps)), Cluster(config).load("weights")
    if config.unpacked:
        pointer = cute.recast_ptr(packed.iterator, dtype=Float4E2M1FN)
        elements = cute.make_tensor(pointer, cute.recast_layout(4, 8, layout))
        return TmaLoads(*cpasync.make_tiled_tma_atom(op, elements, tile, box, internal_type=Int8))
    return TmaLoads(*cpasync.make_tiled_tma_atom(op, cute.make_tensor(packed.iterator, layout), tile, box))


@cute.jit
def begin(config: cutlass.Constexpr):
    """All threads, once barriers and tensor memory are set up."""
    cute.arch.mbarrier_init_fence()
    tmem.before_sync()
    Cluster(config).sync()
    tmem.after_sync()
    cute.arch.griddepcontrol_launch_dependents()


def await_work_tiles(config: Config) -> None:
    """Before anything else: the host knows only how many tiles there may be, and CTAs without one set nothing up. The
    second GEMM starts when all CTAs of the first have exited, or waited here and started."""
    if config.paired:
        cute.arch.griddepcontrol_wait()


class BlockScaledGemm:
    """The kernel, by warp roles. ``results``: the epilogue."""

    def __init__(self, config: Config, results: Any):
        self.c, self.results, self.scales = config, results, ScaleLoader(config)
        self.cluster = Cluster(config)
        self.stages, self.buffers = config.stages, BUFFERS[config.row_tiles]
        of_bytes = Fp4ByFp8() if config.few else Fp8ByFp4()
        self.format = of_bytes if config.unpacked else block_scaled.FORMATS[config.format]
        self.kind = Int8 if config.unpacked else Uint8  # of weights in shared memory
        self.row_tile_bytes = WEIGHT_ROWS * ROW_BYTES // config.ctas  # of weights, of a stage
        self.box_bytes, self.boxes = config.token_box * ROW_BYTES, config.tokens // config.token_box  # of tokens
        # TMA counts what it reads.
        self.weight_bytes = self.row_tile_bytes * 4 // BITS[config.activations]

    @cute.jit
    def launch(
        self, tensors: Any, flags: Flags, weights: Matrices, rows: cute.Tensor, scalars: Any, blocks: Int32,
        stream: Any,
    ):  # fmt: skip
        """``rows``: x or h, as ``QuantizedRow`` has them."""
        self.kernel(
            tensors,
            flags,
            weights,
            rows,
            scalars,
            weight_tma(self.c, flags, weights),
            self._token_loads(weights, rows),
        ).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], cluster=[self.cluster.size, 1, 1], stream=stream,
            min_blocks_per_mp=1, use_pdl=True,
        )  # fmt: skip

    def _token_loads(self, weights: Matrices, rows: cute.Tensor) -> TmaLoads:
        slots, step = rows.shape[0], rows.stride[0]
        nbytes = weights.packed.shape[2] * 2 * BITS[self.c.activations] // 8
        layout = cute.make_layout((slots, nbytes), stride=(cute.assume(2 * step, divby=16), 1))
        tensor = cute.make_tensor(cute.recast_ptr(rows.iterator, dtype=Uint8), layout)
        box = (self.c.token_box, ROW_BYTES)
        tile = swizzled(cute.make_layout(box, stride=(ROW_BYTES, 1)))
        return TmaLoads(*cpasync.make_tiled_tma_atom(self.cluster.load("tokens"), tensor, tile, box))

    @cute.kernel
    def kernel(
        self, tensors: Any, flags: Flags, weights: Matrices, rows: cute.Tensor, scalars: Any, packed: TmaLoads,
        tokens: TmaLoads,
    ):  # fmt: skip
        await_work_tiles(self.c)
        # Of gate and up a work tile has half of its rows each.
        row_tiles = ceil_div(Int32(weights.packed.shape[1]), WEIGHT_ROWS)
        share = self.cluster.share(tensors, ceil_div(row_tiles, self.c.row_tiles))
        if share.count > 0:
            self._roles(tensors, flags, weights, rows, scalars, packed, tokens, share, row_tiles)

    @cute.jit
    def _roles(
        self, tensors: Any, flags: Flags, weights: Matrices, rows: cute.Tensor, scalars: Any, packed: TmaLoads,
        tokens: TmaLoads, part: Any, row_tiles: Int32,
    ):  # fmt: skip
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        s = self._shared(warp)
        if warp == WEIGHT_WARP:
            cpasync.prefetch_descriptor(packed.atom)
        if warp == TOKEN_WARP:
            cpasync.prefetch_descriptor(tokens.atom)
        begin(self.c)
        columns = Int32(weights.packed.shape[2]) * 2
        k_tiles = ceil_div(columns, self.c.stage)
        if warp < RESULT_WARPS:
            self._results(tensors, flags, weights, scalars, part, row_tiles, s, warp)
        elif warp < PRODUCT_WARP:
            if const_expr(not self.c.paired):
                cute.arch.griddepcontrol_wait()
            self.scales.run(tensors, flags, weights, rows, part, k_tiles, s.stages, s.scales, warp - RESULT_WARPS)
        elif warp == PRODUCT_WARP:
            if part.coord.rank == 0:
                self._multiply(tensors, part, row_tiles, columns, k_tiles, s)
        elif warp == WEIGHT_WARP:
            self._load_weights(tensors, packed, part, row_tiles, k_tiles, s)
        else:
            if const_expr(not self.c.paired):
                cute.arch.griddepcontrol_wait()
            self._load_tokens(tensors, tokens, part, k_tiles, s)
        tmem.before_sync()
        self.cluster.sync()
        tmem.after_sync()
        if warp == PRODUCT_WARP:
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.cluster.two)
            cute.arch.dealloc_tmem(tmem.pointer(Float32, 0), tmem.COLUMNS, is_two_cta=self.cluster.two)

    @cute.jit
    def _shared(self, warp: Int32):
        memory = cutlass.memory.SmemAllocator()
        ctas, neighbours = self.c.ctas, self.c.neighbours
        table = (
            ("stages", self.stages, ctas * (2 + SCALE_WARPS), neighbours),
            ("sums", self.buffers, 1, ctas * RESULT_WARPS),
        )
        named = rings(memory, warp, table)
        base = memory.allocate(4, 4)
        if warp == PRODUCT_WARP:
            cute.arch.alloc_tmem(tmem.COLUMNS, cute.recast_ptr(base, dtype=Int32), is_two_cta=self.cluster.two)
        swizzle = cute.make_swizzle(3, 4, 3)
        boxes = cute.make_layout(
            (self.c.token_box, ROW_BYTES, self.boxes * self.stages), stride=(ROW_BYTES, 1, self.box_bytes)
        )
        box, steps = self.c.box_layout
        of_stages = cute.make_layout(self.stages * self.c.row_tiles, stride=self.row_tile_bytes)
        weights = cute.append(cute.make_layout(box, stride=steps), of_stages)
        return BlockScaledSmem(
            stages=named["stages"],
            sums=named["sums"],
            sX=memory.allocate_tensor(Uint8, boxes, 1024, swizzle=swizzle),
            sW=memory.allocate_tensor(self.kind, weights, 1024, swizzle=swizzle),
            scales=memory.allocate(self.stages * self.c.stage_scales, 128).toint(),
            sBias=memory.allocate_tensor(Float32, cute.make_layout(WEIGHT_ROWS), 16),
            results=memory.allocate(max(self.results.shared_bytes, 16), 16).toint(),
        )

    def _present(self, row: Int32, row_tiles: Int32) -> Int32:
        """Row tiles of a work tile, of an expert's."""
        return cutlass.min(row_tiles - row * self.c.row_tiles, self.c.row_tiles)

    def _box(self, share: Any, row_tile: Int32) -> Any:
        """Of a row tile what a CTA loads."""
        if self.c.ctas == 1:
            return row_tile
        return (row_tile, share.coord.rank) if self.c.paired else row_tile * self.c.ctas + share.coord.rank

    @cute.jit
    def _load_weights(
        self, tensors: Any, packed: TmaLoads, share: Any, row_tiles: Int32, k_tiles: Int32, s: BlockScaledSmem
    ):
        n = Int32(0)
        for tile_idx in cutlass.range(share.count, unroll=1):
            tile = share.tile(tensors, tile_idx)
            gW = cute.local_tile(packed.rows[None, None, tile.expert], (self.c.box, ROW_BYTES), (None, None))
            tWs, tWg = copies.tma_partition(packed.atom, 0, 1, s.sW, gW)
            present = self._present(tile.row, row_tiles)
            apart = share.apart(tensors, tile_idx) if const_expr(self.cluster.shares("weights")) else False
            mask = self.cluster.to_neighbours("weights", apart)
            for k in cutlass.range(k_tiles, unroll=1):
                full = s.stages.await_empty(n)
                self.cluster.announce(full, present * self.weight_bytes)
                for i in cutlass.range_constexpr(self.c.row_tiles):
                    load = (i == 0) | (i < present)
                    if const_expr(self.cluster.shares("weights")):
                        load = load & (apart | ((k + i) & 1 == share.coord.neighbour))
                    if load:
                        to = s.stages.slot(n) * self.c.row_tiles + i
                        source = tWg[None, self._box(share, tile.row * self.c.row_tiles + i), k]
                        cute.copy(packed.atom, source, tWs[None, to], tma_bar_ptr=full, **mask)
                n += 1
        if const_expr(self.cluster.size > 1):
            # What the last products' commits tell this CTA must find it still there.
            for i in cutlass.range_constexpr(self.stages):
                s.stages.await_empty(n + i)

    @cute.jit
    def _load_tokens(self, tensors: Any, tokens: TmaLoads, share: Any, k_tiles: Int32, s: BlockScaledSmem):
        """Of a box, rows behind a tile's last are those of the next expert, or beyond the tensor and zeros; boxes that
        a tile does not have are left as they were. Their accumulators are not used."""
        n = Int32(0)
        for tile_idx in cutlass.range(share.count, unroll=1):
            tile = share.tile(tensors, tile_idx)
            rows = cute.domain_offset((tile.first, 0), tokens.rows)
            gX = cute.local_tile(rows, (self.c.token_box, ROW_BYTES), (None, None))
            tXs, tXg = copies.tma_partition(tokens.atom, 0, 1, s.sX, gX)
            boxes = ceil_div(tile.columns, self.c.token_box)
            mask = self.cluster.to_neighbours("tokens")
            # Of shared ones each neighbour loads every so many-th.
            first, step = (share.coord.neighbour, self.c.neighbours) if self.cluster.shares("tokens") else (Int32(0), 1)
            for k in cutlass.range(k_tiles, unroll=1):
                full = s.stages.await_empty(n)
                self.cluster.announce(full, boxes * self.box_bytes)
                for box in cutlass.range(first, boxes, step, unroll=1):
                    to = s.stages.slot(n) * self.boxes + box
                    cute.copy(tokens.atom, tXg[None, box, k], tXs[None, to], tma_bar_ptr=full, **mask)
                n += 1

    @cute.jit
    def _multiply(self, tensors: Any, share: Any, row_tiles: Int32, columns: Int32, k_tiles: Int32, s: BlockScaledSmem):
        """Copies to tensor memory and MMAs run in the order in which one thread issues them."""
        f, tile_columns = self.format, const_expr(block_scaled.TILE_COLUMNS)
        # The first column of scales: of tokens, then of each row tile of weights.
        of_tokens, columns_each = const_expr(self.buffers * WEIGHT_ROWS), const_expr(f.tiles * tile_columns)
        n, m = Int32(0), Int32(0)  # stages and row tiles of work tiles before
        for tile_idx in cutlass.range(share.count, unroll=1):
            width = Int32(WEIGHT_ROWS)  # columns of an MMA
            if const_expr(self.c.few):
                tokens = cute.arch.make_warp_uniform(share.tile(tensors, tile_idx).columns)
                width = ceil_div(tokens, COLUMN_STEP) * COLUMN_STEP
            present = self._present(share.row(tile_idx), row_tiles)
            for i in cutlass.range_constexpr(self.c.row_tiles):
                if (i == 0) | (i < present):
                    s.sums.await_empty(m + i)
            tmem.after_sync()
            for k in cutlass.range(k_tiles, unroll=1):
                s.stages.wait(n)
                slot = s.stages.slot(n)
                at = s.scales + slot * self.c.stage_scales
                x = descriptor(s.sX.iterator.toint() + slot * (self.boxes * self.box_bytes), ROW_BYTES)
                with cute.arch.elect_one():
                    for j in cutlass.range_constexpr((1 + self.c.row_tiles) * f.tiles):
                        tile = block_scaled.scales_descriptor(at + j * block_scaled.TILE_BYTES)
                        self.cluster.products.copy_scales(Int32(of_tokens + j * tile_columns), tile)
                    for i in cutlass.range_constexpr(self.c.row_tiles):
                        if (i == 0) | (i < present):
                            rows = s.sW.iterator.toint() + (slot * self.c.row_tiles + i) * self.row_tile_bytes
                            w, d = descriptor(rows, ROW_BYTES), s.sums.slot(m + i) * WEIGHT_ROWS
                            of_weights = const_expr(of_tokens + (1 + i) * columns_each)
                            for step in cutlass.range_constexpr(self.c.stage // self.c.step):
                                if (step == 0) | (k * self.c.stage + step * self.c.step < columns):
                                    column = const_expr(step * self.c.step // f.tile_elements * tile_columns)
                                    of_x = x + NEXT_STEP * step, Int32(of_tokens + column)
                                    of_w = w + NEXT_STEP * step, Int32(of_weights + column)
                                    self._product(step, d, of_x, of_w, width, k + step > 0)
                    self.cluster.commit(s.stages.empty + slot, True)
                n += 1
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.c.row_tiles):
                    if (i == 0) | (i < present):
                        self.cluster.commit(s.sums.full + s.sums.slot(m + i), False)
            m += present

    def _product(self, step: int, sums: Int32, tokens: Any, weights: Any, width: Int32, more: Any) -> None:
        """``tokens`` and ``weights``: descriptor of packed elements and column of scales; ``more``: accumulate."""
        f, accumulate = self.format, cutlass.select_(more, Int32(1), Int32(0))
        (rows, row_scales), (columns, column_scales) = (weights, tokens) if self.c.few else (tokens, weights)
        instruction = f.instruction(0, step) | width >> 3 << 17 if self.c.few else f.instruction(WEIGHT_ROWS, step)
        self.cluster.products.multiply(f, instruction, sums, rows, columns, row_scales, column_scales, accumulate)

    @cute.jit
    def _results(
        self, tensors: Any, flags: Flags, weights: Matrices, scalars: Any, share: Any, row_tiles: Int32,
        s: BlockScaledSmem, warp: Int32,
    ):  # fmt: skip
        thread, m = warp * 32 + cute.arch.lane_idx(), Int32(0)
        for tile_idx in cutlass.range(share.count, unroll=1):
            tile = share.tile(tensors, tile_idx)
            factor = factor_of(flags, weights, tile.expert)
            for i in cutlass.range(self._present(tile.row, row_tiles), unroll=1):
                some = row_tile(self.c, tile, i)
                if not self.results.plain(scalars):
                    load_biases(self.c, flags, weights, some, s.sBias, thread)
                s.sums.wait(m)
                tmem.after_sync()
                sums = tmem.lanes(s.sums.slot(m) * WEIGHT_ROWS, warp)
                self.results.run(tensors, scalars, some, factor, sums, s, warp)
                tmem.before_sync()
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    self.cluster.arrive(s.sums.empty + s.sums.slot(m))
                m += 1
            self.results.end(tensors, scalars, tile, warp)
