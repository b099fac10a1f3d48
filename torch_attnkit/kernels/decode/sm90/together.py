"""The epilogue of blocks that all run at once: the splits of a group are joined by the blocks that brought them.

    each block    its splits into the workspace, and counts itself with those of the same group
    at its end    waits until all of them have come -> joins its share of the rows

No second launch waits for this one to end, and no block joins what others brought while these are idle. Nobody waits
before it has brought all that it has to bring, so whoever runs ends; a block that waits too long, because others do not
run yet, gives up, and then the last to come joins all. Splits are added in the order of their keys, whoever does it.
Imports cutlass.
"""

from __future__ import annotations

from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from torch_attnkit.cuda import memory_ops
from torch_attnkit.cuda import warp_ops as op

from ..arguments import Scalars, Tensors
from ..combine import AT_ONCE, THREADS, Combine, Config, teams_of
from ..schedule import Partition, WorkTile
from .config import COUNTERS

GAVE_UP = 1 << 16  # in the first of them, a block that waits no longer
PATIENCE = 1 << 12  # looks at it, each the way to the second-level cache and back: milliseconds


class Pending(IntEnum):
    """The words of shared memory by which a block knows a group to which it has brought a split."""

    BLOCKS = 0  # that bring one; 0: there is no such group
    CAME = 1  # before this block, as many of them, and who gave up
    FIRST = 2  # block of them
    EARLY = 3  # whether that had another work tile before
    B = 4
    HEAD = 5
    HEADS = 6
    SHARE = 7  # of the rows, which this block joins: one of as many as blocks, or all, or none


NONE = -1
ALL = -2


class Together(Combine):
    """In place of ``Combine``, for a kernel of as many threads as its second kernel has."""

    def __init__(self, config: Config):
        super().__init__(config)
        assert config.threads == THREADS

    def _pending(self, shared: Int32, which: Int32 | int) -> cute.Tensor:
        at = self.c.shared.pending.at(shared) + which * (4 * len(Pending))
        return cute.make_tensor(
            cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=16), cute.make_layout(len(Pending))
        )

    @cute.jit
    def begin(self, shared: Int32):
        """Before a block's first work tile; no group waits for it."""
        for which in cutlass.range_constexpr(2):
            sPending = self._pending(shared, which)
            if cute.arch.thread_idx()[0] == 0:
                sPending[Pending.BLOCKS] = Int32(0)

    @cute.jit
    def join_splits(
        self, tensors: Tensors, scalars: Scalars, cut: Partition, tile: WorkTile, shared: Int32, start: Int32,
        tiles: Int32,
    ):  # fmt: skip
        """Count this block, whose split of the group with units [start, start + tiles) is in the workspace. A block
        that begins a group has its splits in the odd slots of the workspace, and of these words."""
        first_block, last_block = cut.owner(start), cut.owner(start + tiles - 1)
        abreast = self._abreast(scalars)
        block = first_block * abreast + cute.arch.block_idx()[0] % abreast
        # ``finish`` ended with a barrier, which orders the block's stores before the release of this addition.
        if cute.arch.thread_idx()[0] == 0:
            before = cutlass.select_(cut.start(first_block) == start, Int32(0), Int32(1))
            mine = cutlass.select_(cute.arch.block_idx()[0] == block, before, Int32(0))
            sPending = self._pending(shared, mine)
            sPending[Pending.BLOCKS] = last_block - first_block + 1
            sPending[Pending.CAME] = op.add_acq_rel(self._counter(tensors, block), Int32(1))
            sPending[Pending.FIRST] = block
            sPending[Pending.EARLY] = before
            sPending[Pending.B] = tile.b
            sPending[Pending.HEAD] = tile.head
            sPending[Pending.HEADS] = tile.heads

    @cute.jit
    def end(self, tensors: Tensors, scalars: Scalars, shared: Int32):
        """Behind a block's last work tile: its shares of what is pending."""
        cute.arch.barrier()
        for which in cutlass.range_constexpr(2):
            sPending = self._pending(shared, which)
            if sPending[Pending.BLOCKS] > 0:
                left = Int32(0)
                if cute.arch.thread_idx()[0] == 0:
                    sPending[Pending.SHARE] = self._wait(tensors, sPending)
                    left = op.add_acq_rel(self._counter(tensors, sPending[Pending.FIRST]) + 4, Int32(1))
                cute.arch.barrier()
                self._join(tensors, scalars, shared, sPending)
                if cute.arch.thread_idx()[0] == 0:
                    if left == sPending[Pending.BLOCKS] - 1:  # nobody will look at the counters any more
                        for i in cutlass.range_constexpr(COUNTERS):
                            tensors.count[sPending[Pending.FIRST] * COUNTERS + i] = Int32(0)

    def _counter(self, tensors: Tensors, block: Int32) -> Int64:
        return tensors.count.iterator.toint() + Int64(block) * (4 * COUNTERS)

    @cute.jit
    def _wait(self, tensors: Tensors, sPending: cute.Tensor):
        """One thread: until all of a group have come; which share of the rows is this block's."""
        at, blocks, came = self._counter(tensors, sPending[Pending.FIRST]), sPending[Pending.BLOCKS], sPending[Pending.CAME]
        share = came % GAVE_UP
        seen = came + 1
        if share == blocks - 1:
            if came >= GAVE_UP:
                share = Int32(ALL)
        else:
            looks = Int32(0)
            while (seen % GAVE_UP < blocks) & (share != NONE):
                seen = memory_ops.load_acquire(at)
                looks += 1
                if (looks >= PATIENCE) & (seen % GAVE_UP < blocks):
                    # Whoever comes last learns of it, or all have come meanwhile.
                    if memory_ops.swap_if(at, seen, seen + GAVE_UP) == seen:
                        share = Int32(NONE)
            if seen >= GAVE_UP:
                share = Int32(NONE)
        return share

    @cute.jit
    def _join(self, tensors: Tensors, scalars: Scalars, shared: Int32, sPending: cute.Tensor):
        """A share of a group's rows, from the splits in the workspace to the result."""
        vectors, many = const_expr(self.c.dim_v // 4), const_expr(teams_of(self.c.dim_v))
        share, blocks, heads = sPending[Pending.SHARE], sPending[Pending.BLOCKS], sPending[Pending.HEADS]
        block, abreast = sPending[Pending.FIRST], self._abreast(scalars)
        tile = WorkTile(sPending[Pending.B], Int32(0), sPending[Pending.HEAD], heads, Int32(0), Int32(0))
        slot, rest = block * 2 + sPending[Pending.EARLY], (block + abreast) * 2
        if blocks <= AT_ONCE:
            begin, end = self._share(share, blocks, heads * vectors)
            for index in cutlass.range(begin + cute.arch.thread_idx()[0], end, THREADS, unroll=1):
                head, column = index // vectors, index % vectors * 4
                rO, row_max, row_sum = self.splits.add(
                    tensors, head, column, slot, rest, blocks - 1, abreast, Int32(-1), 1
                )
                self.output.store(tensors, scalars, tile, head, column, [rO[x] for x in range(4)], row_max, row_sum)
        else:
            begin, end = self._share(share, blocks, heads)
            smem = cute.make_ptr(cutlass.Float32, shared, cute.AddressSpace.smem, assumed_align=16)
            sO = cute.make_tensor(smem, cute.make_layout((4, vectors, many)))
            sStat = cute.make_tensor(smem + 4 * vectors * many, cute.make_layout((2, many)))
            self._heads_by_teams(tensors, scalars, tile, begin, end, slot, rest, blocks - 1, sO, sStat)

    def _share(self, share: Int32, blocks: Int32, count: Int32) -> tuple[Int32, Int32]:
        """Which of ``count`` things this block joins."""
        begin, end = share * count // blocks, (share + 1) * count // blocks
        none = cutlass.select_(share == ALL, count, Int32(0))
        return cutlass.select_(share < 0, Int32(0), begin), cutlass.select_(share < 0, none, end)
