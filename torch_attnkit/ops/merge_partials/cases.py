"""Inputs of merge_partials for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.oracle import inputs

PARITY = {
    "two": dict(P=2, R=5, H=3, Dv=64),
    "many": dict(P=17, R=3, H=8, Dv=128),
    "odd": dict(P=3, R=7, H=5, Dv=33),
    "wide": dict(P=65, R=2, H=3, Dv=520),
}
DEGENERATE = {
    "one": dict(P=1, R=1, H=1, Dv=64),
    "no-parts": dict(P=0, R=2, H=2, Dv=64),
    "no-columns": dict(P=2, R=2, H=2, Dv=0),
    "empty": dict(P=2, R=0, H=4, Dv=64),
}
EXTRAS = (
    ("nan:out_partial", "odd", "all"),
    ("nan:out_partial", "many"),
    ("nan:lse_partial", "odd", "all"),
    ("nan:row_sum", "odd", "row_sum"),
    ("nan:sink", "odd", "sink"),
    ("sink:-inf", "odd", "all"),
    ("sink:inf", "many", "sink"),
)
BENCH = {
    f"{p}x{r}x{h}x{d}": dict(P=p, R=r, H=h, Dv=d)
    for p, r, h, d in ((16, 1, 32, 128), (8, 128, 32, 128), (2, 4096, 64, 512), (2, 8192, 32, 128))
}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    P, R, H = dims["P"], dims["R"], dims["H"]
    lse = inputs.normal(gen, torch.float32, P, R, H) * 3
    lse[torch.rand(P, R, H, generator=gen) < 0.2] = -torch.inf  # parts that saw nothing
    lse[:, 1::4] = -torch.inf  # rows of which no part saw anything
    row_sum = (1 + 9 * torch.rand(P, R, H, generator=gen)).masked_fill(lse == -torch.inf, 0.0)
    args = (
        inputs.normal(gen, dtype, P, R, H, dims["Dv"]),
        lse,
        inputs.normal(gen, torch.float32, H) if "sink" in features else None,
        row_sum if "row_sum" in features else None,
    )
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    return args, dict(dtype=other if "dtype" in features else None)


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read the partials and their lse once, write out and lse."""
    rows = dims["R"] * dims["H"]
    return (dims["P"] + 1) * rows * (dims["Dv"] * dtype.itemsize + 4)


def flops(dims: dict[str, int]) -> int:
    """One multiply and one add an element."""
    return 2 * dims["P"] * dims["R"] * dims["H"] * dims["Dv"]
