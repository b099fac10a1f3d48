"""How tiles of keys come from pages to shared memory: boxes by TMA where a page holds some, or rows by ``cp.async``.

The lanes of a warp look a page up each; of keys without a page, whatever lengths and tables say, zeros arrive.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed, Ring
from torch_attnkit.kernels.decode import pages

from .multi_blocks import WorkTile
from .paged_types import Config, Inputs

_LANES = 32
_CHUNK = 16  # bytes of a copy


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
    """A warpgroup; a warp has a quarter of a tile's keys, and a lane 16 bytes of a row at a time."""

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
        """Block ``block`` as fill n of a ring; ``source`` ends with the tensor of K or of V."""
        c, cache = self.c, source[1]
        nbytes = const_expr(c.dtype.width // 8)
        chunks, lanes = const_expr(dim * nbytes // _CHUNK), const_expr(_LANES)
        ring.await_empty(n)
        begin = self._warp() * self.rows
        at = stage.iterator.toint() + ring.slot(n) * (c.tile_n * dim * nbytes)
        head = cache.iterator.toint() + Int64(cache.stride[2]) * tile.kv_head * nbytes
        page_bytes, key_bytes = Int64(cache.stride[0]) * nbytes, Int64(cache.stride[1]) * nbytes
        for i in cutlass.range(self.rows * chunks // lanes, unroll=4):
            item = i * lanes + cute.arch.lane_idx()
            row, chunk = item // chunks, item % chunks
            page = cute.arch.shuffle_sync(places, row)
            slot = (block * c.tile_n + begin + row) % c.page
            known = page >= 0
            address = head + page_bytes * cutlass.select_(known, page, Int32(0)) + key_bytes * slot + chunk * _CHUNK
            valid = cutlass.select_(known, Int32(_CHUNK), Int32(0))
            op.copy_16_async(at + self._offset(begin + row, chunk, dim), address, valid)
        cute.arch.cp_async_mbarrier_arrive_noinc(ring.full + ring.slot(n))

    def _offset(self, row: Int32, chunk: Int32, dim: int) -> Int32:
        """Where 16 bytes of a row are in a stage: runs of columns one after another, their chunks swizzled by rows."""
        columns = 64 if dim % 64 == 0 else 32
        run_bytes = columns * (self.c.dtype.width // 8)  # 128 or 64: 8 or 4 chunks
        each = run_bytes // _CHUNK
        swizzled = (row if each == 8 else row // 2) % each ^ chunk % each
        return chunk // each * (self.c.tile_n * run_bytes) + row * run_bytes + swizzled * _CHUNK
