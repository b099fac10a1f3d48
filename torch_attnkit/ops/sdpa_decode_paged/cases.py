"""Inputs of sdpa_decode_paged for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.oracle import inputs

PARITY = {
    "one": dict(B=1, Hq=4, Hkv=1, Np=1, Ps=1, Mp=1, D=64, Dv=64),
    "ragged": dict(B=3, Hq=8, Hkv=2, Np=12, Ps=16, Mp=4, D=64, Dv=64),
    "odd-page": dict(B=2, Hq=6, Hkv=1, Np=20, Ps=13, Mp=9, D=64, Dv=32),
    "long": dict(B=2, Hq=16, Hkv=2, Np=33, Ps=64, Mp=16, D=64, Dv=64),
    "empty": dict(B=0, Hq=4, Hkv=2, Np=3, Ps=16, Mp=2, D=64, Dv=64),
    "no-pages": dict(B=2, Hq=4, Hkv=2, Np=0, Ps=16, Mp=0, D=64, Dv=64),
}
BENCH = {
    f"{b}x{s}-page{p}": dict(B=b, Hq=32, Hkv=8, Np=b * s // p, Ps=p, Mp=s // p, D=128, Dv=128)
    for b, s, p in (
        (1, 8192, 16), (1, 8192, 64), (1, 131072, 64), (16, 8192, 16), (16, 8192, 64), (128, 8192, 16), (128, 8192, 64),
    )
}  # fmt: skip


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    B, Hq, D, Dv = dims["B"], dims["Hq"], dims["D"], dims["Dv"]
    Np, Ps, S = dims["Np"], dims["Ps"], dims["Mp"] * dims["Ps"]
    Hkv = dims["Hkv"] if "gqa" in features else Hq
    kv_len = inputs.lengths(gen, B, S)
    args = (
        inputs.normal(gen, dtype, B, Hq, D),
        inputs.normal(gen, dtype, Np, Ps, Hkv, D),
        inputs.normal(gen, dtype, Np, Ps, Hkv, Dv),
        inputs.block_table(gen, kv_len, Ps, Np, dims["Mp"]),
        kv_len,
        inputs.normal(gen, torch.float32, Hq) if "sink" in features else None,
        inputs.starts(gen, kv_len) if "kv_start" in features else None,
    )
    return args, inputs.score_arguments(features, S)


def bench(dims: dict[str, int], dtype: torch.dtype, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Full caches whose pages lie in random order."""
    B, Np, Ps, Mp, Hkv = (dims[axis] for axis in ("B", "Np", "Ps", "Mp", "Hkv"))
    args = (
        inputs.normal(gen, dtype, B, dims["Hq"], dims["D"]),
        inputs.normal(gen, dtype, Np, Ps, Hkv, dims["D"]),
        inputs.normal(gen, dtype, Np, Ps, Hkv, dims["Dv"]),
        torch.randperm(Np, generator=gen).to(torch.int32)[: B * Mp].view(B, Mp),
        torch.tensor([Mp * Ps] * B, dtype=torch.int32),
    )
    return args, {}


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read q, the page table and every key and value of the sequences once, write out and lse."""
    tokens = dims["B"] * dims["Hkv"] * dims["Mp"] * dims["Ps"] * (dims["D"] + dims["Dv"])
    heads = dims["B"] * dims["Hq"] * (dims["D"] + dims["Dv"])
    return (tokens + heads) * dtype.itemsize + dims["B"] * (dims["Hq"] + dims["Mp"] + 1) * 4


def flops(dims: dict[str, int]) -> int:
    """Two products, two operations a term."""
    return 2 * dims["B"] * dims["Hq"] * dims["Mp"] * dims["Ps"] * (dims["D"] + dims["Dv"])
