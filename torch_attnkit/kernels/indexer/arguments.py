"""Kernel arguments that do not go by TMA, and the lookup of a key, dense or in pages."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from torch_attnkit.cuda.ring import Fixed


class Tensors(Fixed):
    """Tensors of a launch."""

    def __init__(self, *tensors: Any):
        (self.mK, self.mWeight, self.mLength, self.mIds, self.mTable, self.mQScale, self.mKScale, self.mScores) = (
            tensors
        )


@cute.jit
def find(paged: cutlass.Constexpr, t: Tensors, request: Int32, row: Int32, longest: Int32):
    """(request or page, entry in it, validity) of a key; keys from ``longest`` on are invalid. Block tables are
    untrusted: invalid pages are never read."""
    valid = row < longest
    page, entry = request, row
    if const_expr(paged):
        size = Int32(t.mK.shape[1])
        page, entry = Int32(0), row % size
        if valid:
            page = Int32(t.mTable[request, row // size])
            valid = (page >= 0) & (page < t.mK.shape[0])
    return page, entry, valid
