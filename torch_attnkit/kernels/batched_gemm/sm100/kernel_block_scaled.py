"""Persistent batched GEMM of FP4 on Blackwell by block-scaled ``tcgen05.mma``.

    1 warp    packed operands by TMA; scales that are whole tiles of the 128x4 layout by bulk copies, in the same stages
    4 warps   other scales: four of a row by cp.async each, into tiles of that layout, zeros beyond the last
    1 warp    MMA: scales to tensor memory, multiply
    4 warps   epilogue: accumulators from tensor memory -> / global scales -> rounded -> out

Operand A has the 128 lanes of tensor memory, operand B as many columns as a tile has: few tokens are columns, many
tokens either. Up to 128 columns have two accumulators, one stored while the other is multiplied. Where tiles are few,
K is split over the CTAs of a cluster, which reduce through DSMEM. A stage has columns of tensor memory of its own for
its scales. TMA reads zeros beyond a tensor; MMAs behind K are left out, so that nothing behind the scales is
multiplied. docs/kernels/batched_gemm.md has what limits it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync, tcgen05

from torch_attnkit.cuda import copies, fake, fp4
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.memory_ops import bulk_load
from torch_attnkit.cuda.ring import Fixed, Ring, rings
from torch_attnkit.cuda.sm100 import block_scaled as scaled
from torch_attnkit.cuda.sm100 import tmem
from torch_attnkit.cuda.sm100.products import NEXT_STEP, descriptor

from ..arguments import Coded, coded
from .plan import ROWS, STEP_BYTES, Fp4Tile

STORE_WARPS = 4
_LOAD_WARP, _PRODUCT_WARP, _SCALE_WARP = 4, 5, 8  # the first of four
_IN_FLIGHT = 16  # columns of sums that a thread has in registers


class TmaTensor(NamedTuple):
    atom: cute.CopyAtom
    rows: cute.Tensor  # (rows, K/2, G), for TMA


class OutputTile(NamedTuple):
    group: Int32
    row: Int32  # number of its tile of rows
    column: Int32


class StaticScheduler(NamedTuple):
    """A CTA's tiles: every so many-th."""

    first: Int32
    step: Int32
    all: Int32
    rows: Int32  # tiles of a group
    columns: Int32

    def tile(self, unit: Int32) -> OutputTile:
        rest = unit // self.rows
        return OutputTile(rest // self.columns, unit % self.rows, rest % self.columns)


@dataclass
class Smem(Fixed):
    """Shared memory, and rings: ``sums`` are accumulators in tensor memory."""

    packed: Ring
    scales: Ring  # its empty barriers are not used: ``packed`` has the same stages
    sums: Ring
    sRows: cute.Tensor  # (128, bytes, stages)
    sColumns: cute.Tensor  # (columns, bytes, stages)
    scale_at: Int32  # of a stage the tiles of the rows, then those of the columns
    sums_at: Int32  # of a cluster's block: float32 (columns, 128)
    base: cute.Pointer  # tcgen05.alloc writes the first column here


class BlockScaledGemm:
    def __init__(self, tile: Fp4Tile, swizzled: bool, divisors: tuple[bool, bool], even: int):
        self.c, self.format, self.swizzled, self.divisors = tile, scaled.FORMATS[tile.format], swizzled, divisors
        self.even = even  # neighbouring results of a token that are stored at once

    @cute.jit
    def __call__(
        self,
        tokens: Coded,
        features: Coded,
        mTokenGlobal: cute.Tensor,  # (1)
        mFeatureGlobal: cute.Tensor,  # (1)
        mOut: cute.Tensor,  # (T, G, N), contiguous
        sms: Int32,
        stream: Any,
    ):
        c = self.c
        rows, columns = (tokens, features) if const_expr(c.tokens_are_rows) else (features, tokens)
        accesses = [self._access(t.packed, n) for t, n in ((rows, ROWS), (columns, c.columns))]
        scheduler = self._scheduler(rows, columns)
        clusters = cutlass.min(sms, scheduler.all) if const_expr(c.slices == 1) else scheduler.all
        self.kernel(rows, columns, *accesses, mTokenGlobal, mFeatureGlobal, mOut).launch(
            grid=[clusters * c.slices, 1, 1], block=[c.threads, 1, 1], cluster=[c.slices, 1, 1], stream=stream,
            min_blocks_per_mp=1, preferred_smem_carveout=100, use_pdl=c.early,
        )  # fmt: skip

    def _box(self, rows: int) -> cute.Layout:
        return cute.make_layout((rows, STEP_BYTES), stride=(STEP_BYTES, 1))

    def _access(self, packed: cute.Tensor, rows: int) -> TmaTensor:
        by_row = cute.make_tensor(packed.iterator, cute.select(packed.layout, mode=[1, 2, 0]))
        tile = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, self._box(rows))
        load = cpasync.CopyBulkTensorTileG2SOp()
        return TmaTensor(*cpasync.make_tiled_tma_atom(load, by_row, tile, (rows, STEP_BYTES)))

    def _scheduler(self, rows: Coded, columns: Coded) -> StaticScheduler:
        groups, n, _ = (Int32(size) for size in rows.packed.shape)
        row_tiles = (n + (ROWS - 1)) // ROWS
        column_tiles = (Int32(columns.packed.shape[1]) + (self.c.columns - 1)) // self.c.columns
        return StaticScheduler(Int32(0), Int32(1), groups * row_tiles * column_tiles, row_tiles, column_tiles)

    @cute.kernel
    def kernel(
        self, rows: Coded, columns: Coded, row_access: TmaTensor, column_access: TmaTensor, mTokenGlobal: cute.Tensor,
        mFeatureGlobal: cute.Tensor, mOut: cute.Tensor,
    ):  # fmt: skip
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        slots = self._slots(warp)
        if warp == _LOAD_WARP:
            cpasync.prefetch_descriptor(row_access.atom)
            cpasync.prefetch_descriptor(column_access.atom)
        cute.arch.mbarrier_init_fence()
        tmem.before_sync()
        cute.arch.barrier()
        tmem.after_sync()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        scheduler = self._scheduler(rows, columns)._replace(first=block // self.c.slices, step=blocks // self.c.slices)
        elements = Int32(rows.packed.shape[2]) * 2
        if warp < STORE_WARPS:
            if const_expr(self.c.slices > 1):
                self._leave(slots, warp)
            else:
                self._store(mTokenGlobal, mFeatureGlobal, mOut, scheduler, slots, warp)
        elif warp == _LOAD_WARP:
            self._load(rows, columns, row_access, column_access, scheduler, elements, slots)
        elif warp == _PRODUCT_WARP:
            self._multiply(scheduler, elements, slots)
        if const_expr(not self.c.whole):
            if warp >= _SCALE_WARP:
                self._load_scales(rows, columns, scheduler, elements, slots)
        tmem.before_sync()
        self._sync()
        tmem.after_sync()
        if const_expr(self.c.slices > 1):
            self._reduce(mTokenGlobal, mFeatureGlobal, mOut, scheduler.tile(scheduler.first), slots)
            self._sync()  # none may leave while the other reads its memory
        if warp == _PRODUCT_WARP:
            cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.dealloc_tmem(tmem.pointer(Float32, 0), tmem.COLUMNS)

    def _sync(self) -> None:
        """All threads of the cluster."""
        if const_expr(self.c.slices > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier()

    @cute.jit
    def _slots(self, warp: Int32):
        c, memory = self.c, cutlass.memory.SmemAllocator()
        table = ("packed", c.stages, 1, 1), ("scales", c.stages, 4, 1), ("sums", c.buffers, 1, STORE_WARPS)
        made = rings(memory, warp, table)
        base = memory.allocate(4, 4)
        if warp == _PRODUCT_WARP:
            cute.arch.alloc_tmem(tmem.COLUMNS, cute.recast_ptr(base, dtype=Int32))

        def staged(rows: int) -> cute.Tensor:
            layout = cute.append(self._box(rows), cute.make_layout(c.stages, stride=rows * STEP_BYTES))
            return memory.allocate_tensor(Uint8, layout, 1024, swizzle=cute.make_swizzle(3, 4, 3))

        scale_at = memory.allocate(c.stages * (1 + c.column_tiles) * c.scale_bytes, 128).toint()
        sums_at = memory.allocate(max(c.sum_bytes, 16), 16).toint()
        return Smem(
            **made, sRows=staged(ROWS), sColumns=staged(c.columns), scale_at=scale_at, sums_at=sums_at, base=base
        )

    def _steps(self, elements: Int32) -> tuple[Int32, Int32]:
        """The stages of a work tile, by number along K, or those of the block's slice: first and end."""
        steps = (elements + (scaled.ROW_ELEMENTS - 1)) // scaled.ROW_ELEMENTS
        if const_expr(self.c.slices == 1):
            return Int32(0), steps
        each = (steps + (self.c.slices - 1)) // self.c.slices
        first = cute.arch.block_idx()[0] % self.c.slices * each
        return first, cutlass.min(first + each, steps)

    @cute.jit
    def _load(
        self, rows: Coded, columns: Coded, row_access: TmaTensor, column_access: TmaTensor,
        scheduler: StaticScheduler, elements: Int32, slots: Smem,
    ):  # fmt: skip
        c, n, (first, end) = self.c, Int32(0), self._steps(elements)
        for unit in cutlass.range(scheduler.first, scheduler.all, scheduler.step, unroll=1):
            tile = scheduler.tile(unit)
            gRows = cute.local_tile(row_access.rows[None, None, tile.group], (ROWS, STEP_BYTES), (tile.row, None))
            gColumns = cute.local_tile(
                column_access.rows[None, None, tile.group], (c.columns, STEP_BYTES), (tile.column, None)
            )
            tRs, tRg = copies.tma_partition(row_access.atom, 0, 1, slots.sRows, gRows)  # (box, stages), (box, steps)
            tCs, tCg = copies.tma_partition(column_access.atom, 0, 1, slots.sColumns, gColumns)
            for k in cutlass.range(first, end, unroll=1):
                slot = slots.packed.slot(n)
                full = slots.packed.await_empty(n)
                tiles = cutlass.min(elements // self.format.tile_elements - k * c.tiles, Int32(c.tiles))
                nbytes = Int32(c.code_bytes)
                if const_expr(c.whole):
                    nbytes += tiles * ((1 + c.column_tiles) * scaled.TILE_BYTES)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, nbytes)
                cute.copy(row_access.atom, tRg[None, k], tRs[None, slot], tma_bar_ptr=full)
                cute.copy(column_access.atom, tCg[None, k], tCs[None, slot], tma_bar_ptr=full)
                if const_expr(c.whole):
                    with cute.arch.elect_one():
                        self._bulk_scales(rows, columns, tile, k, tiles, slots, slot, full.toint())
                n += 1

    @cute.jit
    def _bulk_scales(
        self, rows: Coded, columns: Coded, tile: OutputTile, k: Int32, tiles: Int32, slots: Smem, slot: Int32,
        full: Int32,
    ):  # fmt: skip
        """Tiles of a stage, which lie one behind another; of columns behind the last those of the last ones."""
        c = self.c
        to = slots.scale_at + slot * ((1 + c.column_tiles) * c.scale_bytes)
        sources = [(rows.scale, tile.row)]
        sources += [(columns.scale, tile.column * c.columns // ROWS + i) for i in range(c.column_tiles)]
        for i in cutlass.range_constexpr(len(sources)):
            scale, row = sources[i]
            row = cutlass.min(row, Int32(scale.shape[1]) // ROWS - 1)
            source = scale.iterator.toint() + Int64(tile.group) * scale.stride[0]
            source += (Int64(row) * (Int32(scale.shape[2]) // 4) + k * c.tiles) * scaled.TILE_BYTES
            bulk_load(to + i * c.scale_bytes, source, tiles * scaled.TILE_BYTES, full)

    @cute.jit
    def _load_scales(
        self,
        rows: Coded,
        columns: Coded,
        scheduler: StaticScheduler,
        elements: Int32,
        slots: Smem,
    ):
        """A thread has a row of every 128, and four of its scales at a time. Half of the stages are in flight, while
        MMAs of the others run."""
        c, n, (first, end) = self.c, Int32(0), self._steps(elements)
        late = const_expr(c.stages // 2)
        thread = op.thread_index() % ROWS
        offset = scaled.word_of_row(thread)
        for unit in cutlass.range(scheduler.first, scheduler.all, scheduler.step, unroll=1):
            tile = scheduler.tile(unit)
            for k in cutlass.range(first, end, unroll=1):
                slots.packed.await_empty(n)
                to = slots.scale_at + slots.packed.slot(n) * ((1 + c.column_tiles) * c.scale_bytes) + offset
                self._words(rows, tile.group, tile.row * ROWS + thread, k, elements, to)
                for i in cutlass.range_constexpr(c.column_tiles):
                    row = tile.column * c.columns + i * ROWS + thread
                    self._words(columns, tile.group, row, k, elements, to + (1 + i) * c.scale_bytes)
                cute.arch.cp_async_commit_group()
                cute.arch.cp_async_wait_group(late)
                if n >= late:
                    self._arrive(slots.scales, n - late)
                n += 1
        cute.arch.cp_async_wait_group(0)
        for i in cutlass.range(cutlass.max(n - late, Int32(0)), n, unroll=1):
            self._arrive(slots.scales, i)

    def _arrive(self, ring: Ring, n: Int32) -> None:
        """This warp's scales of fill ``n`` are visible to the async proxy."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(ring.full + ring.slot(n))

    @cute.jit
    def _words(self, given: Coded, group: Int32, row: Int32, k: Int32, elements: Int32, to: Int32):
        """A row's scales of a stage; zeros behind the last row and behind K."""
        c, scale = self.c, given.scale
        blocks = cutlass.select_(row < Int32(given.packed.shape[1]), elements // self.format.block, Int32(0))
        row = cutlass.min(row, Int32(given.packed.shape[1]) - 1)
        source = scale.iterator.toint() + Int64(group) * scale.stride[0]
        if const_expr(self.swizzled):
            source += Int64(row // ROWS) * (Int32(scale.shape[2]) * ROWS) + scaled.word_of_row(row % ROWS)
        else:
            source += Int64(row) * scale.stride[1]
        step = const_expr(scaled.TILE_BYTES if self.swizzled else 4)
        for i in cutlass.range_constexpr(c.tiles):
            word = k * c.tiles + i
            left = cutlass.max(cutlass.min(blocks - word * 4, Int32(4)), Int32(0))
            at = source + cutlass.select_(left > 0, word, Int32(0)) * step
            op.copy_4_async(to + i * scaled.TILE_BYTES, at, left)

    @cute.jit
    def _multiply(self, scheduler: StaticScheduler, elements: Int32, slots: Smem):
        c, n, done, (first, end) = self.c, Int32(0), Int32(0), self._steps(elements)
        products = (elements + (scaled.K - 1)) // scaled.K
        for _unit in cutlass.range(scheduler.first, scheduler.all, scheduler.step, unroll=1):
            slots.sums.await_empty(done)
            tmem.after_sync()
            sums = slots.sums.slot(done) * c.columns
            for k in cutlass.range(first, end, unroll=1):
                slots.packed.wait(n)
                if const_expr(not c.whole):
                    slots.scales.wait(n)
                tmem.after_sync()
                with cute.arch.elect_one():
                    self._stage(
                        slots, slots.packed.slot(n), sums, products - k * (scaled.ROW_ELEMENTS // scaled.K), k - first
                    )
                    tcgen05.commit(slots.packed.empty + slots.packed.slot(n))
                n += 1
            with cute.arch.elect_one():
                tcgen05.commit(slots.sums.full + slots.sums.slot(done))
            done += 1

    @cute.jit
    def _stage(self, slots: Smem, slot: Int32, sums: Int32, left: Int32, k: Int32):
        """One thread: scales of a CTA's ``k``-th stage to tensor memory, and up to four MMAs, of the ``left`` ones."""
        c, parts = self.c, const_expr(1 + self.c.column_tiles)
        scale_at = slots.scale_at + slot * (parts * c.scale_bytes)
        # Tile by tile along K: of each the columns of the rows' scales, then those of the columns', side by side.
        scales = c.first_scales + slot * (parts * c.scale_columns)
        rows = descriptor(slots.sRows.iterator.toint() + slot * (ROWS * STEP_BYTES), STEP_BYTES)
        columns = descriptor(slots.sColumns.iterator.toint() + slot * (c.columns * STEP_BYTES), STEP_BYTES)
        per_tile = const_expr(self.format.tile_elements // scaled.K)
        for i in cutlass.range_constexpr(c.tiles):
            here = scales + i * (parts * scaled.TILE_COLUMNS)
            if left > i * per_tile:
                for part in cutlass.range_constexpr(parts):
                    at = scale_at + part * c.scale_bytes + i * scaled.TILE_BYTES
                    scaled.copy_scales(here + part * scaled.TILE_COLUMNS, scaled.scales_descriptor(at))
            for j in cutlass.range_constexpr(per_tile):
                step = const_expr(i * per_tile + j)
                if left > step:
                    first = cutlass.select_(k == 0, Int32(0), Int32(1)) if const_expr(step == 0) else Int32(1)
                    scaled.multiply(
                        self.format, self.format.instruction(c.columns, step), sums, rows + NEXT_STEP * step,
                        columns + NEXT_STEP * step, here, here + scaled.TILE_COLUMNS, first,
                    )  # fmt: skip

    @cute.jit
    def _store(
        self, mTokenGlobal: cute.Tensor, mFeatureGlobal: cute.Tensor, mOut: cute.Tensor,
        scheduler: StaticScheduler, slots: Smem, warp: Int32,
    ):  # fmt: skip
        """A thread has a row's accumulators."""
        c, done = self.c, Int32(0)
        inverses = self._inverses(mTokenGlobal, mFeatureGlobal)
        for unit in cutlass.range(scheduler.first, scheduler.all, scheduler.step, unroll=1):
            tile = scheduler.tile(unit)
            slots.sums.wait(done)
            tmem.after_sync()
            row = tile.row * ROWS + op.thread_index() % ROWS
            first = tmem.lanes(slots.sums.slot(done) * c.columns, warp)
            count = const_expr(min(_IN_FLIGHT, c.columns))
            for at in cutlass.range(0, c.columns, count, unroll=1):
                values = tmem.load(first + at, count)
                tmem.await_loads()
                for inverse in inverses:
                    values = [v * inverse for v in values]
                results = [v.to(mOut.element_type) for v in values]
                self._store_row(mOut, tile, row, tile.column * c.columns + at, results)
            tmem.before_sync()
            cute.arch.sync_warp()
            slots.sums.release(done)
            done += 1

    @cute.jit
    def _leave(self, slots: Smem, warp: Int32):
        """Split-K: a row's partial sums to shared memory for the cluster."""
        c = self.c
        slots.sums.wait(Int32(0))
        tmem.after_sync()
        count = const_expr(min(_IN_FLIGHT, c.columns))
        row_at = slots.sums_at + op.thread_index() % ROWS * 4
        for at in cutlass.range(0, c.columns, count, unroll=1):
            values = tmem.load(tmem.lanes(at, warp), count)
            tmem.await_loads()
            for i in cutlass.range_constexpr(count):
                pointer = cute.make_ptr(
                    Float32, row_at + (at + i) * (ROWS * 4), cute.AddressSpace.smem, assumed_align=4
                )
                cute.make_tensor(pointer, cute.make_layout(1))[0] = values[i]

    @cute.jit
    def _reduce(
        self, mTokenGlobal: cute.Tensor, mFeatureGlobal: cute.Tensor, mOut: cute.Tensor, tile: OutputTile, slots: Smem
    ):
        """A CTA's share of the columns, which are tokens: sums of all slices, four neighbouring features a thread."""
        c, (tokens, groups, n) = self.c, (Int32(size) for size in mOut.shape)
        share, fours = const_expr(c.columns // c.slices), const_expr(ROWS // 4)
        inverses = self._inverses(mTokenGlobal, mFeatureGlobal)
        width = const_expr(min(self.even, 4))
        for unit in cutlass.range(op.thread_index(), share * fours, c.threads, unroll=1):
            column, row = cute.arch.block_idx()[0] % c.slices * share + unit // fours, unit % fours * 4
            at = slots.sums_at + (column * ROWS + row) * 4
            parts = [op.load_cluster_floats(4, op.cluster_address(at, Int32(i)), Int32(1)) for i in range(c.slices)]
            token, feature = tile.column * c.columns + column, tile.row * ROWS + row
            out = mOut.iterator + ((Int64(token) * groups + tile.group) * n + feature)
            for i in cutlass.range_constexpr(0, 4, width):
                if (token < tokens) & (feature + i < n):
                    rOut = cute.make_rmem_tensor(width, mOut.element_type)
                    for j in cutlass.range_constexpr(width):
                        value = parts[0][i + j]
                        for part in parts[1:]:
                            value = value + part[i + j]
                        for inverse in inverses:
                            value = value * inverse
                        rOut[j] = value.to(mOut.element_type)
                    copies.store(rOut, out + i)

    def _inverses(self, mTokenGlobal: cute.Tensor, mFeatureGlobal: cute.Tensor) -> list[Float32]:
        """Factors of accumulators: global scales divide."""
        given = zip(self.divisors, (mTokenGlobal, mFeatureGlobal), strict=True)
        return [fp4.divide(Float32(1), divisor[0]) for present, divisor in given if present]

    @cute.jit
    def _store_row(self, mOut: cute.Tensor, tile: OutputTile, row: Int32, column: Int32, results: list[Any]):
        """Neighbouring columns of a row: a token's features, or a feature of several tokens."""
        tokens, groups, n = (Int32(size) for size in mOut.shape)
        if const_expr(self.c.tokens_are_rows):
            out = mOut.iterator + ((Int64(row) * groups + tile.group) * n + column)
            for i in cutlass.range_constexpr(0, len(results), self.even):
                if (row < tokens) & (column + i < n):
                    rOut = cute.make_rmem_tensor(self.even, mOut.element_type)
                    for j in cutlass.range_constexpr(self.even):
                        rOut[j] = results[i + j]
                    copies.store(rOut, out + i)
        else:
            for i in cutlass.range_constexpr(len(results)):
                if (row < n) & (column + i < tokens):
                    out = mOut.iterator + ((Int64(column + i) * groups + tile.group) * n + row)
                    rOut = cute.make_rmem_tensor(1, mOut.element_type)
                    rOut[0] = results[i]
                    copies.store(rOut, out)


def trace(
    arch: str, *, out_dtype: str, swizzled: bool, divisors: tuple[bool, bool], config: tuple[Any, ...], even: int
) -> tuple[Any, list[Any]]:
    """``config``: an ``Fp4Tile``; ``even``: results that are stored at once."""
    out = fake.tensor(out_dtype, (None, None, None), align=even * fake.dtype(out_dtype).width // 8)
    one = fake.tensor("f32", (1,), (1,), align=4)
    made = BlockScaledGemm(Fp4Tile(*config), swizzled, divisors, even)
    return made, [coded(swizzled), coded(swizzled), one, one, out, Int32(0), fake.stream()]
