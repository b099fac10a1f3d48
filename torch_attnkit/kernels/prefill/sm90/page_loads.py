"""How tiles of keys come from pages to shared memory: boxes by TMA where a page holds some, or rows by ``cp.async``.

The lanes of a warp look a page up each; of keys without a page, whatever lengths and tables say, zeros arrive.
"""

from typing import Any, NamedTuple

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
from torch_attnkit.cuda.ring import Fixed, Ring
from torch_attnkit.cuda.word_ops import copy_16_async_at

from .multi_blocks import WorkTile
from .paged_types import Config, Inputs

_LANES = 32
_CHUNK = 16  # bytes of a copy


@dsl_user_op
def _joined(low: Int32, high: Int32, *, loc: Any = None, ip: Any = None) -> Int64:
    """The 64 bits that two registers hold."""
    return asm(Int64, [low, high], "mov.b64 $0, {$1, $2};", loc=loc, ip=ip)


class Loads(NamedTuple):
    """The pages for TMA, as boxes of keys and columns; None where threads copy rows."""

    k_atom: Any
    k: Any  # (Ps, D, Hkv, Np)
    v_atom: Any
    v: Any  # (Ps, Dv, Hkv, Np)


class CopiedRing(Ring):
    """A ring that ``cp.async`` fills: what it wrote is made visible to ``wgmma`` where it is waited for."""

    def wait(self, n: Int32) -> None:
        super().wait(n)
        cute.arch.fence_view_async_shared()


class Boxes(Fixed):
    """Each warp has a share of a tile's boxes, so that small ones do not wait for one warp's issue; of a pair each CTA
    loads half of them, for both."""

    def __init__(self, config: Config):
        self.c = config
        self.count = config.boxes  # of a tile, for each of its runs of columns

    def loads(self, ins: Inputs) -> Loads:
        return Loads(*self.key_atom(ins.k), *self.key_atom(ins.v))

    def key_atom(self, cache: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        """For K (Np, Ps, Hkv, D), or V, and its tensor of coordinates (Ps, D, Hkv, Np)."""
        c = self.c
        copy = cpasync.CopyBulkTensorTileG2SMulticastOp() if c.pair else cpasync.CopyBulkTensorTileG2SOp()
        atom = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, c.dtype, c.box_columns)
        box = cute.tile_to_shape(warpgroup.make_smem_layout_atom(atom, c.dtype), (c.box, c.box_columns), order=(0, 1))
        rows = cute.make_tensor(cache.iterator, cute.select(cache.layout, mode=[1, 3, 2, 0]))
        return cpasync.make_tiled_tma_atom(copy, rows, box, (c.box, c.box_columns))

    def prefetch(self, loads: Loads) -> None:
        for atom in (loads.k_atom, loads.v_atom):
            cpasync.prefetch_descriptor(atom)

    @cute.jit
    def places(self, ins: Inputs, tile: WorkTile, b: Int32, block: Int32):
        """Lane l: the page of the l-th box of a block."""
        seq = tile.seq
        return pages.of_boxes(ins, b, block * self.c.tile_n, seq.start, seq.end, self.c.box, self.count, self.c.page)

    @cute.jit
    def load(
        self, source: tuple, ring: Ring, stage: cute.Tensor, dim: cutlass.Constexpr, tile: WorkTile, places: Int32,
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
            page = cute.arch.shuffle_sync(places, box)
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


class CopiedRows(Fixed):
    """A warpgroup; a warp has a quarter of a tile's keys, and copies 128 bytes of four at once, or 64 of eight where
    the swizzled layout has rows of so many.

    Copies cost instructions, so a lane works out the address of one row a block, and others get it by shuffle; where
    its 16 bytes go are two addresses a block, beside numbers that are known beforehand.
    """

    def __init__(self, config: Config):
        self.c = config
        self.rows = config.tile_n // config.loader_warps  # of a warp

    def loads(self, ins: Inputs) -> Loads:
        return Loads(ins.k.iterator, ins.k, ins.v.iterator, ins.v)

    def prefetch(self, loads: Loads) -> None:
        """Nothing to prefetch."""

    def _warp(self) -> Int32:
        return cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // _LANES)

    @cute.jit
    def places(self, ins: Inputs, tile: WorkTile, b: Int32, block: Int32):
        """Lane l: the page of the warp's l-th key of a block."""
        first = block * self.c.tile_n + self._warp() * self.rows
        seq = tile.seq
        return pages.of_keys(ins, b, first, seq.start - first, seq.end - first, self.rows, self.c.page)

    @cute.jit
    def load(
        self, source: tuple, ring: Ring, stage: cute.Tensor, dim: cutlass.Constexpr, tile: WorkTile, places: Int32,
        block: Int32, n: Int32,
    ):  # fmt: skip
        """Block ``block`` as fill n of a ring; ``source`` ends with the tensor of K or of V.

        A stage has a row's columns in runs of 128 or 64 bytes, one run of all rows after another, chunks swizzled by
        rows. Lane l copies a chunk of row i * abreast + l // chunks in turn i, of each run.
        """
        c = self.c
        run_bytes = const_expr((64 if dim % 64 == 0 else 32) * c.dtype.width // 8)
        chunks = const_expr(run_bytes // _CHUNK)  # 8 or 4
        abreast, runs = const_expr(_LANES // chunks), const_expr(dim * c.dtype.width // 8 // run_bytes)
        turns, each = const_expr(self.rows // abreast), const_expr(c.tile_n * run_bytes)  # bytes of a run of all rows
        lane = cute.arch.lane_idx()
        row, chunk = lane // chunks, lane % chunks  # of turn 0
        address, there = self._row(source[1], tile, places, block, lane % turns * abreast + row)
        there = there >> row * chunks  # bit i: whether there is this lane's row of turn i
        # Lane i of those that copy a row together holds that of turn i.
        together = const_expr((_LANES - chunks) << 8 | _LANES - 1)
        halves = (Int32(address), Int32(address >> 32))
        sources = []
        for i in cutlass.range_constexpr(turns):
            low, high = (cute.arch.shuffle_sync(half, i, mask_and_clamp=together) for half in halves)
            sources.append(_joined(low, high) + chunk * _CHUNK)
        begin = stage.iterator.toint() + ring.slot(n) * (each * runs) + (self._warp() * self.rows + row) * run_bytes
        # Rows of 128 bytes are swizzled by their number modulo 8, of 64 by half of it modulo 4; turns are 4 or 8 rows.
        swizzled = chunk ^ (row if chunks == 8 else row // 2 % 4)
        targets = [begin + (swizzled ^ turn * abreast % chunks) * _CHUNK for turn in range(2)]
        ring.await_empty(n)
        for i in cutlass.range_constexpr(turns):
            valid = cutlass.select_((there & (1 << i)) != 0, Int32(_CHUNK), Int32(0))
            for run in cutlass.range_constexpr(runs):
                at = const_expr(run * each + i * abreast * run_bytes)
                copy_16_async_at(targets[i % 2], at, sources[i], run * run_bytes, valid)
        cute.arch.cp_async_mbarrier_arrive_noinc(ring.full + ring.slot(n))

    @cute.jit
    def _row(self, cache: cute.Tensor, tile: WorkTile, places: Int32, block: Int32, key: Int32):
        """Where row ``key`` of the warp's begins, anything that may be read where it has no page, and which lanes' have
        one, a bit each."""
        nbytes = const_expr(self.c.dtype.width // 8)
        page = cute.arch.shuffle_sync(places, key)
        slot = (block * self.c.tile_n + self._warp() * self.rows + key) % self.c.page
        there = cute.arch.vote_ballot_sync(page >= 0)
        page = cutlass.max(page, Int32(0))
        offset = Int64(cache.stride[0]) * page + Int64(cache.stride[1]) * slot + Int64(cache.stride[2]) * tile.kv_head
        return cache.iterator.toint() + offset * nbytes, there
