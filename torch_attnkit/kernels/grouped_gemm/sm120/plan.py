"""Which kernel takes routed experts on sm120, and its tiles, grids and workspace."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch_attnkit.core import invariance

from ..problem import BLOCK, Problem, Weights, experts_compiled
from ..sm90 import plan as hopper
from ..sm90.config import SHARED_SMALL
from ..sm100 import plan as blackwell
from ..sm100.config import QuantizedRow, by_scale, tag_bytes
from .config import K_TILE

ALIGNMENT = 16  # bytes at whose multiples packed rows start and end
# Slots an expert from which on products are block-scaled. Below, memory bounds the kernel that decodes, too: a
# multiprocessor of a 5090 gets 10.5 bytes a ns, and 32 tokens by a tile of weights take half of that time. Counted, not
# measured.
_MANY = 32
_WIDE = 96  # and from which on work tiles have 128 tokens instead of 64
_SORT_UNITS = 256  # of 32 elements, that a CTA of the first launch has at least

_by_mma = partial(hopper.by_mma, shared=SHARED_SMALL)


def plan(problem: Problem, sms: int) -> Any:
    """Block-scaled products where activations are quantised and tokens are many, with Blackwell's rows of x and h; else
    weights are decoded."""
    p = problem
    steps = (step for w in (p.up, p.down) for step in (w.columns // 2, w.row, w.expert))
    if not by_scale(p.format, p.activations) or p.intermediate == 0 or any(step % ALIGNMENT for step in steps):
        return _by_mma(p, sms)
    if invariance.is_on() or p.slots < _MANY * p.experts:
        return _by_mma(p, sms)
    columns = 128 if p.slots >= _WIDE * p.experts else 64
    some = min(p.experts, p.slots)  # experts that have tokens, of which one is a tile, too
    tiles = (p.slots - some) // columns + some
    x_bytes, h_bytes = (QuantizedRow(w.columns, p.activations).nbytes for w in (p.up, p.down))
    units = p.tokens * -(-p.hidden // 32)
    return blackwell.Plan(
        experts=experts_compiled(p.experts),
        tiles=tiles,
        blocks=(min(sms, -(-units // _SORT_UNITS)), tiles, tiles),
        counters=(1, 3 + p.experts),
        x_rows=(p.slots, x_bytes // 2),
        h_rows=(p.slots, (h_bytes + tag_bytes(p.hidden, 1)) // 2),
        scale_vectors=(_vector(p, p.up), _vector(p, p.down)),
        code_alignment=ALIGNMENT,
        columns=(columns,) * 3,
    )


def _vector(p: Problem, weights: Weights) -> int:
    """Bytes of scales that start and end where a load of so many can."""
    steps = weights.scale_row, weights.scale_expert
    if p.scale_layout != "linear":
        return math.gcd(4, *steps)
    return math.gcd(K_TILE // BLOCK[p.format], weights.columns // BLOCK[p.format], *steps)
