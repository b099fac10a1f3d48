"""The epilogue of blocks that all run at once: the splits of a group are joined by the blocks that brought them.

    each block    results from registers: a whole group's to the output, a split's to the workspace, in the order in
                  which lanes have them; then it counts itself with the others of the same group
    at its end    waits until all of them have come -> joins its share of the group

No second launch waits for this one to end, and no block joins what others brought while these are idle. Nobody waits
before it has brought all that it has to bring, so whoever runs ends; a block that waits too long, because others do not
run yet, gives up, and then the last to come joins all. Splits are added in the same order, whoever does it. Imports
cutlass.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import memory_ops
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import finite
from torch_attnkit.cuda.warp_ops import exp2

from ...scores import LOG2_E
from ..arguments import Scalars, Tensors, out_dtype
from ..config import itemsize
from ..schedule import Partition, WorkTile
from . import products
from .config import COUNTERS, MlaConfig
from .config import THREADS as WARPGROUP

_GAVE_UP = 1 << 16  # in the first counter, for a block that waits no longer
_PATIENCE = 1 << 12  # looks at it, each the way to the second-level cache and back: milliseconds in all
_NONE, _ALL = -1, -2  # shares of a group
_AT_ONCE = 8  # splits that a thread has on the way
_VECTOR = 16  # bytes
REGISTERS = 128  # of a thread: the mean, which all have while they join
_INF = float("inf")
_LN_2 = 1 / LOG2_E


class Pending(IntEnum):
    """The words of shared memory by which a block knows a group to which it has brought a split."""

    BLOCKS = 0  # that bring one; 0: there is no such group
    CAME = 1  # before this block, so many, and who gave up
    FIRST = 2  # block of them
    EARLY = 3  # whether that had another work tile before
    B = 4
    HEAD = 5
    HEADS = 6
    SHARE = 7  # which this block joins, one of as many as blocks


class Part(NamedTuple):
    """Four numbers of a result, as a lane of ``wgmma`` has them: two neighbouring columns of a row, and of the row 8
    below it; and what belongs to these rows."""

    columns: cute.Tensor  # (4)
    maxima: cute.Tensor  # (2)
    sums: cute.Tensor  # (2)


class Together:
    """Of a kernel whose value warpgroups have a half of the columns each, for 64 heads."""

    def __init__(self, config: Any, registers: int):
        self.c: MlaConfig = config
        self.registers = registers  # of a thread of the role

    def begin(self, shared: Int32) -> None:
        for which in range(2):
            self._no_group(self._pending(shared, which))

    @cute.jit
    def _no_group(self, sPending: cute.Tensor):
        if cute.arch.thread_idx()[0] == 0:
            sPending[Pending.BLOCKS] = Int32(0)

    @cute.jit
    def leave_columns(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, rO: cute.Tensor, sSums: cute.Tensor, thread: Int32,
        half: Int32,
    ):  # fmt: skip
        """A value warpgroup's half of the columns; of its warps those that have heads."""
        row, parts = products.first_row(thread), const_expr(cute.size(rO) // 4)
        if thread // 32 * 16 < tile.heads:
            if tile.slot < 0:
                scales = [
                    self._factor(tensors, scalars, tile, row + 8 * r, sSums[row + 8 * r, 0], sSums[row + 8 * r, 1])
                    for r in range(2)
                ]
                for j in cutlass.range_constexpr(parts):
                    values = [rO[4 * j + x] * scales[x // 2] for x in range(4)]
                    self._store(tensors, tile, row, (half * parts + j) * 8 + (thread & 3) * 2, values)
            else:
                at = self._split(tensors, tile.slot) + (half * (parts * WARPGROUP) + thread) * _VECTOR
                for j in cutlass.range_constexpr(parts):
                    op.store_4_floats(at + j * (WARPGROUP * _VECTOR), [rO[4 * j + x] for x in range(4)])

    @cute.jit
    def leave_sums(
        self, tensors: Tensors, tile: WorkTile, rMax: cute.Tensor, rSum: cute.Tensor, thread: Int32
    ):  # fmt: skip
        """A score warpgroup's maxima and sums, which its four lanes of a row all have."""
        row = products.first_row(thread)
        if (thread & 3) == 0:
            for r in cutlass.range_constexpr(2):
                if tile.slot < 0:
                    self._store_lse(tensors, tile, row + 8 * r, rMax[r], rSum[r])
                else:
                    at = self._split(tensors, tile.slot) + self.c.split.stat_at(row + 8 * r)
                    memory_ops.store_2_floats(at, [rMax[r], rSum[r]])

    def finish(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, shared: Int32, whole: Boolean, slot: Int32
    ) -> None:
        """The warpgroups left everything where it belongs."""

    @cute.jit
    def join_splits(
        self, tensors: Tensors, scalars: Scalars, cut: Partition, tile: WorkTile, shared: Int32, start: Int32,
        tiles: Int32,
    ):  # fmt: skip
        """Count this block, whose split of the group with units [start, start + tiles) is in the workspace."""
        first_block, last_block = cut.owner(start), cut.owner(start + tiles - 1)
        here = cute.arch.block_idx()[0]
        block = first_block * scalars.abreast + here % scalars.abreast
        early = cutlass.select_(cut.start(first_block) == start, Int32(0), Int32(1))
        # Of two splits of a block the second begins its group.
        sPending = self._pending(shared, cutlass.select_(here == block, early, Int32(0)))
        # A barrier has ordered the block's stores before the release of this addition.
        if cute.arch.thread_idx()[0] == 0:
            sPending[Pending.BLOCKS] = last_block - first_block + 1
            sPending[Pending.CAME] = op.add_acq_rel(self._counters(tensors, block), Int32(1))
            sPending[Pending.FIRST] = block
            sPending[Pending.EARLY] = early
            sPending[Pending.B] = tile.b
            sPending[Pending.HEAD] = tile.head
            sPending[Pending.HEADS] = tile.heads

    @cute.jit
    def end(self, tensors: Tensors, scalars: Scalars, shared: Int32):
        """Its shares of the groups to which the block brought splits."""
        if const_expr(self.registers > REGISTERS):
            cute.arch.setmaxregister_decrease(REGISTERS)
        cute.arch.barrier()  # before it all warps of the other role have taken theirs, and given them back
        if const_expr(self.registers < REGISTERS):
            cute.arch.setmaxregister_increase(REGISTERS)
        for which in cutlass.range(2, unroll=1):
            sPending = self._pending(shared, which)
            if sPending[Pending.BLOCKS] > 0:
                counters, left = self._counters(tensors, sPending[Pending.FIRST]), Int32(0)
                if cute.arch.thread_idx()[0] == 0:
                    sPending[Pending.SHARE] = self._wait(counters, sPending)
                    left = op.add_acq_rel(counters + 4, Int32(1))
                cute.arch.barrier()
                self._join(tensors, scalars, shared, sPending)
                if cute.arch.thread_idx()[0] == 0:
                    if left == sPending[Pending.BLOCKS] - 1:  # nobody looks at the counters any more
                        for i in cutlass.range_constexpr(COUNTERS):
                            tensors.count[sPending[Pending.FIRST] * COUNTERS + i] = Int32(0)

    def _pending(self, shared: Int32, which: Int32 | int) -> cute.Tensor:
        at = self.c.shared.pending.at(shared) + which * (4 * len(Pending))
        words = cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=16)
        return cute.make_tensor(words, cute.make_layout(len(Pending)))

    def _counters(self, tensors: Tensors, block: Int32) -> Int64:
        return tensors.count.iterator.toint() + Int64(block) * (4 * COUNTERS)

    def _split(self, tensors: Tensors, slot: Int32) -> Int64:
        return tensors.splits.iterator.toint() + Int64(slot) * self.c.split.nbytes

    @cute.jit
    def _wait(self, counters: Int64, sPending: cute.Tensor):
        """One thread: until all of a group have come; which share is this block's."""
        blocks, came = sPending[Pending.BLOCKS], sPending[Pending.CAME]
        share, seen, looks = came % _GAVE_UP, came + 1, Int32(0)
        if share == blocks - 1:
            if came >= _GAVE_UP:
                share = Int32(_ALL)
        else:
            while (seen % _GAVE_UP < blocks) & (share != _NONE):
                seen = memory_ops.load_acquire(counters)
                looks += 1
                if (looks >= _PATIENCE) & (seen % _GAVE_UP < blocks):
                    # Whoever comes last will know, unless all have come meanwhile.
                    if memory_ops.swap_if(counters, seen, seen + _GAVE_UP) == seen:
                        share = Int32(_NONE)
            if seen >= _GAVE_UP:
                share = Int32(_NONE)
        return share

    @cute.jit
    def _join(self, tensors: Tensors, scalars: Scalars, shared: Int32, sPending: cute.Tensor):
        """A share of a group, from the splits in the workspace to the result.

        A thread adds up a part of all splits; where these are many, several threads some of them each.
        """
        c = self.c
        share, blocks, heads = sPending[Pending.SHARE], sPending[Pending.BLOCKS], sPending[Pending.HEADS]
        tile = WorkTile(sPending[Pending.B], Int32(0), sPending[Pending.HEAD], heads, *[Int32(0)] * 3)
        lanes = (heads + 15) // 16 * 32  # of a warpgroup, that have heads
        count = const_expr(c.dim_v // 8) * lanes
        begin, end = share * count // blocks, (share + 1) * count // blocks
        if share < 0:
            begin, end = Int32(0), cutlass.select_(share == _ALL, count, Int32(0))
        thread, each = cute.arch.thread_idx()[0], Int32(1)
        for _ in cutlass.range_constexpr((c.threads // 32).bit_length() - 1):
            more = (each * _AT_ONCE < blocks) & (2 * each * (end - begin) <= c.threads)
            each = cutlass.select_(more, each * 2, each)
        together = c.threads // each
        team = thread // together
        for first in cutlass.range(begin, end, together, unroll=1):
            index = first + thread % together
            there = index < end
            index = cutlass.min(index, end - 1)
            lane, column = index % lanes, index // lanes
            row, part = products.first_row(lane), self._nothing()
            self._add(tensors, sPending, part, column * WARPGROUP + lane, row, team, each, blocks, scalars.abreast)
            if each > 1:
                self._add_teams(shared, part, thread, together, each)
            maxima, sums = [part.maxima[r] for r in range(2)], [part.sums[r] for r in range(2)]
            scales = [self._factor(tensors, scalars, tile, row + 8 * r, maxima[r], sums[r]) for r in range(2)]
            values = [part.columns[x] * scales[x // 2] for x in range(4)]
            if there & (team == 0):
                self._store(tensors, tile, row, column * 8 + (lane & 3) * 2, values)
            if there & (team == 0) & (column == 0) & ((lane & 3) == 0):
                for r in cutlass.range_constexpr(2):
                    self._store_lse(tensors, tile, row + 8 * r, maxima[r], sums[r])

    def _nothing(self) -> Part:
        part = Part(*(cute.make_rmem_tensor(n, Float32) for n in (4, 2, 2)))
        self._clear(part)
        return part

    def _clear(self, part: Part) -> None:
        part.columns.fill(0.0)
        part.maxima.fill(-_INF)
        part.sums.fill(0.0)

    @cute.jit
    def _add(
        self, tensors: Tensors, sPending: cute.Tensor, part: Part, vector: Int32, row: Int32, begin: Int32,
        step: Int32, splits: Int32, abreast: Int32,
    ):  # fmt: skip
        """Splits begin, begin + step ..., of which the first are on the way before one is used; beyond the last they
        repeat it."""
        block, early = sPending[Pending.FIRST], sPending[Pending.EARLY]
        for first in cutlass.range(begin, splits, _AT_ONCE * step, unroll=1):
            at = []
            for i in cutlass.range_constexpr(_AT_ONCE):
                n = cutlass.min(first + i * step, splits - 1)
                at.append(self._split(tensors, (block + n * abreast) * 2 + cutlass.select_(n == 0, early, Int32(0))))
            news = [op.load_4_floats(a + vector * _VECTOR) for a in at]
            stats = [[op.load_2_floats(a + self.c.split.stat_at(row + 8 * r)) for a in at] for r in range(2)]
            for r in cutlass.range_constexpr(2):
                known = [first + i * step < splits for i in range(_AT_ONCE)]
                maxima = [cutlass.select_(k, s[0], Float32(-_INF)) for k, s in zip(known, stats[r], strict=True)]
                columns = [new[2 * r : 2 * r + 2] for new in news]
                self._add_rows(part, r, maxima, [s[1] for s in stats[r]], columns)

    def _add_rows(self, part: Part, r: int, maxima: list, sums: list, columns: list) -> None:
        """Of one of the two rows: more maxima, sums, and pairs of columns; a maximum of -inf says that there is
        nothing, whatever stands beside it."""
        old = new = part.maxima[r]
        for m in maxima:
            new = cute.arch.fmax(new, m)
        weight = exp2(old - finite(new))
        total, pair = part.sums[r] * weight, [part.columns[2 * r + x] * weight for x in range(2)]
        for m, s, values in zip(maxima, sums, columns, strict=True):
            nothing, weight = m == -Float32.inf, exp2(m - finite(new))
            total += weight * cutlass.select_(nothing, Float32(0.0), s)
            pair = [pair[x] + weight * cutlass.select_(nothing, Float32(0.0), values[x]) for x in range(2)]
        part.maxima[r], part.sums[r] = new, total
        for x in range(2):
            part.columns[2 * r + x] = pair[x]

    @cute.jit
    def _add_teams(self, shared: Int32, part: Part, thread: Int32, together: Int32, each: Int32):
        """To a part that of others: ``each`` threads have some, ``together`` apart, and all of them add these up."""
        words = cute.make_ptr(Float32, shared, cute.AddressSpace.smem, assumed_align=16)
        sParts = cute.make_tensor(words, cute.make_layout((8, self.c.threads), stride=(self.c.threads, 1)))
        mine = [part.columns[x] for x in range(4)] + [t[r] for t in (part.maxima, part.sums) for r in range(2)]
        for x in cutlass.range_constexpr(8):
            sParts[x, thread] = mine[x]
        cute.arch.barrier()
        self._clear(part)
        for i in cutlass.range(each, unroll=1):
            at = i * together + thread % together
            for r in cutlass.range_constexpr(2):
                columns = [sParts[2 * r + x, at] for x in range(2)]
                self._add_rows(part, r, [sParts[4 + r, at]], [sParts[6 + r, at]], [columns])
        cute.arch.barrier()

    @cute.jit
    def _factor(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, row: Int32, row_max: Float32, row_sum: Float32
    ):
        """By which a row of numerators becomes a result: over its sum, to which the sink belongs."""
        denominator = row_sum
        if (scalars.has_sink != 0) & (row < tile.heads):
            denominator += exp2(tensors.sink[tile.head + row] * LOG2_E - finite(row_max))
        return cutlass.select_(row_sum == 0.0, Float32(0.0), cute.arch.rcp_approx(denominator))

    @cute.jit
    def _store(self, tensors: Tensors, tile: WorkTile, row: Int32, column: Int32, values: list[Float32]):
        """Two columns of a row and of the one 8 below it, as far as there are heads."""
        dtype = out_dtype(self.c.dtype)
        size = const_expr(itemsize(dtype))
        for r in cutlass.range_constexpr(2):
            if row + 8 * r < tile.heads:
                h = tile.head + row + 8 * r
                out = Int64(tensors.out.stride[0]) * tile.b + tensors.out.stride[1] * h + column
                word = op.pack(dtype, values[2 * r], values[2 * r + 1])
                memory_ops.store_word(tensors.out.iterator.toint() + out * size, word)

    @cute.jit
    def _store_lse(self, tensors: Tensors, tile: WorkTile, row: Int32, row_max: Float32, row_sum: Float32):
        if row < tile.heads:
            tensors.lse[tile.b, tile.head + row] = (row_max + op.log2(row_sum)) * _LN_2
