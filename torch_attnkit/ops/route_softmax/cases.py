"""Inputs of route_softmax for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.oracle import inputs

PARITY = {
    "all": dict(R=3, E=7, K=7),
    "odd": dict(R=5, E=144, K=6),
    "gptoss": dict(R=9, E=128, K=4),
    "qwen3_next": dict(R=2, E=512, K=10),
}
DEGENERATE = {
    "one": dict(R=1, E=1, K=1),
    "empty": dict(R=0, E=16, K=2),
}
BENCH = {
    f"{name}-{r}": dict(R=r, E=e, K=k)
    for name, e, k in (("gptoss", 128, 4), ("qwen3", 128, 8), ("qwen3_next", 512, 10))
    for r in (1, 16, 128, 4096, 16384)
}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs = dict(
        topk=dims["K"],
        softmax_first="softmax_first" in features,
        renormalize="renormalize" in features,
        route_scale=1.5,
    )
    return (inputs.normal(gen, dtype, dims["R"], dims["E"]),), kwargs


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read logits, write weights and indices."""
    return dims["R"] * (dims["E"] * dtype.itemsize + dims["K"] * 8)


def flops(dims: dict[str, int]) -> int:
    """Exponential, difference and sum of an expert, and one comparison an expert and choice."""
    return dims["R"] * dims["E"] * (3 + dims["K"])
