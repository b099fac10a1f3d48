"""Inputs of flash_attention_varlen for parity and bench. L is the longest sequence; lengths are ragged below it."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.oracle import inputs

PARITY = {
    "one": dict(B=1, L=1, Hq=4, Hkv=1, D=64, Dv=64),
    "ragged": dict(B=4, L=19, Hq=4, Hkv=2, D=64, Dv=64),
    "tail": dict(B=3, L=33, Hq=6, Hkv=1, D=64, Dv=32, tail=5),
    "long": dict(B=2, L=140, Hq=4, Hkv=2, D=64, Dv=64),
    "empty": dict(B=0, L=0, Hq=2, Hkv=1, D=64, Dv=64),
}
BENCH = {
    f"causal-{b}x{s}-D{d}": dict(B=b, L=s, Hq=32, Hkv=8, D=d, Dv=d, causal=1)
    for b, s, d in ((8, 2048, 128), (32, 1024, 128), (2, 16384, 128), (16, 2048, 64))
}


def _offsets(length: torch.Tensor) -> torch.Tensor:
    return torch.cat([length.new_zeros(1), length.cumsum(0, dtype=torch.int32)])  # (B + 1,)


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    B, L, Hq, tail = dims["B"], dims["L"], dims["Hq"], dims.get("tail", 0)
    Hkv = dims["Hkv"] if "gqa" in features else Hq
    len_k = inputs.lengths(gen, B, L)
    len_q = len_k if dims.get("causal") else inputs.lengths(gen, B, L).flip(0)  # a prefill, or any pair of lengths
    Tq, Tk = int(len_q.sum()) + tail, int(len_k.sum()) + tail
    args = (
        inputs.normal(gen, dtype, Tq, Hq, dims["D"]),
        inputs.normal(gen, dtype, Tk, Hkv, dims["D"]),
        inputs.normal(gen, dtype, Tk, Hkv, dims["Dv"]),
        _offsets(len_q),
        _offsets(len_k),
        inputs.normal(gen, torch.float32, Hq) if "sink" in features else None,
    )
    kwargs = dict(
        causal="causal" in features,
        **inputs.score_arguments(features, L),
        normalize="unnormalized" not in features,
        max_seqlen_q=L,
        max_seqlen_k=L,
    )
    return args, kwargs


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read q, k and v once, write out and lse, for B sequences of the longest length."""
    tokens = dims["B"] * dims["L"]
    elements = tokens * (dims["Hq"] + dims["Hkv"]) * (dims["D"] + dims["Dv"])
    return elements * dtype.itemsize + tokens * dims["Hq"] * 4 + 2 * (dims["B"] + 1) * 4


def flops(dims: dict[str, int]) -> int:
    """Two products, two operations a term, for B sequences of the longest length; causal counts its triangle."""
    L = dims["L"]
    pairs = L * (L + 1) // 2 if dims.get("causal") else L * L
    return 2 * dims["B"] * dims["Hq"] * pairs * (dims["D"] + dims["Dv"])
