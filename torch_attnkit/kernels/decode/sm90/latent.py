"""Attention of one query token over latents of 576 columns, of which the first 512 are the values: MLA, absorbed.

The kernel is ``mla.py``'s, with its two score and two value warpgroups. What differs is here:

    score warpgroups: sums over 320 and 256 columns -> P in rows of 64 bytes, for tiles have 32 keys
    value warpgroups: of 512 of the columns; a warp of the first loads the 64 others, too, which only the scores read
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from torch_attnkit.cuda import paging
from torch_attnkit.cuda.sm90 import softmax, wgmma
from torch_attnkit.cuda.sm90.warpgroup import ROW_BYTES
from torch_attnkit.cuda.sm90.warpgroup import ROWS as HEADS

from ..arguments import Tensors
from ..schedule import Visible, WorkTile, tile_bounds
from . import mla
from .latent_config import LatentConfig
from .mla import Loads, Meeting, ScoreFragments, ValueFragments


class BothRows(NamedTuple):
    """``Loads.rows`` where the values are another tensor than the keys."""

    keys: cute.Tensor
    values: Loads


def latent_kernel(config: LatentConfig) -> mla.DecodeMla:
    """``mla.py``'s kernel with the roles below; of two tensors it is given both."""
    kernel = mla.DecodeMla(config)
    kernel.scores = kernel.role(ScoreWarpgroup(config, kernel.epilogue))
    kernel.values = kernel.role(ValueWarpgroup(config.of_values, kernel.epilogue))
    if not config.same:
        one = kernel._loads

        def both(tensors: Tensors) -> Loads:
            keys, values = one(tensors), one(tensors._replace(k=tensors.v))
            return Loads(keys.atom, BothRows(keys.rows, values))

        kernel._loads = both
    return kernel


class ScoreWarpgroup(mla.ScoreWarpgroup):
    """Probabilities of every second tile; other sums of products, and other rows of P."""

    def _multiply(self, w: ScoreFragments, meeting: Meeting, n: Int32) -> list[cute.Tensor]:
        """Issue the scores of tile n, once it is there; two sums, as even as blocks of 64 columns allow."""
        c = self.c
        meeting.tiles.wait(n)
        sums = [cute.make_rmem_tensor(w.mma.partition_shape_C((HEADS, c.keys)), Float32) for _ in range(2)]
        for block in range(c.halves):
            sK = w.tSrK[None, None, None, meeting.tiles.slot(n) * c.halves + block]
            half = block * 2 // c.halves
            first = block == 0 or (block - 1) * 2 // c.halves < half
            wgmma.multiply(w.mma, sums[half], w.tSrQ[None, None, None, block], sK, clear=first)
        return sums

    def _leave_probabilities(self, rS: cute.Tensor, address: Int32, row: Int32, lane: Int32) -> None:
        """(64, 32) as pairs, rows of 64 bytes with their 16-byte chunks swizzled."""
        row_bytes = self.c.keys * self.c.itemsize
        pairs = cute.make_ptr(
            Int32, address + row * row_bytes + (lane & 3) * 4, cute.AddressSpace.smem, assumed_align=4
        )
        sP = cute.make_tensor(pairs, cute.make_layout((2, 4), stride=(8 * row_bytes // 4, 4)))  # (8 rows, chunk)
        for i in range(self.c.keys // 8):
            for r in range(2):
                sP[r, (row // 2 & 3) ^ i] = softmax.pack(rS[4 * i + 2 * r], rS[4 * i + 2 * r + 1], self.c.dtype)


class ValueWarpgroup(mla.ValueWarpgroup):
    """A half of the values' columns, loaded and multiplied; they lie otherwise."""

    def _fragments(self, shared: Int32, half: Int32) -> ValueFragments:
        c, w = self.c, super()._fragments(shared, half)
        mine, ring = w.mma.get_slice(w.thread), c.shared.ring.at(shared)
        w.ring = ring + c.values_offset
        w.sBoxes = wgmma.staged(c.dtype, ring, (c.box, c.box_columns, c.ring_bytes // (c.box * ROW_BYTES)))
        sP = wgmma.staged(c.dtype, c.shared.probabilities.at(shared), (HEADS, c.keys, c.p_stages))
        w.tOrP = mine.make_fragment_A(mine.partition_A(sP))
        sV = wgmma.staged(c.dtype, w.ring, (c.keys, c.value_columns, c.stages))
        by_columns = cute.make_layout(
            (c.ring.part, c.keys, (c.halves, c.stages)),
            stride=(c.keys, 1, (c.keys * c.ring.part, c.keys * c.value_columns)),
        )
        w.tOrV = mine.make_fragment_B(mine.partition_B(cute.composition(sV, by_columns)))
        return w

    @cute.jit
    def _load(
        self, tensors: Tensors, loads: Loads, keys: Visible, tile: WorkTile, w: ValueFragments, meeting: Meeting,
        n: Int32,
    ):  # fmt: skip
        """A warp's 64 columns of tile n, and by the first warp the last 64, whose scores are there by then. TMA gives
        zeros beyond the end of a sequence, and where there is no page, for which it is given one that is beyond the
        cache."""
        c = self.c
        first, low, high = tile_bounds(keys, tile.first + n, c.keys)
        page = Int32(0)
        if const_expr(c.page):
            page = paging.of_boxes(tensors, tile.b, first, low, high, c.box, c.boxes, c.page)
        stage = meeting.tiles.slot(n)
        columns, wide = const_expr(c.dim_v // c.box_columns), const_expr(c.dim // c.box_columns)  # in blocks of 64
        column = w.half * (columns // c.halves) + cute.arch.make_warp_uniform(w.thread // 32)
        full, policy = meeting.tiles.full + stage, mla.cache_policy(tile)
        cache = loads.rows if const_expr(c.same) else loads.rows.keys
        of_keys = cutlass.select_(column == 0, Int32(2), Int32(1))
        blocks = of_keys + const_expr(0 if c.same else 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, blocks * (c.keys * c.box_columns * c.itemsize))
        for b in cutlass.range_constexpr(c.boxes):
            row, last = first // c.box + b, tile.b
            if const_expr(c.page):
                row = (first + b * c.box) % c.page // c.box
                last = cute.arch.shuffle_sync(page, b)
            for x in cutlass.range(of_keys, unroll=1):
                at = column + x * columns
                gBox = cute.local_tile(cache[None, None, tile.kv_head, last], (c.box, c.box_columns), (row, at))
                self._load_box(loads.atom, gBox, w.sBoxes[None, None, (stage * wide + at) * c.boxes + b], full, policy)
            if const_expr(not c.same):
                rows = loads.rows.values.rows[None, None, tile.kv_head, last]
                gBox = cute.local_tile(rows, (c.box, c.box_columns), (row, column))
                to = (c.stages * wide + stage * columns + column) * c.boxes + b
                self._load_box(loads.rows.values.atom, gBox, w.sBoxes[None, None, to], full, policy)

    def _load_box(
        self, atom: cute.CopyAtom, gBox: cute.Tensor, sBox: cute.Tensor, full: cute.Pointer, policy: Int64
    ) -> None:
        sBox, gBox = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(sBox, 0, 2), cute.group_modes(gBox, 0, 2)
        )
        cute.copy(atom, gBox, sBox, tma_bar_ptr=full, cache_policy=policy)

    def _clear(self, w: ValueFragments, stage: Int32, low: Int32, high: Int32) -> None:
        """Of a stage that has other columns, too."""
        c = self.c
        others = c.keys * (c.value_columns - c.dim_v) * c.itemsize
        super()._clear(replace(w, ring=w.ring + stage * others), stage, low, high)
