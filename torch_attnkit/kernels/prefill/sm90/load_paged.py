"""How blocks of keys come from pages to shared memory: boxes by TMA where a page holds some, or rows by ``cp.async``.

The lanes of a warp look a page up each, a block ahead; of keys without a page, whatever lengths and tables say, zeros
arrive.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.tensor_utils import LayoutEnum

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import paging as pages
from torch_attnkit.cuda.asm import asm
from torch_attnkit.cuda.ring import Fixed, Ring, rings
from torch_attnkit.cuda.word_ops import copy_16_async_at

from .config import Config, Layouts, PagedInputs
from .load_tma import KVLoads, SharedMemory, SingleFill, TmaLoader, elements, select
from .mainloop import Stages
from .seqlen import WorkTile

_LANES = 32
_CHUNK = 16  # bytes of a copy


@dsl_user_op
def _joined(low: Int32, high: Int32, *, loc: Any = None, ip: Any = None) -> Int64:
    """The 64 bits that two registers hold."""
    return asm(Int64, [low, high], "mov.b64 $0, {$1, $2};", loc=loc, ip=ip)


class PagedLoader(TmaLoader):
    """Loads the blocks of a work tile from pages."""

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        c = self.c
        staged = StagedBoxes(c) if c.converted else None
        self.keys = staged if c.fp8_kv else PageBoxes(c) if c.box else PageRows(c)
        self.values = staged or self.keys

    def loads(self, ins: PagedInputs, layouts: Layouts) -> KVLoads:
        k, v = elements(self.c, ins.k), elements(self.c, ins.v)
        return KVLoads(*self.keys.atom(k, self.c.dim), *self.values.atom(v, self.c.dim_v))

    def prefetch(self, loads: KVLoads) -> None:
        if self.c.box:
            loads.prefetch()

    def shared_memory(self, memory: Any, warp: Int32, layouts: Layouts) -> SharedMemory:
        c = self.c
        if c.converted:
            return self.converter.shared_memory(memory, warp, layouts)
        arrivals = 4 * c.consumers * c.ctas
        full = 1 if c.box else _LANES * c.loader_warps
        found = rings(memory, warp, (("k", c.stages, full, arrivals), ("v", c.stages, full, arrivals)))
        kind = Ring if c.box else CopiedRing
        both = (kind(r.full, r.empty, c.stages, c.pair) for r in found.values())
        return SharedMemory(Stages(SingleFill(), *both, *self.mainloop.operands(memory, layouts)))

    @cute.jit
    def produce(
        self, loads: KVLoads, ins: PagedInputs, tile: WorkTile, kv_index: Int32, smem: SharedMemory, fills: Int32
    ):
        """Every warp that loads: the blocks of K and V; ``fills`` of every ring were before."""
        c, stages, keys = self.c, smem.stages, self.keys
        k, v = (loads.k_atom, loads.k), (loads.v_atom, loads.v)
        of_block = keys.pages(ins, tile, kv_index, tile.block(tile.first))
        if const_expr(c.converted):
            staged = smem.staged
            k_ring, k_stages = (staged.k_ring, staged.k_stages) if const_expr(c.fp8_kv) else (stages.ring_k, stages.sK)
            for step in cutlass.range(tile.first, tile.stop, unroll=1):
                n, block = fills + step - tile.first, tile.block(step)
                following = keys.pages(ins, tile, kv_index, tile.block(step + 1))
                keys.load(k, k_ring, k_stages, c.dim, tile, of_block, block, n)
                self.values.load(v, staged.ring, staged.stages, c.dim_v, tile, of_block, block, n)
                of_block = following
        else:
            before = of_block
            for step in cutlass.range(tile.first, tile.stop + 1, unroll=1):
                n = fills + step - tile.first
                following = keys.pages(ins, tile, kv_index, tile.block(step + 1))
                if step < tile.stop:
                    keys.load(k, stages.ring_k, stages.sK, c.dim, tile, of_block, tile.block(step), n)
                if step > tile.first:
                    keys.load(v, stages.ring_v, stages.sV, c.dim_v, tile, before, tile.block(step - 1), n - 1)
                before, of_block = of_block, following


class CopiedRing(Ring):
    """A ring that ``cp.async`` fills: what it wrote is made visible to ``wgmma`` where it is waited for."""

    def wait(self, n: Int32) -> None:
        super().wait(n)
        cute.arch.fence_view_async_shared()


class PageBoxes(Fixed):
    """Each warp has a share of a tile's boxes, so that small ones do not wait for one warp's issue; of a pair each CTA
    loads half of them, for both."""

    def __init__(self, config: Config):
        self.c = config
        self.count = config.boxes  # of a tile, for each of its runs of columns

    def atom(self, cache: cute.Tensor, dim: int) -> tuple[cute.CopyAtom, cute.Tensor]:
        """For K (Np, Ps, Hkv, D), or V, and its tensor of coordinates (Ps, D, Hkv, Np); ``dim``: D."""
        c = self.c
        atom = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, c.dtype, c.box_columns)
        box = cute.tile_to_shape(warpgroup.make_smem_layout_atom(atom, c.dtype), (c.box, c.box_columns), order=(0, 1))
        return cpasync.make_tiled_tma_atom(_box_op(c), _rows_first(cache), box, (c.box, c.box_columns))

    @cute.jit
    def pages(self, ins: PagedInputs, tile: WorkTile, b: Int32, block: Int32):
        """Lane l: the page of the l-th box of a block."""
        seq = tile.seq
        return pages.of_boxes(ins, b, block * self.c.tile_n, seq.start, seq.end, self.c.box, self.count, self.c.page)

    @cute.jit
    def load(
        self, source: tuple, ring: Ring, stage: cute.Tensor, dim: cutlass.Constexpr, tile: WorkTile, pages_of: Int32,
        block: Int32, n: Int32,
    ):  # fmt: skip
        """Block ``block`` as fill n of a ring; ``source`` is the atom and the tensor of K or of V."""
        c, (atom, rows) = self.c, source
        runs = const_expr(dim // c.box_columns)
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // _LANES)
        full = ring.await_empty(n)
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, c.tile_n * dim * c.dtype.width // 8)
        sBoxes = self._boxes(stage, runs)
        part = warp
        if const_expr(c.pair):
            part += cute.arch.block_in_cluster_idx()[0] * c.loader_warps
        mask = {"mcast_mask": cutlass.Int16(3)} if c.pair else {}
        each = const_expr(self.count // c.ctas // c.loader_warps)
        for i in cutlass.range_constexpr(each):
            box = part * each + i
            row = (block * c.tile_n + box * c.box) % c.page // c.box
            page = cute.arch.shuffle_sync(pages_of, box)
            for run in cutlass.range_constexpr(runs):
                gBox = cute.local_tile(
                    rows[None, None, tile.kv_head, page], (c.box, c.box_columns), (row, run)
                )  # (box, columns)
                sBox = sBoxes[None, None, (ring.slot(n) * runs + run) * self.count + box]
                to, source_of = copies.tma_partition(atom, 0, 1, sBox, gBox)
                cute.copy(atom, source_of, to, tma_bar_ptr=full, **mask)

    def _boxes(self, stage: cute.Tensor, runs: int) -> cute.Tensor:
        """The stages of K or V as boxes: (keys, columns, boxes), those of a run of columns together."""
        c = self.c
        atom = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, c.dtype, c.box_columns)
        shape = (c.box, c.box_columns, self.count * runs * c.stages)
        layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(atom, c.dtype), shape, order=(0, 1, 2))
        pointer = cute.make_ptr(c.dtype, stage.iterator.toint(), cute.AddressSpace.smem, assumed_align=1024)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=c.dtype), layout.outer)


class StagedBoxes(PageBoxes):
    """Boxes of keys with all columns, as they come: (N, D) bytes, by one warp."""

    def atom(self, cache: cute.Tensor, dim: int) -> tuple[cute.CopyAtom, cute.Tensor]:
        c = self.c
        box = cute.make_ordered_layout((c.box, dim), order=(1, 0))
        return cpasync.make_tiled_tma_atom(_box_op(c), _rows_first(cache), box, (c.box, dim))

    @cute.jit
    def load(
        self, source: tuple, ring: Ring, stage: cute.Tensor, dim: cutlass.Constexpr, tile: WorkTile, pages_of: Int32,
        block: Int32, n: Int32,
    ):  # fmt: skip
        """Block ``block`` as fill n of a ring over stage (N, D, stages); lane l has the l-th box's page."""
        c, (atom, rows) = self.c, source
        full = ring.acquire(n, c.tile_n * dim)
        each, first = const_expr(c.boxes // c.ctas), Int32(0)
        if const_expr(c.pair):
            first = cute.arch.block_in_cluster_idx()[0] * each
        mask = {"mcast_mask": cutlass.Int16(3)} if c.pair else {}
        for i in cutlass.range(each, unroll=1):
            box = first + i
            row = (block * c.tile_n + box * c.box) % c.page // c.box
            page = cute.arch.shuffle_sync(pages_of, box)
            gBox = cute.local_tile(rows[None, None, tile.kv_head, page], (c.box, dim), (row, 0))  # (box, D)
            sBox = cute.local_tile(stage[None, None, ring.slot(n)], (c.box, dim), (box, 0))
            to, source_of = copies.tma_partition(atom, 0, 1, sBox, gBox)
            cute.copy(atom, source_of, to, tma_bar_ptr=full, **mask)


class PageRows(Fixed):
    """A warpgroup; a warp has a quarter of a tile's keys, and copies 128 bytes of four at once, or 64 of eight where
    the swizzled layout has rows of so many.

    Copies cost instructions, so a lane works out the address of one row a block, and others get it by shuffle; where
    its 16 bytes go are two addresses a block, beside constants.
    """

    def __init__(self, config: Config):
        self.c = config
        self.rows = config.tile_n // config.loader_warps  # of a warp

    def atom(self, cache: cute.Tensor, dim: int) -> tuple[cute.Pointer, cute.Tensor]:
        """No copy atom is needed."""
        return cache.iterator, cache

    def _warp(self) -> Int32:
        return cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // _LANES)

    @cute.jit
    def pages(self, ins: PagedInputs, tile: WorkTile, b: Int32, block: Int32):
        """Lane l: the page of the warp's l-th key of a block."""
        first = block * self.c.tile_n + self._warp() * self.rows
        seq = tile.seq
        return pages.of_keys(ins, b, first, seq.start - first, seq.end - first, self.rows, self.c.page)

    @cute.jit
    def load(
        self, source: tuple, ring: Ring, stage: cute.Tensor, dim: cutlass.Constexpr, tile: WorkTile, pages_of: Int32,
        block: Int32, n: Int32,
    ):  # fmt: skip
        """Block ``block`` as fill n of a ring; ``source`` ends with the tensor of K or of V.

        A stage has a row's columns in runs of 128 or 64 bytes, one run of all rows after another, chunks swizzled by
        rows. Lane l copies a chunk of row i * row_step + l // chunks in iteration i, of each run.
        """
        c = self.c
        run_bytes = const_expr((64 if dim % 64 == 0 else 32) * c.dtype.width // 8)
        chunks = const_expr(run_bytes // _CHUNK)  # 8 or 4
        row_step, runs = const_expr(_LANES // chunks), const_expr(dim * c.dtype.width // 8 // run_bytes)
        iterations, each = (
            const_expr(self.rows // row_step),
            const_expr(c.tile_n * run_bytes),
        )  # bytes of a run of all rows
        lane = cute.arch.lane_idx()
        row, chunk = lane // chunks, lane % chunks  # of iteration 0
        address, valid_rows = self._row(source[1], tile, pages_of, block, lane % iterations * row_step + row)
        valid_rows = valid_rows >> row * chunks  # bit i: whether there is this lane's row of iteration i
        # Lane i of those that copy a row together holds that of iteration i.
        segment = const_expr((_LANES - chunks) << 8 | _LANES - 1)
        halves = (Int32(address), Int32(address >> 32))
        sources = []
        for i in cutlass.range_constexpr(iterations):
            low, high = (cute.arch.shuffle_sync(half, i, mask_and_clamp=segment) for half in halves)
            sources.append(_joined(low, high) + chunk * _CHUNK)
        begin = stage.iterator.toint() + ring.slot(n) * (each * runs) + (self._warp() * self.rows + row) * run_bytes
        # Rows of 128 bytes are swizzled by their number modulo 8, of 64 by half of it modulo 4; iterations have 4 or 8.
        swizzled = chunk ^ (row if chunks == 8 else row // 2 % 4)
        targets = [begin + (swizzled ^ i * row_step % chunks) * _CHUNK for i in range(2)]
        ring.await_empty(n)
        for i in cutlass.range_constexpr(iterations):
            valid = cutlass.select_((valid_rows & (1 << i)) != 0, Int32(_CHUNK), Int32(0))
            for run in cutlass.range_constexpr(runs):
                at = const_expr(run * each + i * row_step * run_bytes)
                copy_16_async_at(targets[i % 2], at, sources[i], run * run_bytes, valid)
        cute.arch.cp_async_mbarrier_arrive_noinc(ring.full + ring.slot(n))

    @cute.jit
    def _row(self, cache: cute.Tensor, tile: WorkTile, pages_of: Int32, block: Int32, key: Int32):
        """Where row ``key`` of the warp's begins, anything that may be read where it has no page, and which lanes' have
        one, a bit each."""
        nbytes = const_expr(self.c.dtype.width // 8)
        page = cute.arch.shuffle_sync(pages_of, key)
        slot = (block * self.c.tile_n + self._warp() * self.rows + key) % self.c.page
        valid_rows = cute.arch.vote_ballot_sync(page >= 0)
        page = cutlass.max(page, Int32(0))
        offset = Int64(cache.stride[0]) * page + Int64(cache.stride[1]) * slot + Int64(cache.stride[2]) * tile.kv_head
        return cache.iterator.toint() + offset * nbytes, valid_rows


def _box_op(c: Config) -> Any:
    return cpasync.CopyBulkTensorTileG2SMulticastOp() if c.pair else cpasync.CopyBulkTensorTileG2SOp()


def _rows_first(cache: cute.Tensor) -> cute.Tensor:
    """Pages (Np, Ps, Hkv, D) as (Ps, D, Hkv, Np)."""
    return select(cache, (1, 3, 2, 0))
