"""How heads and rows of keys are spread over warps.

A warp has ``heads`` neighbouring heads of a token, or one row of keys. Of a head, and of a row of numbers, a lane has
vectors of eight channels, 32 lanes apart; of an encoded row cells of sixteen, as ``plan.py`` says.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import plan
from .rope_problem import VECTOR, RopeProblem

_WARPS = 4
# Up to so many heads of all tokens a multiprocessor each has a warp to itself, about as many as there is room for; of
# more, so many share one. On an H100 4096 tokens of 64 heads reach 99 % of a copy so; with four a warp 89 %.
_ALONE, _SHARE = 32, 2
_SPREAD = 4  # warps of a multiprocessor up to which each is a CTA of its own, so that they spread over many


@dataclass(frozen=True)
class Config:
    """``q``, ``kv`` and ``angles`` elements are loaded at once, ``numbers`` are stored at once of a row of numbers; the
    parts of an encoded row go in pieces of ``codes`` and ``rope`` bytes."""

    warps: int
    heads: int
    q: int = 1
    kv: int = 1
    angles: int = 1
    numbers: int = 1
    codes: int = 1
    rope: int = 1


def vectors(head_dim: int) -> int:
    """Of a head in a lane."""
    return -(-head_dim // (plan.LANES * VECTOR))


def groups(p: RopeProblem, heads: int) -> int:
    """Of so many heads in a token."""
    return -(-p.heads // heads)


def spread(p: RopeProblem, sms: int) -> Config:
    """Where nothing is known of addresses."""
    heads = 1 if p.keys.rows * p.heads <= _ALONE * sms or p.heads < _SHARE else _SHARE
    warps = p.keys.rows * (groups(p, heads) + 1)
    return Config(1 if warps <= _SPREAD * sms else _WARPS, heads)


def wide(p: RopeProblem, sms: int) -> Config:
    """Where tensors begin at multiples of 16 bytes, or of what their strides allow (``alignments``)."""
    c, k = spread(p, sms), p.keys
    q, kv = (_most(k.dtype.itemsize, *steps) for steps in (p.q, (k.step,)))
    angles = min(VECTOR // 2, _most(p.angle_dtype.itemsize, *p.angles))
    if k.row.plain:
        numbers = _most(k.cache_dtype.itemsize, k.cache_step)
        return Config(c.warps, c.heads, q, kv, angles, numbers)
    pieces = plan.encoded(k.row, kv, plan.align(k), k.rows, sms)
    return Config(c.warps, c.heads, q, kv, angles, codes=pieces.codes, rope=pieces.rope)


def _most(itemsize: int, *steps: int) -> int:
    """Elements of a vector, whatever multiples of ``steps`` it begins at: 16 bytes at most."""
    return min(VECTOR, 16 // itemsize, *(step & -step for step in steps if step))


def alignments(p: RopeProblem, c: Config) -> tuple[int, ...]:
    """Bytes at multiples of which q, kv, the cache and the angles begin, for ``wide``."""
    k = p.keys
    cache = c.numbers * k.cache_dtype.itemsize if k.row.plain else plan.align(k)
    return c.q * k.dtype.itemsize, c.kv * k.dtype.itemsize, cache, c.angles * p.angle_dtype.itemsize
