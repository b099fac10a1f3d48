"""How blocks that brought parts of one result join them: each a share, once all have come.

Nobody waits before it has brought all that it has to bring, so whoever runs ends; a block that waits too long, because
others do not run yet, gives up, and then the last to come has all shares. Two counters of device memory for each
result, zero before and after: blocks that have come (and who gave up), and blocks that have left. Imports cutlass.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from . import joining, memory_ops
from . import warp_ops as op
from .ring import Fixed

COUNTERS = 2  # of a result
NONE, ALL = -1, -2  # shares
_GAVE_UP = 1 << 16  # in the first counter, for a block that waits no longer
_PATIENCE = 1 << 12  # looks at it, each the way to the second-level cache and back: milliseconds in all


class Word(IntEnum):
    """The words of shared memory by which a block knows a result that it brought a part of."""

    BLOCKS = 0  # that bring one; 0: there is no such result
    CAME = 1  # before this block, so many, and who gave up
    FIRST = 2  # block of them
    NOTE = 3  # whatever else the kernel wants to know, ``NOTES`` words
    SHARE = 7  # of this block: one of as many as blocks, ``NONE`` or ``ALL``


NOTES = 4
_WORDS = 8  # of a result


class Gathering(Fixed):
    """The results to which this block brought a part, at most two. ``sWords``: 16 words of shared memory, ``count`` the
    address of the counters, ``COUNTERS`` for each first block. One thread calls ``begin``, ``bring`` and ``leave``, all
    of a barrier's threads call what lies between."""

    def __init__(self, sWords: cute.Tensor, count: Int64):
        self.sWords, self.count = sWords, count

    def _at(self, which: Int32 | int, word: int) -> Int32:
        return which * _WORDS + int(word)

    def begin(self) -> None:
        for which in range(2):
            self.sWords[self._at(which, Word.BLOCKS)] = Int32(0)

    def bring(self, which: Int32, blocks: Int32, first: Int32, notes: list[Int32]) -> None:
        """Count this block, whose part is in device memory: a barrier has ordered its stores before this addition."""
        came = op.add_acq_rel(self._counters(first), Int32(1))
        for word, value in ((Word.BLOCKS, blocks), (Word.CAME, came), (Word.FIRST, first)):
            self.sWords[self._at(which, word)] = value
        for i, value in enumerate(notes):
            self.sWords[self._at(which, Word.NOTE + i)] = value

    def read(self, which: Int32, word: int) -> Int32:
        return self.sWords[self._at(which, word)]

    @cute.jit
    def wait(self, which: Int32):
        """One thread: until all parts have come; then which share is this block's stands in ``Word.SHARE``."""
        counters = self._counters(self.read(which, Word.FIRST))
        blocks, came = self.read(which, Word.BLOCKS), self.read(which, Word.CAME)
        share, seen, looks = came % _GAVE_UP, came + 1, Int32(0)
        if share == blocks - 1:
            if came >= _GAVE_UP:
                share = Int32(ALL)
        else:
            while (seen % _GAVE_UP < blocks) & (share != NONE):
                seen = memory_ops.load_acquire(counters)
                looks += 1
                if (looks >= _PATIENCE) & (seen % _GAVE_UP < blocks):
                    # Whoever comes last will know, unless all have come meanwhile.
                    if joining.swap_if(counters, seen, seen + _GAVE_UP) == seen:
                        share = Int32(NONE)
            if seen >= _GAVE_UP:
                share = Int32(NONE)
        self.sWords[self._at(which, Word.SHARE)] = share

    @cute.jit
    def shares(self, which: Int32, count: Int32):
        """This block's of ``count`` items: [begin, end), and how many a share has at most."""
        share, blocks = self.read(which, Word.SHARE), self.read(which, Word.BLOCKS)
        chunk = (count + blocks - 1) // blocks
        begin, end = share * chunk, cutlass.min(share * chunk + chunk, count)
        if share < 0:
            begin, end = Int32(0), cutlass.select_(share == ALL, count, Int32(0))
        return begin, end, chunk

    @cute.jit
    def leave(self, which: Int32):
        """After this block's share: the last to leave puts the counters back."""
        counters = self._counters(self.read(which, Word.FIRST))
        if joining.add_relaxed(counters + 4, Int32(1)) == self.read(which, Word.BLOCKS) - 1:
            for i in cutlass.range_constexpr(COUNTERS):
                joining.store_relaxed(counters + 4 * i, Int32(0))

    def _counters(self, first: Int32) -> Int64:
        return self.count + Int64(first) * (4 * COUNTERS)


def words(memory: Any) -> cute.Tensor:
    """Shared memory for ``Gathering``."""
    return memory.allocate_tensor(Int32, cute.make_layout(2 * _WORDS), 16)
