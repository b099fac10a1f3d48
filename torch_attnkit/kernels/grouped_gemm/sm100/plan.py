"""Tile shapes, clusters, grids and workspace of the routed experts on Blackwell."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_attnkit.core import invariance
from torch_attnkit.core.spec import short

from ..problem import BLOCK, SPAN, Problem, Weights, experts_compiled
from .config import (
    BITS,
    FEW_TOKENS,
    MOST_ROW_TILES,
    NEIGHBOURS,
    PAIR,
    ROW_ALIGNMENT,
    ROW_BYTES,
    TOKENS,
    UNPACKED_ALIGNMENT,
    WEIGHT_ROWS,
    QuantizedRow,
    bf16_parts,
    by_scale,
    tag_bytes,
)

_FEW = 16  # tokens of an expert up to which they are the columns of products, beside the rows of weights
_MANY = 64  # tokens of an expert from which on work tiles have two row tiles
_PAIRS = 256  # and from which on pairs of CTAs multiply them: fewer leave lanes of the pair empty
_PREPARE_UNITS = 256  # of 32 elements, that a block of the first launch has at least


@dataclass(frozen=True)
class Plan:
    """As ``launch.py`` asks. x and h are tensors of 16-bit elements, whatever their rows hold."""

    experts: int  # at least so many
    tiles: int  # at most, of tokens
    blocks: tuple[int, int, int]  # of the launches that sort, of the first and of the second GEMM
    counters: tuple[int, int]
    x_rows: tuple[int, int]
    h_rows: tuple[int, int]
    scale_vectors: tuple[int, int]
    code_alignment: int = ROW_ALIGNMENT
    columns: tuple[int, int, int] = (TOKENS,) * 3  # of a work tile; of those of neighbours, of both GEMMs
    row_warps: tuple[int, int] = (WEIGHT_ROWS // 16,) * 2  # of both, those of neighbours together
    by_warp: bool = False
    token_widths: tuple[int, ...] = ()
    group: int = 0

    @property
    def scale_alignments(self) -> tuple[int, int]:
        return self.scale_vectors


def plan(problem: Problem, sms: int) -> Plan:
    p = problem
    packed = _by_scale(p)
    chosen = packed and not invariance.is_on()  # by how many tokens there are
    row_tiles = 2 if chosen and p.slots >= _MANY * p.experts else 1
    ctas = PAIR if chosen and p.slots >= _PAIRS * p.experts and sms >= PAIR else 1
    few = chosen and p.slots <= _FEW * p.experts
    columns = FEW_TOKENS if few else ctas * TOKENS
    some = min(p.experts, p.slots)  # experts that have tokens, of which one is a tile, too
    tiles = (p.slots - some) // columns + some
    groups = [-(-w.rows // (WEIGHT_ROWS * row_tiles)) for w in (p.up, p.down)]  # of row tiles
    may = row_tiles == MOST_ROW_TILES and sms >= ctas * NEIGHBOURS
    several = p.slots >= NEIGHBOURS * columns * p.experts  # tiles of tokens an expert
    # Of neighbours either has other rows of weights, or other tokens.
    other_rows = [NEIGHBOURS if may and n % NEIGHBOURS == 0 else 1 for n in groups]
    other_tokens = [NEIGHBOURS if may and several and rows == 1 else 1 for rows in other_rows]
    launched = [
        _blocks(sms, ctas * a * b, -(-tiles // b) * (n // a))
        for n, a, b in zip(groups, other_rows, other_tokens, strict=True)
    ]
    spans = p.tokens * -(-p.hidden // 32)
    if packed:
        rows = [QuantizedRow(w.columns, p.activations).nbytes // 2 for w in (p.up, p.down)]
    else:
        rows = [bf16_parts(short(p.dtype), p.activations) * w.columns for w in (p.up, p.down)]
    return Plan(
        experts=experts_compiled(p.experts),
        tiles=tiles,
        blocks=(min(sms, -(-spans // _PREPARE_UNITS)), *launched),
        counters=(1, 3 + p.experts),
        x_rows=(p.slots, rows[0]),
        h_rows=(p.slots, rows[1] + tag_bytes(p.hidden, row_tiles) // 2),
        scale_vectors=(_vector(p, p.up), _vector(p, p.down)),
        code_alignment=UNPACKED_ALIGNMENT if packed and p.activations == "mxfp8" else ROW_ALIGNMENT,
        columns=(columns, *(columns * n for n in other_tokens)),
        row_warps=tuple(WEIGHT_ROWS * row_tiles * n // 16 for n in other_rows),
    )


def _blocks(sms: int, cluster: int, work_tiles: int) -> int:
    """CTAs are persistent, so all clusters have to run at once. Two CTAs always find neighbouring SMs, of four not all
    do: a B200 has groups of SMs that four does not divide. How many is not known; an eighth is left."""
    most = sms // cluster if cluster <= 2 else max(sms * 7 // 8 // cluster, 1)
    return cluster * min(most, max(work_tiles, 1))


def _by_scale(p: Problem) -> bool:
    """8-bit activations if TMA unpacks weights, too: it takes 128 elements at a time."""
    if p.activations != "mxfp8":
        return by_scale(p.format, p.activations)
    fits = all(w.columns % 128 == w.row % 32 == w.expert % 32 == 0 for w in (p.up, p.down))
    return fits and by_scale(p.format, p.activations)


def _vector(p: Problem, weights: Weights) -> int:
    """Bytes of scales that start and end where a load of so many can."""
    steps = weights.scale_row, weights.scale_expert
    if p.scale_layout != "linear":
        return math.gcd(4, *steps)
    elements = ROW_BYTES * 8 // BITS[p.activations] if _by_scale(p) else SPAN
    return math.gcd(elements // BLOCK[p.format], weights.columns // BLOCK[p.format], *steps)
