"""How rows are spread over warps.

A warp has a row. Of an encoded row a lane has a cell of ``CELL`` neighbouring channels, which is a whole block of
NVFP4, half of one of MXFP4 and a quarter of one of FP8: the RoPE channels start at the border of a cell, and 512
channels are one turn of the warp. Of a row of numbers it has ``vectors`` vectors a turn, 32 lanes apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .problem import Problem, Row

CELL = 16
LANES = 32
_VECTOR = 16  # bytes of the widest loads and stores
_VECTORS = 4  # of a lane that are on their way at once
_WARPS = 4
_SPREAD = 4  # rows of a multiprocessor up to which every warp is a CTA of its own, so that few rows spread over many


@dataclass(frozen=True)
class Config:
    """``width`` elements are loaded or stored at once outside the cache; the parts of an encoded row go in pieces of
    ``codes`` and ``rope`` bytes."""

    warps: int
    width: int
    vectors: int = 1
    codes: int = 1
    rope: int = 1


def _common(*sizes: int) -> int:
    """The largest power of two up to a vector that divides all sizes."""
    every = math.gcd(_VECTOR, *sizes)
    return every & -every


def width(p: Problem) -> int:
    """Elements of the widest vectors that sizes and strides of rows of numbers allow, at 16 bytes at least one side."""
    inside = (p.cache_step, p.cache_dtype.itemsize) if p.row.plain else (0, p.dtype.itemsize)
    return min(_common(p.row.head_dim, p.step, inside[0]), _VECTOR // min(p.dtype.itemsize, inside[1]))


def vector_bytes(width: int, dtype: torch.dtype) -> int:
    """The bytes at multiples of which vectors of a dtype lie."""
    return min(_VECTOR, width * dtype.itemsize)


def align(p: Problem) -> int:
    """The bytes at multiples of which encoded rows start, if the first does."""
    return _common(p.cache_step)


def _warps(rows: int, sms: int) -> int:
    return 1 if rows <= _SPREAD * sms else _WARPS


def plain(width: int, head_dim: int, rows: int, sms: int) -> Config:
    """For rows of numbers whose addresses allow vectors of ``width`` elements."""
    return Config(_warps(rows, sms), width, min(_VECTORS, -(-head_dim // (LANES * width))))


def encoded(row: Row, width: int, align: int, rows: int, sms: int) -> Config:
    """For encoded rows that start at multiples of ``align`` bytes."""
    codes = CELL if row.format == "fp8" else CELL // 2  # bytes of a cell
    rope = _common(align, row.layout.rope, 2 * row.rope_dim)
    return Config(_warps(rows, sms), width, codes=_common(align, codes), rope=rope)
