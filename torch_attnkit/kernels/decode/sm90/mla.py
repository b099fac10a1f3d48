"""MLA decode on Hopper: one query token over latents that are keys and values at once, projections absorbed.

    out = softmax(scale q K') K[:, :Dv]      up to 64 query heads a CTA, D/Dv 512/512 or 576/512, bf16 or fp16

Persistent CTAs (``schedule.py``) of four warpgroups, one CTA an SM:

    WG 0, 1   scores,  88 registers a thread: alternate tiles; S = Q K' -> online softmax -> P and O's rescale factors
    WG 2, 3   values, 168 registers a thread: half of Dv each; O = factor O + P V, then TMA of these columns' next tile

mbarriers of a work tile, with the arrivals that complete a phase:

    query        1 stage          cp.async of all threads -> score warpgroups               512
    tiles.full   ``stages``       TMA by the 8 value warps -> all warpgroups                  8, and the bytes
    P.full       2                a score warpgroup's warps -> value warpgroups               4
    P.empty      2                value warps -> score warpgroups                             8
    maxima.full  2                a score warpgroup's warps -> the other score warpgroup      4

64 heads of 512 columns exceed one warpgroup's registers, and two that share the scores would wait for each other. Here
the second product of a tile runs beside the first of the next and beside either's softmax: score warpgroups pass each
other only the row maxima. The ring needs no empty barrier: a value warpgroup reloads the columns that it has multiplied
itself, and the scores were done with them before P was full. Of 576 columns, the first value warp loads the last 64,
too, which only the scores read; K is summed in blocks of 64 columns there, in two sums.

Head blocks of one KV head run concurrently on neighbouring CTAs, so that keys come from memory once
(``Scalars.concurrent``). Splits are combined at the CTA's end (``combine_cooperative.py``). Rows that do not count
arrive with their tile and are zeroed before the second product. Tiles have 48 keys (512) or 32 (576): plan.py.
Source: DeepSeek-V2 (arXiv 2405.04434), 2.1.2; docs/kernels/decode.md has the bound, docs/lab/decode.md what was tried.
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

from torch_attnkit.cuda import atomics, paging
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import finite
from torch_attnkit.cuda.ring import Fixed, Ring
from torch_attnkit.cuda.sm90 import softmax, wgmma
from torch_attnkit.cuda.sm90.warpgroup import ROW_BYTES, ROWS, THREADS, WARPS
from torch_attnkit.cuda.smem import CHUNK, Region
from torch_attnkit.cuda.warp_ops import exp2

from ..arguments import LaunchScalars, Scalars, Tensors, scalars_of
from ..schedule import Lengths, Persistent, Visible, WorkTile, allocate, launch, lengths_of, tile_bounds
from .combine_cooperative import CooperativeCombine
from .config import MlaConfig
from .wgmma import load_query, to_scores

_INF = float("inf")
_REGISTERS = 128  # of a thread: the mean
_SCORE_REGISTERS = 88
_VALUE_REGISTERS = 168  # 128 of which hold the output


class NamedBarrier(IntEnum):
    """Of a CTA; 0 is that of all threads."""

    VALUES = 1  # of the first value warpgroup, the second has the next
    SCORES = 3  # of both score warpgroups


class MlaLoads(NamedTuple):
    """The caches for TMA, as boxes of keys and 64 columns; V's where it is another tensor than K."""

    k_atom: cute.CopyAtom
    k: cute.Tensor  # (keys of a sequence or page, D, KV heads, sequences or pages)
    v_atom: cute.CopyAtom | None = None
    v: cute.Tensor | None = None


class DecodeMla:
    """The kernel, for both kinds of cache: scheduler, a mainloop for each role of warpgroups, epilogue."""

    def __init__(self, config: MlaConfig):
        self.c = config
        self.epilogue = CooperativeCombine(config)
        self.scores = self._role(ScoreWarpgroup(config, self.epilogue))
        self.values = self._role(ValueWarpgroup(config, self.epilogue))

    def _role(self, role: MlaRole) -> Persistent:
        """A CTA's work tiles for the warpgroups of one role."""
        return Persistent(self.c, MlaMainloop(self.c, role), self.epilogue)

    @cute.jit
    def __call__(self, tensors: Tensors, numbers: LaunchScalars, blocks: Int32, stream: Any):
        c = self.c
        lengths, scalars = lengths_of(tensors, numbers, c.page), scalars_of(tensors, numbers, c.page)
        launch(self.kernel(tensors, self._loads(tensors), lengths, scalars), c, blocks, stream)

    def _loads(self, tensors: Tensors) -> MlaLoads:
        caches = (tensors.k,) if self.c.same else (tensors.k, tensors.v)
        return MlaLoads(*(part for cache in caches for part in self._boxes(cache)))

    def _boxes(self, cache: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        """TMA of a cache: the atom, and the tensor of coordinates."""
        c = self.c
        atom = warpgroup.make_smem_layout_atom(
            hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, c.dtype, c.box_columns), c.dtype
        )
        box = cute.tile_to_shape(atom, (c.box, c.box_columns), order=(0, 1))
        modes = [1, 3, 2, 0] if c.page else [2, 3, 1, 0]
        rows = cute.make_tensor(cache.iterator, cute.select(cache.layout, mode=modes))
        made: tuple[cute.CopyAtom, cute.Tensor] = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), rows, box, (c.box, c.box_columns)
        )
        return made

    @cute.kernel
    def kernel(self, tensors: Tensors, loads: MlaLoads, lengths: Lengths, scalars: Scalars):
        c = self.c
        cute.arch.griddepcontrol_wait()  # programmatic dependent launch: the one ahead may still run
        shared = allocate(c)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == c.score_warpgroups * WARPS:
            cpasync.prefetch_descriptor(loads.k_atom)
        # Ahead of the roles: code that both share is in the instruction cache once.
        self.epilogue.init(shared)
        run = self.scores.find(tensors, lengths, scalars)
        if warp < c.score_warpgroups * WARPS:
            cute.arch.setmaxregister_decrease(_SCORE_REGISTERS)
            self.scores.run(tensors, loads, lengths, scalars, shared, run)
            cute.arch.barrier()  # the value warps have released their registers
            cute.arch.setmaxregister_increase(_REGISTERS)
        else:
            cute.arch.setmaxregister_increase(_VALUE_REGISTERS)
            self.values.run(tensors, loads, lengths, scalars, shared, run)
            # PTX ISA: a warpgroup must synchronise between two setmaxnreg, also where the CTA had no work.
            half = warp // WARPS - c.score_warpgroups
            cute.arch.barrier(barrier_id=int(NamedBarrier.VALUES) + half, number_of_threads=THREADS)
            cute.arch.setmaxregister_decrease(_REGISTERS)
            cute.arch.barrier()
        self.epilogue.combine(tensors, scalars, shared)


def cache_policy(tile: WorkTile) -> Int64:
    """Of keys: where the work tile is a split, evict_first, so that splits stay in L2 until they are combined."""
    return atomics.evict_first(cutlass.select_(tile.slot < 0, Int32(0), Int32(1)))


class MlaBarriers(Fixed):
    """The mbarriers of a work tile, initialised and invalidated with it."""

    def __init__(self, config: MlaConfig, shared: Int32):
        c = config
        self.arrivals = c.arrivals
        at = cute.make_ptr(cutlass.Int64, c.shared.barriers.at(shared), cute.AddressSpace.smem, assumed_align=8)
        self.query = at
        self.tiles = Ring(at + 1, at + 1, c.stages)  # only ``full`` is used
        p_full = self.tiles.full + c.stages
        self.probabilities = Ring(p_full, p_full + c.p_stages, c.p_stages)
        maxima = p_full + 2 * c.p_stages
        self.maxima = Ring(maxima, maxima, c.score_warpgroups)  # only ``full`` is used

    def init(self) -> None:
        for i, count in enumerate(self.arrivals):
            cute.arch.mbarrier_init(self.query + i, count)

    def invalidate(self) -> None:
        for i in range(len(self.arrivals)):
            op.forget_barrier((self.query + i).toint())


class MlaRole(Protocol):
    """What a warpgroup does with a work tile; ``group`` is its number in the CTA."""

    def run(
        self, tensors: Tensors, loads: MlaLoads, scalars: Scalars, keys: Visible, tile: WorkTile, shared: Int32,
        barriers: MlaBarriers, group: Int32,
    ) -> None: ...  # fmt: skip


class MlaMainloop:
    """A work tile in one of the roles."""

    def __init__(self, config: MlaConfig, role: MlaRole):
        self.c, self.role = config, role

    @cute.jit
    def run(self, tensors: Tensors, loads: MlaLoads, scalars: Scalars, keys: Visible, tile: WorkTile, shared: Int32):
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // THREADS)
        # Warp-uniform values take uniform registers.
        keys, tile = [type(x)(*map(cute.arch.make_warp_uniform, x)) for x in (keys, tile)]
        barriers = MlaBarriers(self.c, shared)
        if cute.arch.thread_idx()[0] == 0:
            barriers.init()
        cute.arch.mbarrier_init_fence()
        cute.arch.fence_view_async_shared()  # rows that the last work tile cleared are where tiles arrive now
        cute.arch.barrier()
        self.role.run(tensors, loads, scalars, keys, tile, shared, barriers, group)
        if cute.arch.thread_idx()[0] == 0:
            barriers.invalidate()
        cute.arch.barrier()


def load_q(config: MlaConfig, tensors: Tensors, tile: WorkTile, shared: Int32, barriers: MlaBarriers) -> None:
    """This thread's share of Q; every thread of the CTA has one."""
    c = config
    thread = cute.arch.thread_idx()[0]
    load_query(tensors, tile, c.shared.query.at(shared), thread, c.threads, c.dim, c.itemsize)
    cute.arch.cp_async_mbarrier_arrive_noinc(barriers.query)
    cute.arch.cp_async_commit_group()


def by_head(region: Region, shared: Int32, columns: int) -> cute.Tensor:
    """Floats of shared memory, so many for each head."""
    pointer = cute.make_ptr(Float32, region.at(shared), cute.AddressSpace.smem, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout((ROWS, columns)))


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
    """Probabilities of every second tile (WG 0 and 1)."""

    def __init__(self, config: MlaConfig, epilogue: CooperativeCombine):
        self.c, self.epilogue = config, epilogue

    @cute.jit
    def run(
        self, tensors: Tensors, loads: MlaLoads, scalars: Scalars, keys: Visible, tile: WorkTile, shared: Int32,
        barriers: MlaBarriers, group: Int32,
    ):  # fmt: skip
        c = self.c
        load_q(c, tensors, tile, shared, barriers)
        w = self._fragments(shared)
        w.rMax.fill(-_INF)
        w.rSum.fill(0.0)
        cute.arch.mbarrier_wait(barriers.query, Int32(0))
        cute.arch.fence_view_async_shared()
        for n in cutlass.range(group, tile.stop - tile.first, c.score_warpgroups, unroll=1):
            rS, rMore = self._multiply(w, barriers, n)
            warpgroup.wait_group(0)
            for i in cutlass.range_constexpr(cute.size(rS)):
                rS[i] = rS[i] + rMore[i]
            to_scores(scalars, rS, w.thread, *tile_bounds(keys, tile.first + n, c.keys), c.keys)
            scales = self._probabilities(w, barriers, shared, rS, n)
            self._publish_p(w, barriers, shared, rS, scales, n)
        self._merge_sums(w, shared, group)
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        if group == 0:
            self.epilogue.store_stats(tensors, tile, w.rMax, w.rSum, w.thread)

    def _fragments(self, shared: Int32) -> ScoreFragments:
        c, K = self.c, OperandMajorMode.K
        thread = cute.arch.thread_idx()[0] % THREADS
        mma = hopper.make_trivial_tiled_mma(c.dtype, c.dtype, K, K, Float32, (1, 1, 1), (ROWS, c.keys))
        own = mma.get_slice(thread)
        sQ = wgmma.staged(c.dtype, c.shared.query.at(shared), (ROWS, c.key_ring.part, c.key_ring.halves))
        sK = wgmma.keys_by_columns(c.key_ring, c.shared.ring.at(shared))
        return ScoreFragments(
            thread=thread,
            mma=mma,
            tSrQ=own.make_fragment_A(own.partition_A(sQ)),
            tSrK=own.make_fragment_B(own.partition_B(sK)),
            rMax=cute.make_rmem_tensor(2, Float32),
            rSum=cute.make_rmem_tensor(2, Float32),
        )

    def _multiply(self, w: ScoreFragments, barriers: MlaBarriers, n: Int32) -> list[cute.Tensor]:
        """Issue the scores of tile n, once it is there, in two sums of as equal parts of the columns as there are:
        shorter chains of products, whose roundings are coarser than those of an addition."""
        c, parts = self.c, self.c.key_ring.halves
        barriers.tiles.wait(n)
        sums = [cute.make_rmem_tensor(w.mma.partition_shape_C((ROWS, c.keys)), Float32) for _ in range(2)]
        for part in range(parts):
            sK = w.tSrK[None, None, None, barriers.tiles.slot(n) * parts + part]
            half = part * 2 // parts
            clear = part == 0 or (part - 1) * 2 // parts < half
            wgmma.multiply(w.mma, sums[half], w.tSrQ[None, None, None, part], sK, clear=clear)
        return sums

    @cute.jit
    def _probabilities(self, w: ScoreFragments, barriers: MlaBarriers, shared: Int32, rS: cute.Tensor, n: Int32):
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
            barriers.maxima.wait(n - 1)
            for r in cutlass.range_constexpr(2):
                rOld[r] = sMax[row + 8 * r, barriers.maxima.slot(n - 1)]
        new = [cute.arch.fmax(rOld[r], peaks[r]) for r in range(2)]
        if (lane & 3) == 0:
            for r in cutlass.range_constexpr(2):
                sMax[row + 8 * r, barriers.maxima.slot(n)] = new[r]
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barriers.maxima.full + barriers.maxima.slot(n))
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
    def _publish_p(
        self, w: ScoreFragments, barriers: MlaBarriers, shared: Int32, rS: cute.Tensor, scales: list[Float32], n: Int32
    ):
        """P of tile n and the rescale factors of the output before it, to the value warpgroups."""
        c = self.c
        row, lane = wgmma.first_row(w.thread), w.thread & 31
        barriers.probabilities.await_empty(n)
        stage = barriers.probabilities.slot(n)
        sFactor = by_head(c.shared.factors, shared, c.p_stages)
        if (lane & 3) == 0:
            for r in cutlass.range_constexpr(2):
                sFactor[row + 8 * r, stage] = scales[r]
        self._store_p(rS, c.shared.probabilities.at(shared) + stage * c.p_bytes, row, lane)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barriers.probabilities.full + stage)

    def _store_p(self, rS: cute.Tensor, address: Int32, row: Int32, lane: Int32) -> None:
        """(64, N) as pairs, in rows of 64 or 128 bytes with their 16-byte chunks swizzled."""
        c, row_bytes = self.c, self.c.p_row_bytes
        line = row // (ROW_BYTES // row_bytes) if row_bytes < ROW_BYTES else row  # of 128 bytes
        pairs = cute.make_ptr(
            Int32, address + row * row_bytes + (lane & 3) * 4, cute.AddressSpace.smem, assumed_align=4
        )
        chunks = row_bytes // CHUNK
        sP = cute.make_tensor(pairs, cute.make_layout((2, chunks), stride=(8 * row_bytes // 4, 4)))  # (8 rows, chunk)
        for i in range(c.keys // 8):
            for r in range(2):
                sP[r, (line & (chunks - 1)) ^ i] = softmax.pack(rS[4 * i + 2 * r], rS[4 * i + 2 * r + 1], c.dtype)

    @cute.jit
    def _merge_sums(self, w: ScoreFragments, shared: Int32, group: Int32):
        """Sums of both score warpgroups under the last maxima: into WG 0's registers, and to smem for the values."""
        c = self.c
        row, lane = wgmma.first_row(w.thread), w.thread & 31
        sLast = by_head(c.shared.last, shared, 2)  # row_max and row_sum
        if group == 1:
            for r in cutlass.range_constexpr(2):
                row_sum = softmax.quad_sum(w.rSum[r])
                if (lane & 3) == 0:
                    sLast[row + 8 * r, 0] = w.rMax[r]
                    sLast[row + 8 * r, 1] = row_sum
        cute.arch.barrier(barrier_id=int(NamedBarrier.SCORES), number_of_threads=c.score_warpgroups * THREADS)
        if group == 0:
            for r in cutlass.range_constexpr(2):
                other = sLast[row + 8 * r, 0]
                row_max = cute.arch.fmax(w.rMax[r], other)
                more = sLast[row + 8 * r, 1] * exp2(other - finite(row_max))
                w.rSum[r] = softmax.quad_sum(w.rSum[r]) * exp2(w.rMax[r] - finite(row_max)) + more
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
    values: Int32  # address of the ring that has them
    sBoxes: cute.Tensor  # (box, columns of one, boxes of all stages)
    mma: cute.TiledMma
    tOrP: cute.Tensor  # (1, 1, 64 / 16, stages of P)
    tOrV: cute.Tensor  # (1, part / 128, N / 16, stages * halves)
    rO: cute.Tensor  # (64, part)


class ValueWarpgroup:
    """A half of the values' columns, loaded and multiplied (WG 2 and 3)."""

    def __init__(self, config: MlaConfig, epilogue: CooperativeCombine):
        self.c, self.epilogue = config, epilogue

    @cute.jit
    def run(
        self, tensors: Tensors, loads: MlaLoads, scalars: Scalars, keys: Visible, tile: WorkTile, shared: Int32,
        barriers: MlaBarriers, group: Int32,
    ):  # fmt: skip
        c = self.c
        w = self._fragments(shared, group - c.score_warpgroups)
        count = tile.stop - tile.first
        # Issue the first tile and Q ahead of the others, or they land last, when the ring has long been full.
        if count > 0:
            self._load(tensors, loads, keys, tile, w, barriers, Int32(0))
        load_q(c, tensors, tile, shared, barriers)
        for n in cutlass.range(1, cutlass.min(count, c.stages), unroll=1):
            self._load(tensors, loads, keys, tile, w, barriers, n)
        w.rO.fill(0.0)
        row, sFactor = wgmma.first_row(w.thread), by_head(c.shared.factors, shared, c.p_stages)
        for n in cutlass.range(count, unroll=1):
            p_stage, stage = barriers.probabilities.slot(n), barriers.tiles.slot(n)
            barriers.probabilities.wait(n)
            scales = (sFactor[row, p_stage], sFactor[row + 8, p_stage])
            if cute.arch.vote_any_sync((scales[0] != 1.0) | (scales[1] != 1.0)):
                softmax.rescale(w.rO, scales)
            barriers.tiles.wait(n)
            first, low, high = tile_bounds(keys, tile.first + n, c.keys)
            if (low > first) | (high < first + c.keys):
                self._clear(w, stage, low - first, high - first)
            sP, sV = w.tOrP[None, None, None, p_stage], w.tOrV[None, None, None, stage * c.halves + w.half]
            wgmma.multiply(w.mma, w.rO, sP, sV, clear=False)
            warpgroup.wait_group(0)
            cute.arch.sync_warp()  # every lane has read its factors before the stage is released
            barriers.probabilities.release(n)
            if n + c.stages < count:
                self._sync(w)
                self._load(tensors, loads, keys, tile, w, barriers, n + c.stages)
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        sums = by_head(c.shared.last, shared, 2)
        self.epilogue.store_columns(tensors, scalars, tile, w.rO, sums, w.thread, w.half)

    def _sync(self, w: ValueFragments) -> None:
        """Barrier of this warpgroup."""
        cute.arch.barrier(barrier_id=int(NamedBarrier.VALUES) + w.half, number_of_threads=THREADS)

    def _fragments(self, shared: Int32, half: Int32) -> ValueFragments:
        c, K, MN = self.c, OperandMajorMode.K, OperandMajorMode.MN
        thread = cute.arch.thread_idx()[0] % THREADS
        # As 256 columns an instruction would have 128 registers to itself, which ptxas does not give to one of so many
        # threads, whatever ``setmaxnreg`` says.
        mma = hopper.make_trivial_tiled_mma(c.dtype, c.dtype, K, MN, Float32, (1, 1, 1), (ROWS, 128))
        own = mma.get_slice(thread)
        sP = wgmma.staged(c.dtype, c.shared.probabilities.at(shared), (ROWS, c.p_keys, c.p_stages))
        ring = c.shared.ring.at(shared)
        return ValueFragments(
            thread=thread,
            half=half,
            values=ring + c.values_offset,
            sBoxes=wgmma.staged(c.dtype, ring, (c.box, c.box_columns, c.ring_bytes // (c.box * ROW_BYTES))),
            mma=mma,
            tOrP=own.make_fragment_A(own.partition_A(sP)),
            tOrV=own.make_fragment_B(own.partition_B(self._columns_by_keys(ring + c.values_offset))),
            rO=cute.make_rmem_tensor(own.partition_shape_C((ROWS, c.value_ring.part)), Float32),
        )

    def _columns_by_keys(self, address: Int32) -> cute.Tensor:
        """V as the right side of the second product: (part, N, stages * halves)."""
        c, ring = self.c, self.c.value_ring
        if c.dim == c.dim_v:
            return wgmma.columns_by_keys(ring, wgmma.keys_by_columns(ring, address))
        sV = wgmma.staged(c.dtype, address, (c.keys, c.value_columns, c.stages))
        stride = (c.keys, 1, (c.keys * ring.part, c.keys * c.value_columns))
        return cute.composition(sV, cute.make_layout((ring.part, c.keys, (c.halves, c.stages)), stride=stride))

    @cute.jit
    def _load(
        self, tensors: Tensors, loads: MlaLoads, keys: Visible, tile: WorkTile, w: ValueFragments,
        barriers: MlaBarriers, n: Int32,
    ):  # fmt: skip
        """A warp's 64 columns of tile n; of 576 the first warp loads the last 64, too. TMA zero-fills beyond a
        sequence's end and where there is no page, for which it is given one out of bounds."""
        c = self.c
        first, low, high = tile_bounds(keys, tile.first + n, c.keys)
        page = Int32(0)
        if const_expr(c.page):
            page = paging.of_boxes(tensors, tile.b, first, low, high, c.box, c.boxes, c.page)
        stage = barriers.tiles.slot(n)
        k_columns, v_columns = const_expr(c.dim // c.box_columns), const_expr(c.dim_v // c.box_columns)  # blocks of 64
        column = w.half * (v_columns // c.halves) + cute.arch.make_warp_uniform(w.thread // 32)
        full, policy = barriers.tiles.full + stage, cache_policy(tile)
        of_k = const_expr(1)
        if const_expr(c.dim > c.dim_v):
            of_k = cutlass.select_(column == 0, Int32(2), Int32(1))
        loaded = of_k + const_expr(0 if c.same else 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, loaded * (c.keys * c.box_columns * c.itemsize))
        # TMA of K and of V, and which of the ring's blocks of 64 columns they have: from one on, so many a stage.
        of_keys = (loads.k_atom, loads.k, 0, k_columns)
        of_values = (loads.v_atom, loads.v, c.stages * k_columns, v_columns)
        for b in cutlass.range_constexpr(c.boxes):
            row, last = first // c.box + b, tile.b
            if const_expr(c.page):
                row = (first + b * c.box) % c.page // c.box
                last = cute.arch.shuffle_sync(page, b)
            box = (tile.kv_head, last, row, b)
            if const_expr(c.dim == c.dim_v):
                self._load_box(of_keys, box, column, stage, w, full, policy)
            else:
                for x in cutlass.range(of_k, unroll=1):
                    self._load_box(of_keys, box, column + x * v_columns, stage, w, full, policy)
            if const_expr(not c.same):
                self._load_box(of_values, box, column, stage, w, full, policy)

    def _load_box(
        self, source: tuple, box: tuple, column: Int32, stage: Int32, w: ValueFragments, full: cute.Pointer,
        policy: Int64,
    ) -> None:  # fmt: skip
        """64 columns of some keys of a tile: of its KV head, sequence or page, and box there; its b-th box."""
        (atom, cache, first, columns), (kv_head, last, row, b) = source, box
        gBox = cute.local_tile(cache[None, None, kv_head, last], (self.c.box, self.c.box_columns), (row, column))
        to = (first + stage * columns + column) * self.c.boxes + b
        sBox, gBox = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(w.sBoxes[None, None, to], 0, 2), cute.group_modes(gBox, 0, 2)
        )
        cute.copy(atom, gBox, sBox, tma_bar_ptr=full, cache_policy=policy)

    @cute.jit
    def _clear(self, w: ValueFragments, stage: Int32, low: Int32, high: Int32):
        """Zeros for this half of the columns in the rows that do not count: their weight is zero, but what the cache
        holds there may be infinite. The scores have been read."""
        c = self.c
        lane = w.thread & 31
        others = const_expr(c.keys * (c.value_columns - c.dim_v) * c.itemsize)  # bytes of a stage that no value has
        at = w.values + stage * others if const_expr(others > 0) else w.values
        at += (stage * c.halves + w.half) * const_expr(c.keys * c.value_ring.part * c.itemsize)
        for i in cutlass.range_constexpr(c.keys // WARPS):
            row = i * WARPS + w.thread // 32
            if (row < low) | (row >= high):
                chunk = cute.make_ptr(
                    Int32, at + (lane // 8) * (c.keys * ROW_BYTES) + row * ROW_BYTES + lane % 8 * CHUNK,
                    cute.AddressSpace.smem, assumed_align=CHUNK,
                )  # fmt: skip
                cute.make_tensor(chunk, cute.make_layout(CHUNK // 4)).fill(0)
        cute.arch.fence_view_async_shared()
        self._sync(w)
