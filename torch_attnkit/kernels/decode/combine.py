"""The epilogue of ``mma.py`` and ``wgmma.py``: warps' results into a CTA's, the splits of a group into its result.

    CTA, per work tile   results in shared memory -> a whole group: normalised to the output; a split: to the workspace
    then, of a split     count it (acq_rel add); the last CTA to arrive combines all (``LastCta``), while others stream
    or, many splits      a second kernel combines, launched early by programmatic dependent launch (``kernel``)

``plan.py`` chooses: more than 12 waits for memory in a thread are the second kernel's. Splits are added in the same
order both ways, so the result has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import pdl
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import finite, join
from torch_attnkit.cuda.smem import Region, itemsize
from torch_attnkit.cuda.stream_k import Partition
from torch_attnkit.cuda.warp_ops import exp2
from torch_attnkit.cuda.workspace import SplitLayout

from ..scores import LOG2_E
from .arguments import Scalars, Tensors, kv_heads_of, out_dtype
from .config import Results
from .schedule import Lengths, SchedulerConfig, WorkTile, concurrent_of, partition, units_before, visible

THREADS = 512  # of a CTA of the second kernel
_IN_FLIGHT = 8  # splits that a thread has in flight while it combines
_INF = float("inf")
_LN_2 = 1 / LOG2_E


class CombineShared(Protocol):
    """The regions of shared memory that the epilogue uses."""

    @property
    def results(self) -> Results: ...
    @property
    def flag(self) -> Region: ...


class CombineConfig(SchedulerConfig, Protocol):
    """What the epilogue has to know of a kernel, beside what the scheduler has to."""

    @property
    def dtype(self) -> Any: ...
    @property
    def dim_v(self) -> int: ...
    @property
    def split(self) -> SplitLayout: ...
    @property
    def shared(self) -> CombineShared: ...


class OfHeads(Protocol):
    """What of a work tile says whose result it is."""

    @property
    def b(self) -> Int32: ...
    @property
    def head(self) -> Int32: ...


def result_tensors(results: Results, shared: Int32) -> tuple[cute.Tensor, cute.Tensor]:
    """A CTA's results in shared memory: O (count, heads, Dv), and row_max and row_sum (count, heads, 2)."""
    count, heads, row = results.count, results.heads, results.row_floats
    at = cute.make_ptr(Float32, shared, cute.AddressSpace.smem, assumed_align=16)
    sO = cute.make_tensor(at, cute.make_layout((count, heads, results.dim_v), stride=(heads * row, row, 1)))
    sStat = cute.make_tensor(at + count * heads * row, cute.make_layout((count, heads, 2), stride=(2 * heads, 2, 1)))
    return sO, sStat


class Output:
    """The store of a result; ``dtype`` is that of q, k and v."""

    def __init__(self, dtype: Any):
        self.dtype = out_dtype(dtype)

    @cute.jit
    def store(
        self, tensors: Tensors, scalars: Scalars, tile: OfHeads, head: Int32, column: Int32,
        sums: list[Float32], row_max: Float32, row_sum: Float32,
    ):  # fmt: skip
        """Four columns of a head's result: divided by the sum, to which the sink belongs."""
        h = tile.head + head
        denominator = row_sum
        if scalars.has_sink != 0:
            denominator += exp2(tensors.sink[h] * LOG2_E - finite(row_max))
        inverse = cute.arch.rcp_approx(denominator)
        if row_sum == 0.0:
            inverse = Float32(0.0)
        values = [s * inverse for s in sums]
        size = const_expr(itemsize(self.dtype))
        out = tensors.out.iterator.toint() + (Int64(tensors.out.stride[0]) * tile.b + tensors.out.stride[1] * h) * size
        pairs = [op.pack(self.dtype, *values[i : i + 2]) for i in (0, 2)]
        op.store_2_pairs(out + column * size, *pairs)
        if column == 0:
            tensors.lse[tile.b, h] = (row_max + op.log2(row_sum)) * _LN_2


class Splits:
    """The splits of a group in the workspace, of which a thread loads ``in_flight`` before it uses one."""

    def __init__(self, layout: SplitLayout, in_flight: int):
        self.layout, self.in_flight = layout, in_flight

    @cute.jit
    def add(
        self, tensors: Tensors, head: Int32, column: Int32, slot: Int32, rest: Int32, more: Int32,
        concurrent: Int32 | int, begin: Int32, step: Int32 | int,
    ):  # fmt: skip
        """Four columns of a head, row_max and row_sum, over the splits begin, begin + step ... of -1 to more - 1.

        Split -1 is in ``slot``, the others from ``rest`` on in the even slots of every ``concurrent``-th CTA. The first
        ``in_flight`` are in flight before one is used; beyond the last they repeat it.
        """
        layout = self.layout
        size = const_expr(layout.nbytes)
        o_at, stat_at = layout.output_at(head, column), layout.stat_at(head)
        base = tensors.splits.iterator.toint() + Int64(slot) * size
        later = tensors.splits.iterator.toint() + Int64(rest) * size
        rO = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        rO.fill(0.0)
        row_max, row_sum = Float32(-_INF), Float32(0.0)
        for first in cutlass.range(begin, more, self.in_flight * step, unroll=1):
            at = []
            for i in cutlass.range_constexpr(self.in_flight):
                n = cutlass.min(first + i * step, more - 1)
                at.append(cutlass.select_(n < 0, base, later + Int64(n) * concurrent * (2 * size)))
            stats = [op.load_2_floats(a + stat_at) for a in at]
            news = [op.load_4_floats(a + o_at) for a in at]
            maxima = [
                cutlass.select_(first + i * step < more, stats[i][0], Float32(-_INF)) for i in range(self.in_flight)
            ]
            row_max, row_sum = join(rO, row_max, row_sum, maxima, [s[1] for s in stats], news)
        return rO, row_max, row_sum


class LastCta:
    """The CTA that brings the last split of a group combines all, by ``rows(tensors, scalars, tile, slot, rest,
    more)``, whose last three say as in ``Splits.add`` where the splits are. ``flag``: a word of shared memory."""

    def __init__(self, flag: Region, concurrent: Callable[[Scalars], Int32 | int], rows: Callable[..., None]):
        self.flag, self.concurrent, self.rows = flag, concurrent, rows

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Scalars, cut: Partition, tile: OfHeads, shared: Int32, start: Int32,
        tiles: Int32,
    ):  # fmt: skip
        """For a split of the group that has units [start, start + tiles), in the workspace, behind a CTA barrier."""
        thread = cute.arch.thread_idx()[0]
        first_block, last_block = cut.owner(start), cut.owner(start + tiles - 1)
        concurrent = self.concurrent(scalars)
        block = first_block * concurrent + cute.arch.block_idx()[0] % concurrent
        flag = cute.make_ptr(Int32, self.flag.at(shared), cute.AddressSpace.smem, assumed_align=16)
        sIsLast = cute.make_tensor(flag, cute.make_layout(1))
        # The caller's barrier orders the CTA's stores before this add's release.
        if thread == 0:
            arrived = op.add_acq_rel(tensors.count.iterator.toint() + Int64(block) * 4, Int32(1))
            last = arrived == last_block - first_block
            if last:
                tensors.count[block] = Int32(0)
            sIsLast[0] = cutlass.select_(last, Int32(1), Int32(0))
        cute.arch.barrier()
        if sIsLast[0] != 0:
            # A CTA's first work tile has its even slot; only the first CTA of a group can have begun before it.
            odd = cutlass.select_(cut.start(first_block) == start, Int32(0), Int32(1))
            self.rows(tensors, scalars, tile, block * 2 + odd, (block + concurrent) * 2, last_block - first_block)
        cute.arch.barrier()


class Combine:
    """The epilogue of Hopper's kernels, and their second kernel."""

    def __init__(self, config: CombineConfig):
        self.c = config
        self.output, self.splits = Output(config.dtype), Splits(config.split, _IN_FLIGHT)
        self.last = LastCta(config.shared.flag, self._concurrent, self._rows)

    def _concurrent(self, scalars: Scalars) -> Int32 | int:
        return concurrent_of(self.c, scalars)

    @cute.jit
    def finish(self, tensors: Tensors, scalars: Scalars, tile: WorkTile, shared: Int32, whole: Boolean, slot: Int32):
        """Combine what is in shared memory: a whole group's result to the output, a split to the workspace."""
        c = self.c
        thread = cute.arch.thread_idx()[0]
        sO, sStat = result_tensors(c.shared.results, shared)
        vectors, count = const_expr(c.dim_v // 4), const_expr(c.shared.results.count)
        split = tensors.splits.iterator.toint() + Int64(slot) * c.split.nbytes
        for index in cutlass.range(thread, tile.heads * vectors, c.threads, unroll=1):
            head, column = index // vectors, index % vectors * 4
            row_max, row_sum = Float32(-_INF), Float32(0.0)
            for w in cutlass.range_constexpr(count):
                row_max = cute.arch.fmax(row_max, sStat[w, head, 0])
            sums = [Float32(0.0)] * 4
            for w in cutlass.range_constexpr(count):
                weight = exp2(sStat[w, head, 0] - finite(row_max))
                row_sum += weight * sStat[w, head, 1]
                sums = [sums[i] + weight * sO[w, head, column + i] for i in range(4)]
            if whole:
                self.output.store(tensors, scalars, tile, head, column, sums, row_max, row_sum)
            else:
                op.store_4_floats(split + c.split.output_at(head, column), sums)
                if column == 0:
                    stat = split + c.split.stat_at(head)
                    op.store_float(stat, row_max)
                    op.store_float(stat + 4, row_sum)
        cute.arch.barrier()

    def arrive(
        self, tensors: Tensors, scalars: Scalars, cut: Partition, tile: WorkTile, shared: Int32, start: Int32,
        tiles: Int32,
    ) -> None:  # fmt: skip
        self.last.run(tensors, scalars, cut, tile, shared, start, tiles)

    @cute.jit
    def _rows(self, tensors: Tensors, scalars: Scalars, tile: WorkTile, slot: Int32, rest: Int32, more: Int32):
        """The result of a group from its splits."""
        c = self.c
        thread = cute.arch.thread_idx()[0]
        vectors = const_expr(c.dim_v // 4)
        for index in cutlass.range(thread, tile.heads * vectors, c.threads, unroll=1):
            head, column = index // vectors, index % vectors * 4
            rO, row_max, row_sum = self.splits.add(
                tensors, head, column, slot, rest, more, concurrent_of(c, scalars), Int32(-1), 1
            )
            self.output.store(tensors, scalars, tile, head, column, [rO[x] for x in range(4)], row_max, row_sum)

    def launch(
        self, tensors: Tensors, lengths: Lengths, scalars: Scalars, blocks: Int32, combine_blocks: Int32, stream: Any
    ) -> None:
        """The second kernel, where there is one, for the splits of ``blocks`` CTAs of the first."""
        if self.c.combine:
            self.kernel(tensors, lengths, scalars, blocks).launch(
                grid=[combine_blocks, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=pdl.use(),
                min_blocks_per_mp=1, preferred_smem_carveout=100,
            )  # fmt: skip

    @cute.kernel
    def kernel(self, tensors: Tensors, lengths: Lengths, scalars: Scalars, blocks: Int32):
        """Combine the splits of every group that was cut among the ``blocks`` CTAs of the first kernel.

        CTAs take equal shares of all heads of all groups. As many threads as a row has vectors form a *team*: one for
        a row that has few splits, more for one with many.
        """
        c = self.c
        smem = cutlass.memory.SmemAllocator()
        vectors, teams = const_expr(c.dim_v // 4), const_expr(_teams(c.dim_v))
        sO = smem.allocate_tensor(Float32, cute.make_layout((4, vectors, teams)), 16)
        sStat = smem.allocate_tensor(Float32, cute.make_layout((2, teams)), 16)
        kv_heads, concurrent = kv_heads_of(tensors, c.page), concurrent_of(c, scalars)
        groups, each = kv_heads * scalars.head_blocks, scalars.head_blocks // concurrent
        cut = partition(lengths, kv_heads * each, blocks // concurrent, scalars.least_tiles, c.keys)
        most = cutlass.min(scalars.group, c.heads)  # heads of a group
        rows = lengths.batch * groups * most
        block, grid = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        at = block * (rows // grid) + cutlass.min(block, rows % grid)
        stop = (block + 1) * (rows // grid) + cutlass.min(block + 1, rows % grid)
        pdl.wait()
        while at < stop:
            index = at // most
            last = cutlass.min((index + 1) * most, stop)
            sequence, group = index // groups, index % groups
            units = visible(lengths, sequence, c.keys).units
            kv_head, head_block = group // scalars.head_blocks, group % scalars.head_blocks
            start = units_before(lengths, kv_heads * each, sequence, c.keys)
            start += (kv_head * each + head_block // concurrent) * units
            first_block, last_block = cut.owner(start), cut.owner(start + units - 1)
            if first_block != last_block:
                head = head_block * c.heads
                heads = cutlass.min(scalars.group - head, c.heads)
                tile = WorkTile(sequence, kv_head, kv_head * scalars.group + head, heads, *[Int32(0)] * 3)
                # A CTA's first work tile has its even slot; only the first CTA can have begun before the group.
                slot = (first_block * concurrent + head_block % concurrent) * 2
                rest = slot + 2 * concurrent
                slot += cutlass.select_(cut.start(first_block) == start, Int32(0), Int32(1))
                end = cutlass.min(last - index * most, heads)
                begin, more = at - index * most, last_block - first_block
                self._heads_by_teams(tensors, scalars, tile, begin, end, slot, rest, more, sO, sStat)
            at = last

    @cute.jit
    def _heads_by_teams(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, head: Int32, end: Int32, slot: Int32, rest: Int32,
        more: Int32, sO: cute.Tensor, sStat: cute.Tensor,
    ):  # fmt: skip
        """Heads [head, end) of a group; its splits as in ``Splits.add``."""
        c = self.c
        vectors, teams = const_expr(c.dim_v // 4), const_expr(_teams(c.dim_v))
        thread = cute.arch.thread_idx()[0]
        team, vector = thread // vectors, thread % vectors
        per = Int32(1)  # teams of a row
        for _ in cutlass.range_constexpr(teams.bit_length() - 1):
            per = cutlass.select_((per * _IN_FLIGHT <= more) & (per < teams), per * 2, per)
        for first in cutlass.range(head, end, teams // per, unroll=1):
            row = first + team // per
            if (team < teams) & (row < end):
                rO, row_max, row_sum = self.splits.add(
                    tensors, row, vector * 4, slot, rest, more, concurrent_of(c, scalars), team % per - 1, per
                )
                for x in cutlass.range_constexpr(4):
                    sO[x, vector, team] = rO[x]
                if vector == 0:
                    sStat[0, team] = row_max
                    sStat[1, team] = row_sum
            cute.arch.barrier()
            row = first + team
            if (team < teams // per) & (row < end):
                row_max, row_sum = Float32(-_INF), Float32(0.0)
                for t in cutlass.range(team * per, (team + 1) * per, unroll=1):
                    row_max = cute.arch.fmax(row_max, sStat[0, t])
                rSum = cute.make_rmem_tensor(cute.make_layout(4), Float32)
                rSum.fill(0.0)
                for t in cutlass.range(team * per, (team + 1) * per, unroll=1):
                    weight = exp2(sStat[0, t] - finite(row_max))
                    row_sum += weight * sStat[1, t]
                    for x in cutlass.range_constexpr(4):
                        rSum[x] = rSum[x] + weight * sO[x, vector, t]
                self.output.store(
                    tensors, scalars, tile, row, vector * 4, [rSum[x] for x in range(4)], row_max, row_sum
                )
            cute.arch.barrier()


def _teams(dim_v: int) -> int:
    return min(THREADS // (dim_v // 4), 16)
