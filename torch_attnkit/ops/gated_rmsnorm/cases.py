"""Inputs of gated_rmsnorm for parity and bench."""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_attnkit.oracle import inputs

# R rows (-1: no batch axis), H heads beside them, N features; y32 and w32: y and w are float32 whatever T is.
PARITY = {
    "odd": dict(R=3, H=5, N=127, y32=0, w32=1),
    "heads": dict(R=4, H=8, N=128, y32=1, w32=1),
    "wide": dict(R=2, H=1, N=5000, y32=0, w32=0),
    "cluster": dict(R=2, H=1, N=16392, y32=0, w32=1),
    "rows": dict(R=40, H=1, N=8200, y32=0, w32=0),
    "spread": dict(R=2, H=1, N=40008, y32=0, w32=0),
    "longest": dict(R=1, H=1, N=131080, y32=1, w32=0),
}
DEGENERATE = {
    "one": dict(R=1, H=1, N=1, y32=1, w32=0),
    "no_batch": dict(R=-1, H=1, N=33, y32=1, w32=0),
    "empty": dict(R=0, H=4, N=64, y32=1, w32=0),
}
EXTRAS = (("nan:y", "heads"), ("nan:z", "odd"), ("nan:w", "odd"), ("w:inf", "heads"))
BENCH = {f"qwen3_next-{r}": dict(R=r, H=32, N=128, y32=1, w32=0) for r in (1, 16, 128, 4096, 32768)} | {
    f"{r}x{n}": dict(R=r, H=1, N=n, y32=0, w32=0)
    for r, n in ((8, 4096), (32, 16384), (16384, 4096), (65536, 2048), (262144, 128))
}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    N = dims["N"]
    shape = (N,) if dims["R"] < 0 else (dims["R"], dims["H"], N)
    args = (
        inputs.normal(gen, torch.float32 if dims["y32"] else dtype, *shape),
        inputs.normal(gen, dtype, *shape),
        inputs.normal(gen, torch.float32 if dims["w32"] else dtype, N),
    )
    return args, dict(eps=1e-5)


def _count(dims: dict[str, int]) -> int:
    return math.prod((abs(dims["R"]), dims["H"], dims["N"]))


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read y, z and w once, write out."""
    y, w = (4 if dims[f] else dtype.itemsize for f in ("y32", "w32"))
    return _count(dims) * (y + 2 * dtype.itemsize) + dims["N"] * w


def flops(dims: dict[str, int]) -> int:
    """Square and add; three products; silu counted as four."""
    return 9 * _count(dims)
