"""How keys come from pages to shared memory on Blackwell: by TMA, in boxes that lie in one page each, or row by row.

A stage of K or V holds runs of 64 columns (32 where a head is no multiple of 64) of its keys, one after another, so
that a few keys of a run are a piece of it, whatever their pages. Keys without a page arrive as zeros, whatever lengths
and tables say: TMA is asked for rows that no tensor has.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.tcgen05 import CtaGroup
from cutlass.tensor_utils import LayoutEnum

from torch_attnkit.cuda import copies, paging
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm100 import row_copies

from ..types import Inputs
from .paged_types import Pages, Paging, box_columns
from .types import Config, WorkTile

_LANES = 32


class Piece(NamedTuple):
    """A stage's share of a block of keys."""

    keys: int
    columns: int
    first_key: Any  # of the block
    first_column: Any
    pair: bool = False  # whether the barrier of a pair's first CTA counts its bytes


class _Stages(Fixed):
    """Stages of K or V as boxes."""

    def __init__(self, config: Config, paging: Paging):
        self.c, self.paging, self.columns = config, paging, box_columns(config)

    def layout(self, shape: tuple[int, ...]) -> cute.ComposedLayout:
        """Of boxes: (keys, columns), or (keys, columns, boxes)."""
        atom = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.c.dtype, self.columns)
        made = warpgroup.make_smem_layout_atom(atom, self.c.dtype)
        return cute.tile_to_shape(made, shape, order=tuple(range(len(shape))))

    def boxes(self, stage: cute.Tensor, piece: Piece) -> cute.Tensor:
        """(keys, columns, boxes), those of a run of columns together."""
        c, rows = self.c, self.paging.box
        count = piece.keys // rows * (piece.columns // self.columns) * c.stages
        layout = self.layout((rows, self.columns, count))
        pointer = cute.make_ptr(c.dtype, stage.iterator.toint(), cute.AddressSpace.smem, assumed_align=1024)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=c.dtype), layout.outer)


class Boxes(Fixed):
    """A box is of one page. Lane l knows the page of the l-th box of a block."""

    def __init__(self, config: Config, paging: Paging):
        self.c, self.paging, self.stages = config, paging, _Stages(config, paging)

    def atoms(self, ins: Inputs) -> list[Any]:
        """TMA of a box of K's and of V's pages: (Ps, D, Hkv, Np)."""
        made: list[Any] = []
        box = (self.paging.box, self.stages.columns)
        for cache, group in ((ins.k, self.c.cta_group), (ins.v, CtaGroup.ONE)):
            rows = cute.make_tensor(cache.iterator, cute.select(cache.layout, mode=[1, 3, 2, 0]))
            copy = cpasync.CopyBulkTensorTileG2SOp(group)
            made += cpasync.make_tiled_tma_atom(copy, rows, self.stages.layout(box), box)
        return made

    @cute.jit
    def key_pages(self, ins: Inputs, tile: WorkTile, block: Int32):
        """What lanes know of a block."""
        c, p, found = self.c, self.paging, Pages(ins.k, ins.high.table)
        first, count = block * c.tile_n, const_expr(c.tile_n // p.box)
        return paging.of_boxes(found, tile.batch, first, tile.start, tile.end, p.box, count, p.page)

    @cute.jit
    def fill(
        self, source: tuple, stage: cute.Tensor, slot: Int32, full: cute.Pointer, piece: Piece,
        kv_head: Int32, key_pages: Int32, block: Int32,
    ):  # fmt: skip
        """A slot of the stages; ``source`` is the atom and the tensor of K or of V."""
        c, p, columns = self.c, self.paging, const_expr(self.stages.columns)
        atom, rows = source
        runs, count = const_expr(piece.columns // columns), const_expr(piece.keys // p.box)
        sBoxes = self.stages.boxes(stage, piece)
        for i in cutlass.range_constexpr(count):
            box = piece.first_key // p.box + i
            row = (block * c.tile_n + box * p.box) % p.page // p.box
            page = cute.arch.shuffle_sync(key_pages, box)
            for run in cutlass.range_constexpr(runs):
                at = (row, piece.first_column // columns + run)
                gBox = cute.local_tile(rows[None, None, kv_head, page], (p.box, columns), at)
                sBox = sBoxes[None, None, (slot * runs + run) * count + i]
                to, source_of = copies.tma_partition(atom, 0, 1, sBox, gBox)
                cute.copy(atom, source_of, to, tma_bar_ptr=full)


class StagedBoxes(Boxes):
    """Boxes of E4M3 with all columns, as they come: (N, D) bytes."""

    def atoms(self, ins: Inputs) -> list[Any]:
        made: list[Any] = []
        for cache, dim in ((ins.k, self.c.dim), (ins.v, self.c.dim_v)):
            rows = cute.make_tensor(cache.iterator, cute.select(cache.layout, mode=[1, 3, 2, 0]))
            box = cute.make_ordered_layout((self.paging.box, dim), order=(1, 0))
            made += cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SOp(), rows, box, (self.paging.box, dim)
            )  # fmt: skip
        return made

    @cute.jit
    def fill(
        self, source: tuple, stage: cute.Tensor, slot: Int32, full: cute.Pointer, piece: Piece,
        kv_head: Int32, key_pages: Int32, block: Int32,
    ):  # fmt: skip
        c, p = self.c, self.paging
        atom, rows = source
        for box in cutlass.range_constexpr(piece.keys // p.box):
            row = (block * c.tile_n + box * p.box) % p.page // p.box
            page = cute.arch.shuffle_sync(key_pages, box)
            gBox = cute.local_tile(rows[None, None, kv_head, page], (p.box, piece.columns), (row, 0))
            sBox = cute.local_tile(stage[None, None, slot], (p.box, piece.columns), (box, 0))
            to, source_of = copies.tma_partition(atom, 0, 1, sBox, gBox)
            cute.copy(atom, source_of, to, tma_bar_ptr=full)


class Steps(NamedTuple):
    """How many of the rows that TMA gathers apart pages, keys and heads of a cache are."""

    by_page: Int32
    by_key: Int32
    by_head: Int32


class GatheredRows(Fixed):
    """Any four rows of a cache at once. Lane l knows the pages of keys l, l + 32, ... of a block."""

    def __init__(self, config: Config, paging: Paging):
        self.c, self.paging, self.columns = config, paging, box_columns(config)
        self.line = self.columns * config.dtype.width // 8  # bytes of a row in a run

    def atoms(self, ins: Inputs) -> list[Any]:
        made: list[Any] = []
        for cache, rows in zip((ins.k, ins.v), ins.high.rows, strict=True):
            steps = (Int32(cache.stride[axis] // rows.stride[0]) for axis in range(3))
            made += (row_copies.tensor_map(rows, 1, self.line), Steps(*steps))
        return made

    @cute.jit
    def key_pages(self, ins: Inputs, tile: WorkTile, block: Int32):
        """What lanes know of a block."""
        found, page = Pages(ins.k, ins.high.table), const_expr(self.paging.page)
        known = []
        for i in cutlass.range_constexpr(self.c.tile_n // _LANES):
            first = block * self.c.tile_n + i * _LANES
            ends = tile.start - first, tile.end - first
            known.append(paging.of_keys(found, tile.batch, first, *ends, _LANES, page))
        return tuple(known)

    @cute.jit
    def fill(
        self, source: tuple, stage: cute.Tensor, slot: Int32, full: cute.Pointer, piece: Piece,
        kv_head: Int32, key_pages: tuple, block: Int32,
    ):  # fmt: skip
        """A slot of the stages; ``source`` is the atom and the ``Steps`` of K or of V."""
        c, p, columns = self.c, self.paging, const_expr(self.columns)
        atom, cache = source
        runs = const_expr(piece.columns // columns)
        stage_bytes, run_bytes = const_expr(runs * piece.keys * self.line), const_expr(piece.keys * self.line)
        begin = stage.iterator.toint() + slot * stage_bytes
        blocks = [(piece.first_column + run * columns, run * run_bytes) for run in range(runs)]
        for part in cutlass.range_constexpr(piece.keys // _LANES):
            # Lane l: which row of the cache key l of these 32 is.
            first = piece.first_key + part * _LANES
            page = _chosen(key_pages, first // _LANES)
            key = (block * c.tile_n + first + cute.arch.lane_idx()) % p.page
            row = page * cache.by_page + key * cache.by_key + kv_head * cache.by_head
            row = cutlass.select_(page >= 0, row, Int32(-1))
            wanted = [cute.arch.shuffle_sync(row, i) for i in range(_LANES)]
            at, rows = begin + part * _LANES * self.line, row_copies.address_of(atom)
            with cute.arch.elect_one():
                row_copies.gather_rows(at, rows, wanted, full.toint(), blocks, line=self.line, pair=piece.pair)


def _chosen(values: tuple, at: Any) -> Int32:
    """One of a few registers; ``at`` may be known at compile time."""
    if isinstance(at, int):
        return values[at]
    found = values[0]
    for i in range(1, len(values)):
        found = cutlass.select_(at == i, values[i], found)
    return found
