"""How rows of a cache, heads and tokens are spread over warps, and how wide their vectors are.

A warp has a row, or ``heads`` neighbouring heads of a token. Of an encoded row a lane has a cell of ``CELL`` channels:
a block of NVFP4, half of one of MXFP4, a quarter of one of FP8; RoPE channels start at a cell, and a warp covers 512
channels at a time. Of a dense row it has vectors, 32 lanes apart; of a head vectors of 8 channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .problem import VECTOR, PagedProblem, Problem, RopeProblem, Row

CELL = 16
LANES = 32
_VECTOR = 16  # bytes of the widest loads and stores
_VECTORS = 4  # of a lane in flight
_WARPS = 4
MOST_PAGED_THREADS = 256
_SPREAD = 4  # warps per SM up to which CTAs have one warp, so that few rows spread over all SMs


@dataclass(frozen=True)
class Config:
    """``width``: elements of a vector outside the cache; parts of an encoded row are moved ``codes`` and ``rope`` bytes
    at a time."""

    warps: int
    width: int
    vectors: int = 1
    codes: int = 1
    rope: int = 1


def _common(*sizes: int) -> int:
    """Largest power of two that divides all sizes, up to a vector."""
    every = math.gcd(_VECTOR, *sizes)
    return every & -every


def width(p: Problem) -> int:
    """Elements of the widest vectors that sizes and strides of dense rows allow, 16 bytes on at least one side."""
    inside = (p.cache_step, p.cache_dtype.itemsize) if p.row.plain else (0, p.dtype.itemsize)
    return min(_common(p.row.head_dim, p.step, inside[0]), _VECTOR // min(p.dtype.itemsize, inside[1]))


def vector_bytes(width: int, dtype: torch.dtype) -> int:
    """Alignment of vectors of a dtype."""
    return min(_VECTOR, width * dtype.itemsize)


def align(p: Problem) -> int:
    """Alignment of encoded rows, if the first is aligned."""
    return _common(p.cache_step)


def _warps(rows: int, sms: int) -> int:
    return 1 if rows <= _SPREAD * sms else _WARPS


def plain(width: int, head_dim: int, rows: int, sms: int) -> Config:
    """For dense rows whose addresses allow vectors of ``width`` elements."""
    return Config(_warps(rows, sms), width, min(_VECTORS, -(-head_dim // (LANES * width))))


def encoded(row: Row, width: int, align: int, rows: int, sms: int) -> Config:
    """For encoded rows aligned to ``align`` bytes."""
    codes = CELL if row.format == "fp8" else CELL // 2  # bytes of a cell
    rope = _common(align, row.layout.rope, 2 * row.rope_dim)
    return Config(_warps(rows, sms), width, codes=_common(align, codes), rope=rope)


# Heads per SM up to which each has a warp of its own, about the SM's capacity; beyond, heads of a warp. On an H100 4096
# tokens of 64 heads reach 99 % of a copy with two heads a warp, 89 % with four.
_ALONE, _SHARE = 32, 2


@dataclass(frozen=True)
class RopeConfig:
    """Elements of a vector of ``q``, ``kv``, ``angles`` and dense cache rows (``dense``); parts of an encoded row are
    moved ``codes`` and ``rope`` bytes at a time."""

    warps: int
    heads: int
    q: int = 1
    kv: int = 1
    angles: int = 1
    dense: int = 1
    codes: int = 1
    rope: int = 1


def head_vectors(head_dim: int) -> int:
    """Vectors of a head per lane."""
    return -(-head_dim // (LANES * VECTOR))


def head_groups(p: RopeProblem, heads: int) -> int:
    """Groups of ``heads`` heads in a token."""
    return -(-p.heads // heads)


def _rope_warps(p: RopeProblem, sms: int) -> RopeConfig:
    """Warps of a CTA and heads of a warp, with vectors of one element."""
    heads = 1 if p.keys.rows * p.heads <= _ALONE * sms or p.heads < _SHARE else _SHARE
    warps = p.keys.rows * (head_groups(p, heads) + 1)
    return RopeConfig(1 if warps <= _SPREAD * sms else _WARPS, heads)


def rope(p: RopeProblem, sms: int) -> RopeConfig:
    """For tensors aligned to ``alignments``."""
    c, k = _rope_warps(p, sms), p.keys
    q, kv = (_most(k.dtype.itemsize, *steps) for steps in (p.q, (k.step,)))
    angles = min(VECTOR // 2, _most(p.angle_dtype.itemsize, *p.angles))
    if k.row.plain:
        dense = _most(k.cache_dtype.itemsize, k.cache_step)
        return RopeConfig(c.warps, c.heads, q, kv, angles, dense)
    pieces = encoded(k.row, kv, align(k), k.rows, sms)
    return RopeConfig(c.warps, c.heads, q, kv, angles, codes=pieces.codes, rope=pieces.rope)


def _most(itemsize: int, *steps: int) -> int:
    """Elements of a vector of at most 16 bytes that ``steps`` keep aligned."""
    return min(VECTOR, 16 // itemsize, *(step & -step for step in steps if step))


def alignments(p: RopeProblem, c: RopeConfig) -> tuple[int, ...]:
    """Alignment in bytes of q, kv, the cache and the angles that ``rope`` assumes."""
    k = p.keys
    cache = c.dense * k.cache_dtype.itemsize if k.row.plain else align(k)
    return c.q * k.dtype.itemsize, c.kv * k.dtype.itemsize, cache, c.angles * p.angle_dtype.itemsize


def paged_width(p: PagedProblem) -> int:
    """Elements of the widest vectors that sizes and strides of keys and values allow, 16 bytes of a token at most."""
    steps = (step for side in p.sides for step in (side.dim, *side.steps, *side.cache_steps))
    every = math.gcd(_VECTOR // p.dtype.itemsize, *steps)
    return every & -every
