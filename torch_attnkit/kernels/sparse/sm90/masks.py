"""Scores of a tile of which some keys do not count."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .config import LOADERS

_INF = float("inf")


@cute.jit
def to_scores(config: cutlass.Constexpr, scale: Float32, mask: cute.Tensor, stage: Int32, rS: cute.Tensor):
    """Products to scores in powers of two, -inf where a key does not count: ``mask`` (stages, 4) has a bit for each."""
    for i in cutlass.range_constexpr(cute.size(rS)):
        rS[i] = rS[i] * scale
    words = [mask[stage, i] for i in range(LOADERS)]
    if (words[0] & words[1] & words[2] & words[3]) != const_expr((1 << config.keys // LOADERS) - 1):
        quad = cute.arch.lane_idx() & 3
        odd = (quad & 1) != 0
        # Of its two neighbouring columns, whether they count: bit 2 i for those of the i-th 8 columns.
        mine = [cutlass.select_(odd, words[b + 2], words[b]) >> (quad // 2) for b in range(2)]
        for i in cutlass.range_constexpr(cute.size(rS)):
            bit = mine[i % 2] & const_expr(1 << i // 4 * 2)
            rS[i] = cutlass.select_(bit != 0, rS[i], Float32(-_INF))
