"""Host side of ``halves.py``: head dims whose output no warpgroup holds alone."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch_attnkit.core.spec import short

from ..problem import Problem
from .plan import Tiles

DTYPES = "bf16 f16"
TILES = {
    # (D, Dv): multiples of 128, for both products are cut in halves of whole rows of 128 bytes. Q takes 64 KB, every
    # stage 64 KB. N 64 with one stage needs fewer bytes of shared memory and waits for every block (docs/lab).
    (512, 512): Tiles(64, 32, 2, 1, turns=False, late_rescale=True, pair=True),
}


def signature(problem: Problem) -> dict[str, Any]:
    """The part of a kernel's signature that does not depend on how sequences are stored."""
    p, chosen = problem, TILES[problem.dim, problem.dim_v]
    return {
        "dtype": short(p.dtype),
        "dim": p.dim,
        "dim_v": p.dim_v,
        **dataclasses.asdict(chosen),
        "pair": chosen.paired(p.group),
        "causal": p.causal,
        "sink": p.sink,
        "normalize": p.normalize,
        **p.scores.features(),
    }
