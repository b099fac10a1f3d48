"""How routed experts are cut on Blackwell. Imports no cutlass."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..problem import BLOCK, CONTIGUOUS, Problem, Weights
from .config import ROW_ALIGNMENT, STAGE, STEP, TOKENS, WEIGHT_ROWS, Rows

MOST_EXPERTS = 1 << 15  # whose counts one block keeps in shared memory
# Formats of weights by that of the tokens whose products with them the tensor cores know under both scales.
PRODUCTS = {"nvfp4": "nvfp4", "mxfp4": "mxfp4"}
_LEAST_EXPERTS = 1 << 10
_PREPARE_UNITS = 256  # of 32 numbers, that a block of the first launch has at least


@dataclass(frozen=True)
class Plan:
    """As ``launch.py`` asks. x and h are rows of bytes, whose tensors are of 16-bit numbers."""

    experts: int  # room for so many
    tiles: int  # at most, of tokens
    blocks: tuple[int, int, int]  # of the launches that sort, of the first and of the second product
    counters: tuple[int, int]
    x_rows: tuple[int, int]
    h_rows: tuple[int, int]
    scale_vectors: tuple[int, int]
    code_alignment: int = ROW_ALIGNMENT
    columns: int = TOKENS
    row_warps: int = WEIGHT_ROWS // 16
    by_warp: bool = False
    one_launch: bool = False
    token_widths: tuple[int, ...] = ()
    group: int = 0

    @property
    def scale_alignments(self) -> tuple[int, int]:
        return self.scale_vectors


def plan(problem: Problem, sms: int) -> Plan:
    p = problem
    tiles = p.slots // TOKENS + min(p.experts, p.slots)
    units = [tiles * -(-w.rows // WEIGHT_ROWS) for w in (p.up, p.down)]
    up, down = (Rows(w.columns, BLOCK[p.activations]) for w in (p.up, p.down))
    spans = p.tokens * -(-p.hidden // STEP) * (STEP // 32)
    return Plan(
        experts=max(_LEAST_EXPERTS, 1 << (p.experts - 1).bit_length()),
        tiles=tiles,
        blocks=(min(sms, -(-spans // _PREPARE_UNITS)), *(min(sms, max(most, 1)) for most in units)),
        counters=(1, 3 + p.experts),
        x_rows=(p.slots, up.nbytes // 2),
        h_rows=(p.slots, down.nbytes // 2),
        scale_vectors=(_vector(p, p.up), _vector(p, p.down)),
    )


def _vector(p: Problem, weights: Weights) -> int:
    """Bytes of scales that start and end where a load of so many can."""
    steps = weights.scale_row, weights.scale_expert
    if p.scale_layout != "linear":
        return math.gcd(4, *steps)
    return math.gcd(STAGE // BLOCK[p.format], weights.columns // BLOCK[p.format], *steps)


assert CONTIGUOUS != 0
