"""What becomes of the results of a decode launch: warps merge into a block's, blocks' parts into a group's.

Parts of a group meet in the workspace in one of two ways. Few and short: the block that brings the last of them merges
all, while other blocks still stream. Many or long ones: a second kernel merges them, which waits where blocks of the
first have left (programmatic dependent launch). ``decode_plan.py`` chooses. Measured on an H200, bf16: 16/2 heads,
D 256, 1x8192, 64 parts of 8 rows: 64 us by the last block, 16 by a second kernel; 32/8 heads, D 128, 1x8192, 16 parts
of 4 rows: 15.4 by the last block, 18.4 by a second kernel that was launched when the first had ended.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from . import warp_ops as op
from .decode_schedule import Lengths, Share, share, units_before, visible
from .decode_types import COMBINERS, Piece, Scalars, Tensors
from .partials import finite, join
from .warp_ops import exp2

_LN2 = 0.6931471805599453
_LOG2E = 1.4426950408889634
_INF = float("inf")


class Merging:
    """The base of the decode kernels; of its Config it needs heads, dim_v, results, threads and sizes of memory."""

    at_once = 8  # parts that a thread has on the way while it merges

    def __init__(self, config: Any):
        self.c = config

    @property
    def out_dtype(self) -> Any:
        """Of E4M3 inputs bf16: four bits are too few for a mean of values."""
        return cutlass.BFloat16 if self.c.dtype.width == 8 else self.c.dtype

    def _beside(self, scalars: Scalars) -> Any:
        return scalars.beside if self.c.beside else 1

    def _word(self, shared: Int32) -> Any:
        """The word by which a block's threads agree, behind everything else."""
        at = cute.make_ptr(Int32, shared + (self.c.shared_bytes - 16), cute.AddressSpace.smem, assumed_align=16)
        return cute.make_tensor(at, cute.make_layout(1))

    def _results(self, shared: Int32) -> tuple[Any, Any]:
        """What is in shared memory: O (results, heads, Dv), and maxima and sums (results, heads, 2)."""
        c = self.c
        at = cute.make_ptr(Float32, shared, cute.AddressSpace.smem, assumed_align=16)
        sO = cute.make_tensor(
            at, cute.make_layout((c.results, c.heads, c.dim_v), stride=(c.heads * c.row_floats, c.row_floats, 1))
        )
        sStat = cute.make_tensor(
            at + c.results * c.heads * c.row_floats,
            cute.make_layout((c.results, c.heads, 2), stride=(2 * c.heads, 2, 1)),
        )
        return sO, sStat

    @cute.jit
    def _finish(self, tensors: Tensors, scalars: Scalars, piece: Piece, shared: Int32, whole: Boolean, slot: Int32):
        """Merge what is in shared memory; a group's result goes out, a part of it into the workspace."""
        c = self.c
        thread = cute.arch.thread_idx()[0]
        sO, sStat = self._results(shared)
        vectors = const_expr(c.dim_v // 4)
        part = tensors.parts.iterator.toint() + Int64(slot) * (c.part_floats * 4)
        for index in cutlass.range(thread, piece.heads * vectors, c.threads, unroll=1):
            head, column = index // vectors, index % vectors * 4
            top, total = Float32(-_INF), Float32(0.0)
            for w in cutlass.range_constexpr(c.results):
                top = cute.arch.fmax(top, sStat[w, head, 0])
            sums = [Float32(0.0)] * 4
            for w in cutlass.range_constexpr(c.results):
                weight = exp2(sStat[w, head, 0] - finite(top))
                total += weight * sStat[w, head, 1]
                sums = [sums[i] + weight * sO[w, head, column + i] for i in range(4)]
            if whole:
                self._store(tensors, scalars, piece, head, column, sums, top, total)
            else:
                op.store_4_floats(part + (head * c.dim_v + column) * 4, sums)
                if column == 0:
                    stat = part + (c.heads * c.dim_v + head * 2) * 4
                    op.store_float(stat, top)
                    op.store_float(stat + 4, total)
        cute.arch.barrier()

    @cute.jit
    def _store(
        self, tensors: Tensors, scalars: Scalars, piece: Piece, head: Int32, column: Int32,
        sums: Any, top: Float32, total: Float32,
    ):  # fmt: skip
        """Four columns of a head's result: divided by the sum, to which the sink belongs."""
        h = piece.head + head
        denominator = total
        if scalars.has_sink != 0:
            denominator += exp2(tensors.sink[h] * _LOG2E - finite(top))
        inverse = cute.arch.rcp_approx(denominator)
        if total == 0.0:
            inverse = Float32(0.0)
        values = [s * inverse for s in sums]
        out = tensors.out.iterator.toint() + (Int64(tensors.out.stride[0]) * piece.b + tensors.out.stride[1] * h) * 2
        pairs = [op.pack(self.out_dtype, *values[i : i + 2]) for i in (0, 2)]
        op.store_2_pairs(out + column * 2, *pairs)
        if column == 0:
            tensors.lse[piece.b, h] = (top + op.log2(total)) * _LN2

    @cute.jit
    def _meet(
        self, tensors: Tensors, scalars: Scalars, cut: Share, piece: Piece, shared: Int32, start: Int32, tiles: Int32
    ):
        """The last block that brings its part of a group merges all parts."""
        thread = cute.arch.thread_idx()[0]
        one, other = cut.owner(start), cut.owner(start + tiles - 1)
        beside = self._beside(scalars)
        block = one * beside + cute.arch.block_idx()[0] % beside
        sLast = self._word(shared)
        # The barrier of ``_finish`` orders the block's stores before the release of this addition.
        if thread == 0:
            arrived = op.add_acq_rel(tensors.count.iterator.toint() + Int64(block) * 4, Int32(1))
            last = arrived == other - one
            if last:
                tensors.count[block] = Int32(0)
            sLast[0] = cutlass.select_(last, Int32(1), Int32(0))
        cute.arch.barrier()
        if sLast[0] != 0:
            # A block's first piece is in its even slot; only the first block of a group can have begun before it.
            early = cutlass.select_(cut.start(one) == start, Int32(0), Int32(1))
            self._merge(tensors, scalars, piece, block * 2 + early, (block + beside) * 2, other - one)
        cute.arch.barrier()

    @cute.jit
    def _merge(self, tensors: Tensors, scalars: Scalars, piece: Piece, slot: Int32, rest: Int32, more: Int32):
        """Add the part in ``slot`` and ``more`` from ``rest`` on, in the even slots of every ``beside``-th block."""
        c = self.c
        thread = cute.arch.thread_idx()[0]
        vectors = const_expr(c.dim_v // 4)
        for index in cutlass.range(thread, piece.heads * vectors, c.threads, unroll=1):
            head, column = index // vectors, index % vectors * 4
            rO, top, total = self._add_parts(
                tensors, head, column, slot, rest, more, self._beside(scalars), Int32(-1), 1
            )
            self._store(tensors, scalars, piece, head, column, [rO[x] for x in range(4)], top, total)

    @cute.jit
    def _add_parts(
        self, tensors: Tensors, head: Int32, column: Int32, slot: Int32, rest: Int32, more: Int32,
        beside: Any, begin: Int32, step: Any,
    ):  # fmt: skip
        """Four columns of a head, summed over the parts begin, begin + step ... of -1 (in ``slot``) to more - 1.

        ``at_once`` parts are on the way before the first is used; beyond the last they repeat it.
        """
        c = self.c
        size = const_expr(c.part_floats * 4)
        o_at, stat_at = (head * c.dim_v + column) * 4, (c.heads * c.dim_v + head * 2) * 4
        base = tensors.parts.iterator.toint() + Int64(slot) * size
        later = tensors.parts.iterator.toint() + Int64(rest) * size
        rO = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        rO.fill(0.0)
        top, total = Float32(-_INF), Float32(0.0)
        for first in cutlass.range(begin, more, self.at_once * step, unroll=1):
            at = []
            for i in cutlass.range_constexpr(self.at_once):
                n = cutlass.min(first + i * step, more - 1)
                at.append(cutlass.select_(n < 0, base, later + Int64(n) * beside * (2 * size)))
            stats = [op.load_2_floats(a + stat_at) for a in at]
            news = [op.load_4_floats(a + o_at) for a in at]
            tops = [cutlass.select_(first + i * step < more, stats[i][0], Float32(-_INF)) for i in range(self.at_once)]
            top, total = join(rO, top, total, tops, [s[1] for s in stats], news)
        return rO, top, total

    @cute.kernel
    def combine(self, tensors: Tensors, lengths: Lengths, scalars: Scalars, blocks: Int32):
        """Merge the parts of every group that was cut among the ``blocks`` blocks of the first kernel.

        Blocks take equal shares of all heads of all groups. As many threads as a row has vectors form a *team*: one for
        a row that has few parts, more for one with many.
        """
        c = self.c
        smem = cutlass.memory.SmemAllocator()
        vectors, teams = const_expr(c.dim_v // 4), const_expr(_teams(c.dim_v))
        sO = smem.allocate_tensor(Float32, cute.make_layout((4, vectors, teams)), 16)
        sStat = smem.allocate_tensor(Float32, cute.make_layout((2, teams)), 16)
        kv_heads, beside = Int32(tensors.k.shape[2 if c.page else 1]), self._beside(scalars)
        groups, each = kv_heads * scalars.chunks, scalars.chunks // beside
        cut = share(lengths, kv_heads * each, blocks // beside, scalars.least, c.keys)
        most = cutlass.min(scalars.group, c.heads)  # heads of a group
        rows = lengths.batch * groups * most
        block, grid = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        at = block * (rows // grid) + cutlass.min(block, rows % grid)
        stop = (block + 1) * (rows // grid) + cutlass.min(block + 1, rows % grid)
        cute.arch.griddepcontrol_wait()
        while at < stop:
            index = at // most
            last = cutlass.min((index + 1) * most, stop)
            sequence, group = index // groups, index % groups
            units = visible(lengths, sequence, c.keys).units
            kv_head, chunk = group // scalars.chunks, group % scalars.chunks
            start = units_before(lengths, kv_heads * each, sequence, c.keys)
            start += (kv_head * each + chunk // beside) * units
            one, other = cut.owner(start), cut.owner(start + units - 1)
            if one != other:
                head = chunk * c.heads
                heads = cutlass.min(scalars.group - head, c.heads)
                piece = Piece(sequence, kv_head, kv_head * scalars.group + head, heads, Int32(0), Int32(0))
                # A block's first piece is in its even slot; only the first block can have begun before the group.
                slot = (one * beside + chunk % beside) * 2
                rest = slot + 2 * beside
                slot += cutlass.select_(cut.start(one) == start, Int32(0), Int32(1))
                end = cutlass.min(last - index * most, heads)
                self._combine(tensors, scalars, piece, at - index * most, end, slot, rest, other - one, sO, sStat)
            at = last

    @cute.jit
    def _combine(
        self, tensors: Tensors, scalars: Scalars, piece: Piece, head: Int32, end: Int32, slot: Int32, rest: Int32,
        more: Int32, sO: Any, sStat: Any,
    ):  # fmt: skip
        """Heads [head, end) of a group; its parts as in ``_merge``."""
        c = self.c
        vectors, teams = const_expr(c.dim_v // 4), const_expr(_teams(c.dim_v))
        thread = cute.arch.thread_idx()[0]
        team, vector = thread // vectors, thread % vectors
        per = Int32(1)  # teams of a row
        for _ in cutlass.range_constexpr(teams.bit_length() - 1):
            per = cutlass.select_((per * self.at_once <= more) & (per < teams), per * 2, per)
        for first in cutlass.range(head, end, teams // per, unroll=1):
            row = first + team // per
            if (team < teams) & (row < end):
                rO, top, total = self._add_parts(
                    tensors, row, vector * 4, slot, rest, more, self._beside(scalars), team % per - 1, per
                )
                for x in cutlass.range_constexpr(4):
                    sO[x, vector, team] = rO[x]
                if vector == 0:
                    sStat[0, team] = top
                    sStat[1, team] = total
            cute.arch.barrier()
            row = first + team
            if (team < teams // per) & (row < end):
                top, total = Float32(-_INF), Float32(0.0)
                for t in cutlass.range(team * per, (team + 1) * per, unroll=1):
                    top = cute.arch.fmax(top, sStat[0, t])
                rSum = cute.make_rmem_tensor(cute.make_layout(4), Float32)
                rSum.fill(0.0)
                for t in cutlass.range(team * per, (team + 1) * per, unroll=1):
                    weight = exp2(sStat[0, t] - finite(top))
                    total += weight * sStat[1, t]
                    for x in cutlass.range_constexpr(4):
                        rSum[x] = rSum[x] + weight * sO[x, vector, t]
                self._store(tensors, scalars, piece, row, vector * 4, [rSum[x] for x in range(4)], top, total)
            cute.arch.barrier()


def _teams(dim_v: int) -> int:
    return min(COMBINERS // (dim_v // 4), 16)
