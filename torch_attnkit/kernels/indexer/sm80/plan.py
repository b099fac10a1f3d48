"""Launch planning of the indexer by ``mma.sync``: what its kernel accepts, and how a launch is cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..problem import Problem
from ..sm90.plan import columns, pitch, row_bytes, tokens_of_request

# Elements of a head by format. A quad of lanes loads 64 bytes of a key together: rows have a multiple of them, and of
# MXFP4, whose lanes have a block of 32 elements each, as many.
DIMS = {"none": (64, 128), "fp8": (64, 128), "mxfp4": (64,)}
ATOM, ATOMS = 16, 2  # keys of a product, and products of a warp that have each query as operand
GROUP = 64  # bytes of a row that a quad of lanes loads at once
CHUNK = 16  # bytes of these that a lane loads
COLUMN_TILE = 8  # heads of a product
# Tokens of a request up to which a CTA has 4 warps instead of 8, and the least ring: time goes into loads of keys
# then, of which several CTAs of a multiprocessor have more on their way.
FEW = 4
MANY_WARPS, FEW_WARPS = 8, 4
# Of the ring of queries: bytes, beside weights and lists of tokens in the 99 KB of a CTA, unless two stages need more.
_RING = 68 << 10
_LEAST_STAGES, _MOST_STAGES = 2, 4


@dataclass(frozen=True)
class Config:
    """``stored``: dtype of keys in memory, or "mxfp4"; ``dtype``: that of the products, in which queries come."""

    stored: str
    dtype: str
    weights: str
    heads: int
    dim: int
    warps: int
    stages: int
    ids: bool
    paged: bool
    q_scale: bool
    k_scale: bool
    load: int  # bytes of a load of keys

    @property
    def key_bytes(self) -> int:
        """Bytes of a key in memory."""
        return row_bytes(self.stored, self.dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of a head's query, and of a key as operand."""
        return row_bytes(self.dtype, self.dim)

    @property
    def expansion(self) -> int:
        """Bytes of an operand that a byte of a key becomes."""
        return self.row_bytes // self.key_bytes

    @property
    def columns(self) -> int:
        """MMA columns of a token."""
        return columns(self.heads)

    @property
    def pitch(self) -> int:
        return pitch(self.columns)

    @property
    def warp_keys(self) -> int:
        return ATOM * ATOMS

    @property
    def keys(self) -> int:
        """Keys of a CTA."""
        return self.warps * self.warp_keys

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def stage_bytes(self) -> int:
        """Bytes of a token's queries."""
        return self.columns * self.row_bytes


def product_dtype(problem: Problem, e4m3: bool) -> torch.dtype:
    """dtype of the products, which holds every value of the format; ``e4m3``: whether the target has E4M3."""
    if problem.format == "mxfp4":
        return torch.bfloat16
    return problem.dtype if e4m3 or problem.format != "fp8" else torch.float16


def cut(problem: Problem, itemsize: int) -> tuple[int, int]:
    """(warps, stages of the ring of queries); ``itemsize``: bytes of an element in products."""
    p = problem
    if (p.tokens if p.ids else tokens_of_request(p)) <= FEW:
        return FEW_WARPS, _LEAST_STAGES
    fit = _RING // (columns(p.heads) * p.dim * itemsize)
    return MANY_WARPS, max(_LEAST_STAGES, min(_MOST_STAGES, fit))
