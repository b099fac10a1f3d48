"""How a router spreads a row of logits over a warp.

A warp has a row, a lane ``per_lane`` experts that follow one another, in vectors of ``width``. What it costs is
instructions: each lane sorts the keys of its experts once, then K rounds find the largest of 32 heads and pop it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

LANES = 32
_MOST_PER_LANE = 32  # keys of a lane that registers hold, twice: as loaded, and sorted
_MOST_ROUNDS = 16  # rounds that are worth unrolling; no model in use routes to more experts
_WARPS = 4
_SPREAD = 16  # rows of a multiprocessor up to which every warp is a CTA of its own, and may have 64 registers


@dataclass(frozen=True)
class Config:
    """``per_lane`` 0 means that the row does not fit into registers, or K is large: it is read once a round."""

    experts: int
    topk: int
    width: int
    per_lane: int
    warps: int

    @property
    def depth(self) -> int:
        """Sorted keys that a lane keeps: no more can be chosen."""
        return min(self.topk, self.per_lane)

    @property
    def even(self) -> bool:
        """Whether every lane has all of its experts."""
        return self.per_lane * LANES == self.experts


def configure(experts: int, topk: int, rows: int, widest: int, sms: int) -> Config:
    """The spread of a row whose sizes and strides allow vectors of up to ``widest`` elements."""
    warps = 1 if rows <= _SPREAD * sms else _WARPS
    spreads = []
    for width in (w for w in (8, 4, 2, 1) if w <= widest and experts % w == 0):
        vectors = -(-experts // (LANES * width))
        spreads.append((vectors * width + vectors, width, vectors * width))  # keys and loads; the first of equals wins
    _, width, per_lane = min(spreads, key=lambda spread: spread[0])
    if per_lane > _MOST_PER_LANE or topk > _MOST_ROUNDS:
        return Config(experts, topk, 1, 0, warps)
    return Config(experts, topk, width, per_lane, warps)


@functools.cache
def sorting_network(count: int, depth: int) -> tuple[tuple[int, int], ...]:
    """Pairs (a, b), in order: with the larger of each put at a, the ``depth`` largest of ``count`` come first, sorted.

    Batcher's odd-even merge sort (Knuth, volume 3, 5.3.4) of the next power of two, without what never matters:
    pairs with a place past the end, where minus infinity would stay, and pairs whose outcome no later pair looks at.
    """
    size = 1 << (count - 1).bit_length()
    pairs = []
    p = 1
    while p < size:
        k = p
        while k >= 1:
            for j in range(k % p, size - k, 2 * k):
                for i in range(min(k, size - j - k)):
                    if (i + j) // (2 * p) == (i + j + k) // (2 * p) and i + j + k < count:
                        pairs.append((i + j, i + j + k))
            k //= 2
        p *= 2
    wanted, kept = set(range(depth)), []
    for a, b in reversed(pairs):
        if a in wanted or b in wanted:
            wanted |= {a, b}
            kept.append((a, b))
    return tuple(reversed(kept))
