"""Where a cache entry's key is, dense or in pages, among the tensors of a launch."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from torch_attnkit.cuda.ring import Fixed


class Tensors(Fixed):
    """The arguments of a kernel that do not go by TMA."""

    def __init__(self, *tensors: Any):
        (self.mK, self.mWeight, self.mLength, self.mIds, self.mTable, self.mQScale, self.mKScale, self.mScores) = (
            tensors
        )


@cute.jit
def find(paged: cutlass.Constexpr, t: Tensors, request: Int32, row: Int32, longest: Int32):
    """A request's or page's number, the entry in it, and whether the key may be looked at, as none from ``longest`` on:
    whatever a table holds, nothing outside the tensor is."""
    there = row < longest
    place, entry = request, row
    if const_expr(paged):
        size = Int32(t.mK.shape[1])
        place, entry = Int32(0), row % size
        if there:
            place = Int32(t.mTable[request, row // size])
            there = (place >= 0) & (place < t.mK.shape[0])
    return place, entry, there
