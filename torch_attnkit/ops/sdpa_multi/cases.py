"""Inputs of sdpa_multi for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.oracle import inputs

PARITY = {
    "one": dict(B=1, T=1, Hq=4, Hkv=1, S=1, D=64, Dv=64),
    "ragged": dict(B=3, T=5, Hq=8, Hkv=2, S=37, D=64, Dv=64),
    "mqa": dict(B=2, T=16, Hq=6, Hkv=1, S=130, D=64, Dv=32),
    "long": dict(B=2, T=33, Hq=4, Hkv=2, S=300, D=64, Dv=64),
    "short-cache": dict(B=2, T=7, Hq=2, Hkv=1, S=4, D=64, Dv=64),
    "empty": dict(B=2, T=0, Hq=4, Hkv=2, S=8, D=64, Dv=64),
}
BENCH = {
    f"{b}x{t}x{s}": dict(B=b, T=t, Hq=32, Hkv=8, S=s, D=128, Dv=128)
    for b, t, s in ((1, 8, 8192), (16, 4, 8192), (16, 32, 8192), (1, 512, 32768))
}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    B, Hq, S = dims["B"], dims["Hq"], dims["S"]
    Hkv = dims["Hkv"] if "gqa" in features else Hq
    kv_len = inputs.lengths(gen, B, S)
    args = (
        inputs.normal(gen, dtype, B, dims["T"], Hq, dims["D"]),
        inputs.normal(gen, dtype, B, Hkv, S, dims["D"]),
        inputs.normal(gen, dtype, B, Hkv, S, dims["Dv"]),
        kv_len,
        inputs.normal(gen, torch.float32, Hq) if "sink" in features else None,
        inputs.starts(gen, kv_len) if "kv_start" in features else None,
    )
    return args, dict(causal="bidirectional" not in features) | inputs.score_arguments(features, S)


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read q and the caches once, write out and lse."""
    tokens = dims["B"] * dims["Hkv"] * dims["S"] * (dims["D"] + dims["Dv"])
    heads = dims["B"] * dims["T"] * dims["Hq"] * (dims["D"] + dims["Dv"])
    return (tokens + heads) * dtype.itemsize + dims["B"] * (dims["T"] * dims["Hq"] + 1) * 4


def flops(dims: dict[str, int]) -> int:
    """Two products, two operations a term; under causal query r leaves out the T - 1 - r keys behind it."""
    pairs = dims["T"] * dims["S"] - dims["T"] * (dims["T"] - 1) // 2
    return 2 * dims["B"] * dims["Hq"] * pairs * (dims["D"] + dims["Dv"])
