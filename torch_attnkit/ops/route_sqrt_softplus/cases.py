"""Inputs of route_sqrt_softplus for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.oracle import inputs

PARITY = {
    "all": dict(R=3, E=7, K=7),
    "odd": dict(R=5, E=144, K=6),
    "flash": dict(R=9, E=256, K=6),
    "pro": dict(R=2, E=384, K=6),
}
DEGENERATE = {
    "one": dict(R=1, E=1, K=1),
    "empty": dict(R=0, E=16, K=2),
}
BENCH = {f"{e}-{r}": dict(R=r, E=e, K=6) for e in (256, 384) for r in (1, 16, 128, 4096, 16384)}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    logits = inputs.normal(gen, dtype, dims["R"], dims["E"])
    bias = inputs.normal(gen, torch.float32, dims["E"]) if "bias" in features else None
    return (logits, bias), dict(topk=dims["K"], route_scale=1.5, renormalize="renormalize" in features)


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read logits and bias, write weights and indices."""
    return dims["R"] * (dims["E"] * dtype.itemsize + dims["K"] * 8) + dims["E"] * 4


def flops(dims: dict[str, int]) -> int:
    """The score counted as eight operations an expert, one comparison an expert and choice."""
    return dims["R"] * dims["E"] * (8 + dims["K"])
