"""Inputs of flash_attention for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.oracle import inputs

PARITY = {
    "one": dict(B=1, T=1, S=1, Hq=4, Hkv=1, D=64, Dv=64),
    "square": dict(B=3, T=33, S=33, Hq=4, Hkv=2, D=64, Dv=64),
    "prefix": dict(B=2, T=17, S=70, Hq=6, Hkv=1, D=64, Dv=64),
    "more-queries": dict(B=3, T=40, S=9, Hq=2, Hkv=1, D=64, Dv=32),
    "long": dict(B=1, T=130, S=260, Hq=4, Hkv=2, D=64, Dv=64),
    "no-queries": dict(B=2, T=0, S=5, Hq=2, Hkv=1, D=64, Dv=64),
    "no-keys": dict(B=2, T=3, S=0, Hq=2, Hkv=1, D=64, Dv=64),
}
BENCH = {
    f"{'causal-' * causal}{b}x{s}-D{d}": dict(B=b, T=s, S=s, Hq=h, Hkv=hkv, D=d, Dv=d, causal=causal)
    for b, s, h, hkv, d, causal in (
        (1, 8192, 32, 8, 128, 1),
        (4, 4096, 32, 8, 128, 1),
        (8, 2048, 32, 32, 128, 0),
        (1, 32768, 16, 16, 64, 1),
        (2, 8192, 16, 8, 256, 1),
    )
}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    B, T, S, Hq = dims["B"], dims["T"], dims["S"], dims["Hq"]
    Hkv = dims["Hkv"] if "gqa" in features else Hq
    kv_len = inputs.lengths(gen, B, S)
    kv_start = inputs.starts(gen, kv_len if "kv_len" in features else torch.full_like(kv_len, S))
    args = (
        inputs.normal(gen, dtype, B, T, Hq, dims["D"]),
        inputs.normal(gen, dtype, B, S, Hkv, dims["D"]),
        inputs.normal(gen, dtype, B, S, Hkv, dims["Dv"]),
        inputs.normal(gen, torch.float32, Hq) if "sink" in features else None,
        kv_len if "kv_len" in features else None,
        kv_start if "kv_start" in features else None,
    )
    kwargs = dict(
        causal="causal" in features,
        **inputs.score_arguments(features, S),
        normalize="unnormalized" not in features,
    )
    return args, kwargs


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read q, k and v once, write out and lse."""
    tokens = dims["B"] * dims["S"] * dims["Hkv"] * (dims["D"] + dims["Dv"])
    heads = dims["B"] * dims["T"] * dims["Hq"] * (dims["D"] + dims["Dv"])
    return (tokens + heads) * dtype.itemsize + dims["B"] * dims["T"] * dims["Hq"] * 4


def flops(dims: dict[str, int]) -> int:
    """Two products, two operations a term; causal counts the pairs on and below the diagonal (T <= S)."""
    T, S = dims["T"], dims["S"]
    pairs = T * S - (T * (T - 1) // 2 if dims.get("causal") else 0)
    return 2 * dims["B"] * dims["Hq"] * pairs * (dims["D"] + dims["Dv"])
