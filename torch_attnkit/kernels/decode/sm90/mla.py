"""Attention of one query token over latent vectors that are keys and values at once, as MLA has them when its
projections are absorbed (DeepSeek-V2, arXiv 2405.04434).

    2 score warpgroups: wait for every second tile -> S = Q K' -> online softmax -> P and O's factors to shared memory
    2 value warpgroups: wait for P -> O += P K, a half of the columns each -> load these of the next tile by TMA

64 heads of 512 columns are too much for the registers of one warpgroup, and two that share the scores wait for each
other. Here the second product of a tile runs beside the first of the next, and that beside the softmax of either: the
score warpgroups pass each other the maxima, which are all that a tile needs of the one before. A value warpgroup
reloads its columns as soon as it has multiplied them: the scores were done with them before. Blocks with the other
heads of a KV head run next to each other, so that the keys come from memory once (``Scalars.abreast``).

Rows that do not count arrive with their tile and are overwritten with zeros before the second product.
docs/lab/decode.md has what limits it, and what was tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from torch_attnkit.cuda import joining, paging
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import finite
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.ring import Ring as Barriers
from torch_attnkit.cuda.sm90 import softmax, wgmma
from torch_attnkit.cuda.sm90.warpgroup import ROW_BYTES, THREADS, WARPS
from torch_attnkit.cuda.sm90.warpgroup import ROWS as HEADS
from torch_attnkit.cuda.smem import CHUNK, Region
from torch_attnkit.cuda.warp_ops import exp2

from ..arguments import Numbers, Scalars, Tensors, scalars_of
from ..schedule import Lengths, Persistent, Visible, WorkTile, allocate, launch, lengths_of, tile_bounds
from . import products
from .config import MlaConfig
from .together import Together

_INF = float("inf")
_REGISTERS = 128  # of a thread: the mean
_SCORE_REGISTERS = 88
_VALUE_REGISTERS = 168  # 128 of which hold the output
_P_KEYS = 64  # columns of a buffer of probabilities, of which as many are used as a tile has keys


class NamedBarrier(IntEnum):
    """Of a block; 0 is that of all threads."""

    VALUES = 1  # of the first value warpgroup, the second has the next
    SCORES = 3  # of both score warpgroups


class Loads(NamedTuple):
    """The cache for TMA, as boxes of keys and 64 columns."""

    atom: cute.CopyAtom
    rows: cute.Tensor  # (keys of a sequence or page, D, KV heads, sequences or pages)


class DecodeMla:
    """The kernel, for both kinds of cache: scheduler, a mainloop for each role of warpgroups, epilogue."""

    def __init__(self, config: MlaConfig):
        self.c = config
        self.epilogue = Together(config)
        self.scores = self.role(ScoreWarpgroup(config, self.epilogue))
        self.values = self.role(ValueWarpgroup(config, self.epilogue))

    def role(self, role: Role) -> Persistent:
        """The work tiles of a block for warpgroups of one role."""
        return Persistent(self.c, Mainloop(self.c, role), self.epilogue)

    @cute.jit
    def __call__(self, tensors: Tensors, numbers: Numbers, blocks: Int32, stream: Any):
        c = self.c
        lengths, scalars = lengths_of(tensors, numbers, c.page), scalars_of(tensors, numbers, c.page)
        launch(self.kernel(tensors, self._loads(tensors), lengths, scalars), c, blocks, stream)

    def _loads(self, tensors: Tensors) -> Loads:
        c, cache = self.c, tensors.k
        atom = warpgroup.make_smem_layout_atom(
            hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, c.dtype, c.box_columns), c.dtype
        )
        box = cute.tile_to_shape(atom, (c.box, c.box_columns), order=(0, 1))
        modes = [1, 3, 2, 0] if c.page else [2, 3, 1, 0]
        rows = cute.make_tensor(cache.iterator, cute.select(cache.layout, mode=modes))
        return Loads(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), rows, box, (c.box, c.box_columns)))

    @cute.kernel
    def kernel(self, tensors: Tensors, loads: Loads, lengths: Lengths, scalars: Scalars):
        c = self.c
        cute.arch.griddepcontrol_wait()  # the launch may have begun before the one ahead of it was over
        shared = allocate(c)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == c.score_warpgroups * WARPS:
            cpasync.prefetch_descriptor(loads.atom)
        # Code that both roles have is read from memory once.
        self.epilogue.begin(shared)
        found = self.scores.find(tensors, lengths, scalars)
        if warp < c.score_warpgroups * WARPS:
            cute.arch.setmaxregister_decrease(_SCORE_REGISTERS)
            self.scores.run(tensors, loads, lengths, scalars, shared, found)
            cute.arch.barrier()  # before it all warps of the other role have taken their registers and given them back
            cute.arch.setmaxregister_increase(_REGISTERS)
        else:
            cute.arch.setmaxregister_increase(_VALUE_REGISTERS)
            self.values.run(tensors, loads, lengths, scalars, shared, found)
            # The warps of a warpgroup meet between two setmaxnreg, also where the block had no work (PTX ISA).
            half = warp // WARPS - c.score_warpgroups
            cute.arch.barrier(barrier_id=int(NamedBarrier.VALUES) + half, number_of_threads=THREADS)
            cute.arch.setmaxregister_decrease(_REGISTERS)
            cute.arch.barrier()
        self.epilogue.end(tensors, scalars, shared)


def cache_policy(tile: WorkTile) -> Int64:
    """Of keys: splits are to stay in the second-level cache until they are joined, or memory has them to write, too."""
    return joining.read_once(cutlass.select_(tile.slot < 0, Int32(0), Int32(1)))


class Meeting(Fixed):
    """The mbarriers, by which warpgroups wait for each other; set up and ended for every work tile."""

    def __init__(self, config: MlaConfig, shared: Int32):
        c = config
        self.arrivals = c.arrivals
        at = cute.make_ptr(cutlass.Int64, c.shared.barriers.at(shared), cute.AddressSpace.smem, assumed_align=8)
        self.query = at
        self.tiles = Barriers(at + 1, at + 1, c.stages)  # only ``full`` is used
        p_full = self.tiles.full + c.stages
        self.probabilities = Barriers(p_full, p_full + c.p_stages, c.p_stages)
        maxima = p_full + 2 * c.p_stages
        self.maxima = Barriers(maxima, maxima, c.score_warpgroups)  # only ``full`` is used

    def begin(self) -> None:
        for i, count in enumerate(self.arrivals):
            cute.arch.mbarrier_init(self.query + i, count)

    def end(self) -> None:
        for i in range(len(self.arrivals)):
            op.forget_barrier((self.query + i).toint())


class Role(Protocol):
    """What a warpgroup does with a work tile; ``group`` is its number in the block."""

    def run(
        self, tensors: Tensors, loads: Loads, scalars: Scalars, keys: Visible, tile: WorkTile, shared: Int32,
        meeting: Meeting, group: Int32,
    ) -> None: ...  # fmt: skip


class Mainloop:
    """A work tile in one of the roles, between the setting up and the end of the mbarriers."""

    def __init__(self, config: MlaConfig, role: Role):
        self.c, self.role = config, role

    @cute.jit
    def run(self, tensors: Tensors, loads: Loads, scalars: Scalars, keys: Visible, tile: WorkTile, shared: Int32):
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // THREADS)
        # Known to be the same in all lanes, they take no registers of these.
        keys, tile = [type(x)(*map(cute.arch.make_warp_uniform, x)) for x in (keys, tile)]
        meeting = Meeting(self.c, shared)
        if cute.arch.thread_idx()[0] == 0:
            meeting.begin()
        cute.arch.mbarrier_init_fence()
        cute.arch.fence_view_async_shared()  # rows that the last work tile cleared are where tiles arrive now
        cute.arch.barrier()
        self.role.run(tensors, loads, scalars, keys, tile, shared, meeting, group)
        if cute.arch.thread_idx()[0] == 0:
            meeting.end()
        cute.arch.barrier()


def load_query(config: MlaConfig, tensors: Tensors, tile: WorkTile, shared: Int32, meeting: Meeting) -> None:
    """This thread's share, all of the block have one."""
    c = config
    thread = cute.arch.thread_idx()[0]
    products.load_query(tensors, tile, c.shared.query.at(shared), thread, c.threads, c.dim, c.itemsize)
    cute.arch.cp_async_mbarrier_arrive_noinc(meeting.query)
    cute.arch.cp_async_commit_group()


def by_head(region: Region, shared: Int32, columns: int) -> cute.Tensor:
    """Floats of shared memory, so many for each head."""
    pointer = cute.make_ptr(Float32, region.at(shared), cute.AddressSpace.smem, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout((HEADS, columns)))


@dataclass
class ScoreFragments(Fixed):
    """A score warpgroup's slices of the operands, and its statistics."""

    thread: Int32  # of the warpgroup
    mma: cute.TiledMma
    tSrQ: cute.Tensor  # (1, 1, part / 16, halves)
    tSrK: cute.Tensor  # (1, 1, part / 16, stages * halves)
    rMax: cute.Tensor  # (2) rows
    rSum: cute.Tensor  # (2), this lane's share


class ScoreWarpgroup:
    """Probabilities of every second tile."""

    def __init__(self, config: MlaConfig, epilogue: Together):
        self.c, self.epilogue = config, epilogue

    @cute.jit
    def run(
        self, tensors: Tensors, loads: Loads, scalars: Scalars, keys: Visible, tile: WorkTile, shared: Int32,
        meeting: Meeting, group: Int32,
    ):  # fmt: skip
        c = self.c
        load_query(c, tensors, tile, shared, meeting)
        w = self._fragments(shared)
        w.rMax.fill(-_INF)
        w.rSum.fill(0.0)
        cute.arch.mbarrier_wait(meeting.query, Int32(0))
        cute.arch.fence_view_async_shared()
        for n in cutlass.range(group, tile.stop - tile.first, c.score_warpgroups, unroll=1):
            rS, rMore = self._multiply(w, meeting, n)
            warpgroup.wait_group(0)
            for i in cutlass.range_constexpr(cute.size(rS)):
                rS[i] = rS[i] + rMore[i]
            products.scores(scalars, rS, w.thread, *tile_bounds(keys, tile.first + n, c.keys), c.keys)
            scales = self._probabilities(w, meeting, shared, rS, n)
            self._hand_over(w, meeting, shared, rS, scales, n)
        self._join_sums(w, shared, group)
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        if group == 0:
            self.epilogue.leave_sums(tensors, tile, w.rMax, w.rSum, w.thread)

    def _fragments(self, shared: Int32) -> ScoreFragments:
        c, K = self.c, OperandMajorMode.K
        thread = cute.arch.thread_idx()[0] % THREADS
        mma = hopper.make_trivial_tiled_mma(c.dtype, c.dtype, K, K, Float32, (1, 1, 1), (HEADS, c.keys))
        mine = mma.get_slice(thread)
        sQ = wgmma.staged(c.dtype, c.shared.query.at(shared), (HEADS, c.ring.part, c.halves))
        return ScoreFragments(
            thread=thread,
            mma=mma,
            tSrQ=mine.make_fragment_A(mine.partition_A(sQ)),
            tSrK=mine.make_fragment_B(mine.partition_B(wgmma.keys_by_columns(c.ring, c.shared.ring.at(shared)))),
            rMax=cute.make_rmem_tensor(2, Float32),
            rSum=cute.make_rmem_tensor(2, Float32),
        )

    def _multiply(self, w: ScoreFragments, meeting: Meeting, n: Int32) -> list[cute.Tensor]:
        """Issue the scores of tile n, once it is there; a sum for each half of the columns: shorter chains of products,
        whose roundings are coarser than those of an addition."""
        c, sums = self.c, []
        meeting.tiles.wait(n)
        for half in range(c.halves):
            rS = cute.make_rmem_tensor(w.mma.partition_shape_C((HEADS, c.keys)), Float32)
            sK = w.tSrK[None, None, None, meeting.tiles.slot(n) * c.halves + half]
            wgmma.multiply(w.mma, rS, w.tSrQ[None, None, None, half], sK, clear=True)
            sums.append(rS)
        return sums

    @cute.jit
    def _probabilities(self, w: ScoreFragments, meeting: Meeting, shared: Int32, rS: cute.Tensor, n: Int32):
        """Scores to probabilities in place; returns the factors of the output so far.

        The maxima of the tile before come from the other warpgroup, and this tile's go there. A warpgroup's sums are in
        step with the maxima of its own last tile.
        """
        row, lane = wgmma.first_row(w.thread), w.thread & 31
        sMax = by_head(self.c.shared.maxima, shared, self.c.score_warpgroups)
        rOld = cute.make_rmem_tensor(2, Float32)
        rOld.fill(-_INF)
        peaks = [softmax.peak(rS, r) for r in range(2)]
        if n > 0:
            meeting.maxima.wait(n - 1)
            for r in cutlass.range_constexpr(2):
                rOld[r] = sMax[row + 8 * r, meeting.maxima.slot(n - 1)]
        new = [cute.arch.fmax(rOld[r], peaks[r]) for r in range(2)]
        if (lane & 3) == 0:
            for r in cutlass.range_constexpr(2):
                sMax[row + 8 * r, meeting.maxima.slot(n)] = new[r]
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(meeting.maxima.full + meeting.maxima.slot(n))
        scales = []
        for r in cutlass.range_constexpr(2):
            safe = finite(new[r])
            scales.append(exp2(rOld[r] - safe))
            w.rSum[r] = w.rSum[r] * exp2(w.rMax[r] - safe)
            w.rMax[r] = new[r]
            for i in cutlass.range_constexpr(cute.size(rS)):
                if const_expr(i // 2 % 2 == r):
                    rS[i] = exp2(rS[i] - safe)
                    w.rSum[r] = w.rSum[r] + rS[i]
        return scales

    @cute.jit
    def _hand_over(
        self, w: ScoreFragments, meeting: Meeting, shared: Int32, rS: cute.Tensor, scales: list[Float32], n: Int32
    ):
        """The probabilities of tile n, and the factors of the output before it, to the value warpgroups."""
        c = self.c
        row, lane = wgmma.first_row(w.thread), w.thread & 31
        meeting.probabilities.await_empty(n)
        stage = meeting.probabilities.slot(n)
        sFactor = by_head(c.shared.factors, shared, c.p_stages)
        if (lane & 3) == 0:
            for r in cutlass.range_constexpr(2):
                sFactor[row + 8 * r, stage] = scales[r]
        self._leave_probabilities(rS, c.shared.probabilities.at(shared) + stage * c.p_bytes, row, lane)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(meeting.probabilities.full + stage)

    def _leave_probabilities(self, rS: cute.Tensor, address: Int32, row: Int32, lane: Int32) -> None:
        """(64, N) as pairs, rows of 128 bytes with their 16-byte chunks swizzled."""
        pairs = cute.make_ptr(
            Int32, address + row * ROW_BYTES + (lane & 3) * 4, cute.AddressSpace.smem, assumed_align=4
        )
        sP = cute.make_tensor(pairs, cute.make_layout((2, 8), stride=(256, 4)))  # (8 rows, chunk)
        for i in range(self.c.keys // 8):
            for r in range(2):
                sP[r, (row & 7) ^ i] = softmax.pack(rS[4 * i + 2 * r], rS[4 * i + 2 * r + 1], self.c.dtype)

    @cute.jit
    def _join_sums(self, w: ScoreFragments, shared: Int32, group: Int32):
        """The sums of both warpgroups, in step with the last maxima: to the first one, and for the values."""
        c = self.c
        row, lane = wgmma.first_row(w.thread), w.thread & 31
        sLast = by_head(c.shared.last, shared, 2)  # row_max and row_sum
        if group == 1:
            for r in cutlass.range_constexpr(2):
                row_sum = wgmma.lanes_sum(w.rSum[r])
                if (lane & 3) == 0:
                    sLast[row + 8 * r, 0] = w.rMax[r]
                    sLast[row + 8 * r, 1] = row_sum
        cute.arch.barrier(barrier_id=int(NamedBarrier.SCORES), number_of_threads=c.score_warpgroups * THREADS)
        if group == 0:
            for r in cutlass.range_constexpr(2):
                other = sLast[row + 8 * r, 0]
                row_max = cute.arch.fmax(w.rMax[r], other)
                more = sLast[row + 8 * r, 1] * exp2(other - finite(row_max))
                w.rSum[r] = wgmma.lanes_sum(w.rSum[r]) * exp2(w.rMax[r] - finite(row_max)) + more
                w.rMax[r] = row_max
            cute.arch.sync_warp()
            if (lane & 3) == 0:
                for r in cutlass.range_constexpr(2):
                    sLast[row + 8 * r, 0] = w.rMax[r]
                    sLast[row + 8 * r, 1] = w.rSum[r]


@dataclass
class ValueFragments(Fixed):
    """A value warpgroup's slices of the operands, and its accumulator."""

    thread: Int32  # of the warpgroup
    half: Int32  # of the columns
    ring: Int32  # address
    sBoxes: cute.Tensor  # (box, columns of one, boxes of all stages)
    mma: cute.TiledMma
    tOrP: cute.Tensor  # (1, 1, 64 / 16, stages of P)
    tOrV: cute.Tensor  # (1, part / 128, N / 16, stages * halves)
    rO: cute.Tensor  # (64, part)


class ValueWarpgroup:
    """A half of the columns, loaded and multiplied."""

    def __init__(self, config: MlaConfig, epilogue: Together):
        self.c, self.epilogue = config, epilogue

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
        row, sFactor = wgmma.first_row(w.thread), by_head(c.shared.factors, shared, c.p_stages)
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
            sP, sV = w.tOrP[None, None, None, p_stage], w.tOrV[None, None, None, stage * c.halves + w.half]
            wgmma.multiply(w.mma, w.rO, sP, sV, clear=False)
            warpgroup.wait_group(0)
            cute.arch.sync_warp()  # every lane has read its factors before one of them gives their place back
            meeting.probabilities.release(n)
            if n + c.stages < count:
                self._barrier(w)
                self._load(tensors, loads, keys, tile, w, meeting, n + c.stages)
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        sums = by_head(c.shared.last, shared, 2)
        self.epilogue.leave_columns(tensors, scalars, tile, w.rO, sums, w.thread, w.half)

    def _barrier(self, w: ValueFragments) -> None:
        """Of this warpgroup."""
        cute.arch.barrier(barrier_id=int(NamedBarrier.VALUES) + w.half, number_of_threads=THREADS)

    def _fragments(self, shared: Int32, half: Int32) -> ValueFragments:
        c, K, MN = self.c, OperandMajorMode.K, OperandMajorMode.MN
        thread = cute.arch.thread_idx()[0] % THREADS
        # As 256 columns an instruction would have 128 registers to itself, which ptxas does not give to one of so many
        # threads, whatever ``setmaxnreg`` says.
        mma = hopper.make_trivial_tiled_mma(c.dtype, c.dtype, K, MN, Float32, (1, 1, 1), (HEADS, 128))
        mine = mma.get_slice(thread)
        sP = wgmma.staged(c.dtype, c.shared.probabilities.at(shared), (HEADS, _P_KEYS, c.p_stages))
        ring = c.shared.ring.at(shared)
        boxes = c.stages * c.dim // c.box_columns * c.boxes
        return ValueFragments(
            thread=thread,
            half=half,
            ring=ring,
            sBoxes=wgmma.staged(c.dtype, ring, (c.box, c.box_columns, boxes)),
            mma=mma,
            tOrP=mine.make_fragment_A(mine.partition_A(sP)),
            tOrV=mine.make_fragment_B(
                mine.partition_B(wgmma.columns_by_keys(c.ring, wgmma.keys_by_columns(c.ring, ring)))
            ),
            rO=cute.make_rmem_tensor(mine.partition_shape_C((HEADS, c.ring.part)), Float32),
        )

    @cute.jit
    def _load(
        self, tensors: Tensors, loads: Loads, keys: Visible, tile: WorkTile, w: ValueFragments, meeting: Meeting,
        n: Int32,
    ):  # fmt: skip
        """A warp's 64 columns of tile n. TMA gives zeros beyond the end of a sequence, and where there is no page, for
        which it is given one that is beyond the cache."""
        c = self.c
        first, low, high = tile_bounds(keys, tile.first + n, c.keys)
        page = Int32(0)
        if const_expr(c.page):
            page = paging.of_boxes(tensors, tile.b, first, low, high, c.box, c.boxes, c.page)
        stage = meeting.tiles.slot(n)
        column = w.half * (c.ring.part // c.box_columns) + cute.arch.make_warp_uniform(w.thread // 32)
        full, policy = meeting.tiles.full + stage, cache_policy(tile)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, c.keys * c.box_columns * c.itemsize)
        for b in cutlass.range_constexpr(c.boxes):
            row, last = first // c.box + b, tile.b
            if const_expr(c.page):
                row = (first + b * c.box) % c.page // c.box
                last = cute.arch.shuffle_sync(page, b)
            gBox = cute.local_tile(loads.rows[None, None, tile.kv_head, last], (c.box, c.box_columns), (row, column))
            to = (stage * (c.dim // c.box_columns) + column) * c.boxes + b
            sBox, gBox = cpasync.tma_partition(
                loads.atom, 0, cute.make_layout(1), cute.group_modes(w.sBoxes[None, None, to], 0, 2),
                cute.group_modes(gBox, 0, 2),
            )  # fmt: skip
            cute.copy(loads.atom, gBox, sBox, tma_bar_ptr=full, cache_policy=policy)

    @cute.jit
    def _clear(self, w: ValueFragments, stage: Int32, low: Int32, high: Int32):
        """Zeros for this half of the columns in the rows that do not count: their weight is zero, but what the cache
        holds there may be infinite. The scores have been read."""
        c = self.c
        lane = w.thread & 31
        at = w.ring + (stage * c.halves + w.half) * const_expr(c.keys * c.ring.part * c.itemsize)
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
