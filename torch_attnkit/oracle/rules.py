"""Rules and features that the attention ops share, as dicts for the ``where`` and ``features`` fields of their tables.

They look at sizes and scalars only; what depends on the contents of tensors is checked by the references.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core.op import Call
from torch_attnkit.core.spec import DTYPES

HEADS = {
    "Hq must be a multiple of Hkv": lambda c: c.dim["Hkv"] > 0 and c.dim["Hq"] % c.dim["Hkv"] == 0,
    "D must be at least 1": lambda c: c.dim["D"] > 0,
}
SCORES = {
    "window must be -1 (off) or at least 0": lambda c: c.arg.window >= -1,
    "sink_tokens must be at least 0": lambda c: c.arg.sink_tokens >= 0,
    "softcap must be 0 (off) or positive": lambda c: c.arg.softcap >= 0,
}
# Numerators of several partials share one denominator, so the sink may join only after they are merged.
PARTIAL = {
    "sink is accepted with normalize=True only; give it to merge_partials": lambda c: (
        c.arg.normalize or c.arg.sink is None
    ),
}


def wide(spec: str) -> Callable[[Call], str | None]:
    """An entry of ``layouts`` for an output: bf16 where T is E4M3, whose 4 bits are too few for a mean of values."""
    return lambda c: f"{spec}:bf16" if c.dtype == DTYPES["f8e4m3"] else None


def value_dim(most: int) -> dict[str, Callable[[Any], bool]]:
    """What a kernel needs whose values are cut into runs of 16 elements."""
    return {f"Dv must be a multiple of 16 up to {most}": lambda c: 0 < c.dim["Dv"] <= most and c.dim["Dv"] % 16 == 0}


SAME_DIM = {"Dv must equal D": lambda c: c.dim["Dv"] == c.dim["D"]}
GQA = {"gqa": lambda c: c.dim["Hq"] != c.dim["Hkv"]}
SINK = {"sink": lambda c: c.arg.sink is not None}
KV_START = {"kv_start": lambda c: c.arg.kv_start is not None}
WINDOW = {
    "window": lambda c: c.arg.window >= 0,
    "sink_tokens": lambda c: c.arg.window >= 0 and c.arg.sink_tokens > 0,
    "softcap": lambda c: c.arg.softcap > 0,
}
CAUSAL = {"causal": lambda c: c.arg.causal}
UNNORMALIZED = {"unnormalized": lambda c: not c.arg.normalize}
SCALES = {"scales": lambda c: any(s is not None for s in (c.arg.q_scale, c.arg.k_scale, c.arg.v_scale))}
SINK_OR_PARTIAL = (("sink", "unnormalized"),)  # exclusive, see PARTIAL
