"""Attention of one query token over latents of 576 columns, of which the first 512 are the values: MLA, absorbed.

The kernel is ``mla.py``'s, with its two score and two value warpgroups. What differs is here:

    score warpgroups: sums over 320 and 256 columns -> P in rows of 64 bytes, for tiles have 32 keys
    value warpgroups: of 512 of the columns; a warp of the first loads the 64 others, too, which only the scores read

Imports cutlass.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from torch_attnkit.cuda.sm90 import softmax

from .. import pages
from ..arguments import Scalars, Tensors
from ..config import CHUNK
from ..schedule import Persistent, Visible, WorkTile, tile_bounds
from . import mla, products
from .config import HEADS, ROW_BYTES, THREADS, WARPS
from .latent_config import LatentConfig
from .mla import Loads, Meeting, NamedBarrier, ScoreFragments, ValueFragments, by_head, load_query


class BothRows(NamedTuple):
    """``Loads.rows`` where the values are another tensor than the keys."""

    keys: cute.Tensor
    values: Loads


def latent_kernel(config: LatentConfig) -> mla.DecodeMla:
    """``mla.py``'s kernel with the roles below; of two tensors it is given both."""
    kernel = mla.DecodeMla(config)
    kernel.scores = Persistent(config, mla.Mainloop(config, ScoreWarpgroup(config)), kernel.epilogue)
    kernel.values = Persistent(config, mla.Mainloop(config, ValueWarpgroup(config)), kernel.epilogue)
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
            products.multiply(w.mma, sums[half], w.tSrQ[None, None, None, block], sK, clear=first)
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


class ValueWarpgroup:
    """A half of the values' columns, loaded and multiplied."""

    def __init__(self, config: LatentConfig):
        self.c = config

    @cute.jit
    def run(
        self, tensors: Tensors, loads: Loads, scalars: Scalars, keys: Visible, tile: WorkTile, shared: Int32,
        meeting: Meeting, group: Int32,
    ):  # fmt: skip
        c = self.c
        w = self._fragments(shared, group - c.score_warpgroups)
        count = tile.stop - tile.first
        # The first tile and Q before the others, or they come last, when the ring has long been full.
        if count > 0:
            self._load(tensors, loads, keys, tile, w, meeting, Int32(0))
        load_query(c, tensors, tile, shared, meeting)
        for n in cutlass.range(1, cutlass.min(count, c.stages), unroll=1):
            self._load(tensors, loads, keys, tile, w, meeting, n)
        w.rO.fill(0.0)
        row, sFactor = products.first_row(w.thread), by_head(c.shared.factors, shared, c.p_stages)
        for n in cutlass.range(count, unroll=1):
            p_stage, stage = meeting.probabilities.slot(n), meeting.tiles.slot(n)
            meeting.probabilities.wait(n)
            scales = (sFactor[row, p_stage], sFactor[row + 8, p_stage])
            if cute.arch.vote_any_sync((scales[0] != 1.0) | (scales[1] != 1.0)):
                softmax.rescale(w.rO, scales)
            meeting.tiles.wait(n)
            first, low, high = tile_bounds(keys, tile.first + n, c.keys)
            if (low > first) | (high < first + c.keys):
                self._clear(w, stage, low - first, high - first)
            sP, sV = w.tOrP[None, None, None, p_stage], w.tOrV[None, None, None, (w.half, stage)]
            products.multiply(w.mma, w.rO, sP, sV, clear=False)
            warpgroup.wait_group(0)
            cute.arch.sync_warp()  # every lane has read its factors before one of them gives their place back
            meeting.probabilities.release(n)
            if n + c.stages < count:
                self._barrier(w)
                self._load(tensors, loads, keys, tile, w, meeting, n + c.stages)
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        if w.thread // 32 * 16 < tile.heads:  # of a warp's 16 rows
            products.leave_columns(c.shared.results, shared, w.rO, w.thread, w.half, c.own)

    def _barrier(self, w: ValueFragments) -> None:
        """Of this warpgroup."""
        cute.arch.barrier(barrier_id=int(NamedBarrier.VALUES) + w.half, number_of_threads=THREADS)

    def _fragments(self, shared: Int32, half: Int32) -> ValueFragments:
        c, K, MN = self.c, OperandMajorMode.K, OperandMajorMode.MN
        thread = cute.arch.thread_idx()[0] % THREADS
        # 128 columns an instruction, as in ``mla.py``.
        mma = hopper.make_trivial_tiled_mma(c.dtype, c.dtype, K, MN, Float32, (1, 1, 1), (HEADS, 128))
        mine = mma.get_slice(thread)
        sP = products.staged(c.dtype, c.shared.probabilities.at(shared), (HEADS, c.keys, c.p_stages))
        ring = c.shared.ring.at(shared)
        values = ring + c.values_offset
        sV = products.staged(c.dtype, values, (c.keys, c.value_columns, c.stages))
        by_columns = cute.make_layout(
            (c.own, c.keys, (c.value_warpgroups, c.stages)),
            stride=(c.keys, 1, (c.keys * c.own, c.keys * c.value_columns)),
        )
        boxes = c.ring_bytes // (c.box * ROW_BYTES)
        return ValueFragments(
            thread=thread,
            half=half,
            ring=values,
            sBoxes=products.staged(c.dtype, ring, (c.box, c.box_columns, boxes)),
            mma=mma,
            tOrP=mine.make_fragment_A(mine.partition_A(sP)),
            tOrV=mine.make_fragment_B(mine.partition_B(cute.composition(sV, by_columns))),
            rO=cute.make_rmem_tensor(mine.partition_shape_C((HEADS, c.own)), Float32),
        )

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
            page = pages.of_boxes(tensors, tile.b, first, low, high, c.box, c.boxes, c.page)
        stage = meeting.tiles.slot(n)
        columns, wide = const_expr(c.dim_v // c.box_columns), const_expr(c.dim // c.box_columns)  # in blocks of 64
        column = w.half * (columns // c.value_warpgroups) + cute.arch.make_warp_uniform(w.thread // 32)
        full = meeting.tiles.full + stage
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
                self._load_box(loads.atom, gBox, w.sBoxes[None, None, (stage * wide + at) * c.boxes + b], full)
            if const_expr(not c.same):
                rows = loads.rows.values.rows[None, None, tile.kv_head, last]
                gBox = cute.local_tile(rows, (c.box, c.box_columns), (row, column))
                to = (c.stages * wide + stage * columns + column) * c.boxes + b
                self._load_box(loads.rows.values.atom, gBox, w.sBoxes[None, None, to], full)

    def _load_box(self, atom: cute.CopyAtom, gBox: cute.Tensor, sBox: cute.Tensor, full: cute.Pointer) -> None:
        sBox, gBox = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(sBox, 0, 2), cute.group_modes(gBox, 0, 2)
        )
        cute.copy(atom, gBox, sBox, tma_bar_ptr=full)

    @cute.jit
    def _clear(self, w: ValueFragments, stage: Int32, low: Int32, high: Int32):
        """Zeros for this half of the columns in the rows that do not count: their weight is zero, but what the cache
        holds there may be infinite. The scores have been read."""
        c = self.c
        lane = w.thread & 31
        at = (
            w.ring
            + stage * const_expr(c.keys * c.value_columns * c.itemsize)
            + w.half * const_expr(c.keys * c.own * c.itemsize)
        )
        for i in cutlass.range_constexpr(c.keys // WARPS):
            row = i * WARPS + w.thread // 32
            if (row < low) | (row >= high):
                chunk = cute.make_ptr(
                    Int32, at + (lane // 8) * (c.keys * ROW_BYTES) + row * ROW_BYTES + lane % 8 * CHUNK,
                    cute.AddressSpace.smem, assumed_align=CHUNK,
                )  # fmt: skip
                cute.make_tensor(chunk, cute.make_layout(CHUNK // 4)).fill(0)
        cute.arch.fence_view_async_shared()
        self._barrier(w)
