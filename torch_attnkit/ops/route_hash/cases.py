"""Inputs of route_hash for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.oracle import inputs

# wide: token ids and table are int64, else int32.
PARITY = {
    "odd": dict(R=5, E=144, V=33, K=6, wide=1),
    "flash": dict(R=9, E=256, V=100, K=6, wide=0),
}
DEGENERATE = {
    "one": dict(R=1, E=1, V=1, K=1, wide=0),
    "empty": dict(R=0, E=16, V=10, K=2, wide=0),
}
BENCH = {f"{e}-{r}": dict(R=r, E=e, V=129280, K=6, wide=0) for e in (256, 384) for r in (1, 16, 128, 4096, 16384)}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    integer = torch.int64 if dims["wide"] else torch.int32
    args = (
        inputs.normal(gen, dtype, dims["R"], dims["E"]),
        inputs.integers(gen, 0, dims["V"] - 1, dims["R"]).to(integer),
        inputs.integers(gen, 0, dims["E"] - 1, dims["V"], dims["K"]).to(integer),
    )
    return args, dict(route_scale=1.5, renormalize="renormalize" in features)


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read the token's id, its table row and the K logits that it names; write weights and indices."""
    integer = 8 if dims["wide"] else 4
    return dims["R"] * (integer + dims["K"] * (integer + dtype.itemsize + 8))


def flops(dims: dict[str, int]) -> int:
    """The score counted as eight operations an expert."""
    return dims["R"] * dims["K"] * 10
