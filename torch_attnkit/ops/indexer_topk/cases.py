"""Inputs of indexer_topk for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.oracle import inputs

# ties: scores are small integers, so that most places are decided by index.
PARITY = {
    "ties": dict(Tq=5, S=130, K=17, ties=1),
    "odd": dict(Tq=3, S=1037, K=512, ties=0),
    "short": dict(Tq=4, S=100, K=512, ties=0),
}
DEGENERATE = {
    "one": dict(Tq=1, S=1, K=1, ties=0),
    "no_entries": dict(Tq=2, S=0, K=4, ties=0),
    "empty": dict(Tq=0, S=64, K=8, ties=0),
}
BENCH = {
    f"{t}x{s}-{k}": dict(Tq=t, S=s, K=k, ties=0)
    for t, s, k in (
        (1, 2048, 512),
        (1, 32768, 512),
        (1, 262144, 1024),
        (64, 8192, 512),
        (128, 32768, 1024),
        (4096, 8192, 512),
    )
}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    Tq, S = dims["Tq"], dims["S"]
    scores = inputs.integers(gen, -2, 2, Tq, S).to(dtype) if dims["ties"] else inputs.normal(gen, dtype, Tq, S)
    k_len = inputs.lengths(gen, Tq, S) if "k_len" in features else None
    return (scores, k_len), dict(topk=dims["K"])


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read the scores once, write the indices."""
    return dims["Tq"] * (dims["S"] * dtype.itemsize + dims["K"] * 4)


def flops(dims: dict[str, int]) -> int:
    """One comparison a score."""
    return dims["Tq"] * dims["S"]
