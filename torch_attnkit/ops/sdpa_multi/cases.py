"""Inputs of sdpa_multi for parity and bench."""

from __future__ import annotations

import random
from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.oracle import inputs, sampling
from torch_attnkit.oracle.attention import visible

# Rows (queries times heads of a group) and keys beside the borders of tiles of 16, 64 and 128. Blocks that share the
# keys of a sequence have kernels of their own on Blackwell and come in turns, as dtypes do.
PARITY = {
    "ragged": dict(B=3, T=5, Hq=8, Hkv=2, S=65, D=64, Dv=64),
    "two-tiles": dict(B=1, T=17, Hq=8, Hkv=1, S=639, D=64, Dv=64),
    "mqa": dict(B=2, T=16, Hq=6, Hkv=1, S=129, D=64, Dv=32),
    "many-keys": dict(B=1, T=16, Hq=4, Hkv=2, S=1500, D=64, Dv=64),
    "long": dict(B=2, T=65, Hq=4, Hkv=2, S=257, D=64, Dv=64),
}
# short-cache: more queries than keys; unseen=1: lengths of 0, and starts at the end.
DEGENERATE = {
    "one": dict(B=1, T=1, Hq=4, Hkv=1, S=1, D=64, Dv=64),
    "short-cache": dict(B=2, T=7, Hq=2, Hkv=1, S=4, D=64, Dv=64),
    "no-queries": dict(B=2, T=0, Hq=4, Hkv=2, S=8, D=64, Dv=64),
    "no-keys": dict(B=2, T=3, Hq=4, Hkv=2, S=0, D=64, Dv=64),
    "empty": dict(B=0, T=3, Hq=4, Hkv=2, S=8, D=64, Dv=64),
    "unseen": dict(B=4, T=3, Hq=4, Hkv=2, S=64, D=64, Dv=64, unseen=1),
}
# Values of NaN: see flash_attention.
EXTRAS = (
    ("nan:q", "ragged", "all"),
    ("nan:k_cache", "ragged", "all"),
    ("nan:v_cache", "long", "bidirectional"),
    ("nan:sink", "ragged", "sink"),
    ("sink:-inf", "ragged", "all"),
    ("sink:inf", "long", "sink"),
)
BENCH = {
    f"ragged-{b}x{t}x{s}": dict(B=b, T=t, Hq=32, Hkv=8, S=s, D=128, Dv=128, causal=1, ragged=1)
    for b, t, s in ((16, 16, 8192), (16, 4, 8192), (64, 4, 8192), (8, 8, 32768))
} | {
    f"{'full-' * (1 - causal)}{b}x{t}x{s}": dict(B=b, T=t, Hq=32, Hkv=8, S=s, D=128, Dv=128, causal=causal)
    for b, t, s, causal in (
        (1, 16, 8192, 1), (16, 16, 8192, 1), (1, 64, 8192, 1), (16, 64, 8192, 1),
        (1, 16, 8192, 0), (16, 16, 8192, 0), (1, 64, 8192, 0), (16, 64, 8192, 0),
        (1, 8, 8192, 1), (16, 4, 8192, 1), (16, 32, 8192, 1), (1, 512, 32768, 1),
    )
}  # fmt: skip


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    B, Hq, S = dims["B"], dims["Hq"], dims["S"]
    Hkv = dims["Hkv"] if "gqa" in features else Hq
    kv_len = inputs.lengths(gen, B, S, unseen=bool(dims.get("unseen")))
    args = (
        inputs.normal(gen, dtype, B, dims["T"], Hq, dims["D"]),
        inputs.normal(gen, dtype, B, Hkv, S, dims["D"]),
        inputs.normal(gen, dtype, B, Hkv, S, dims["Dv"]),
        kv_len,
        inputs.normal(gen, torch.float32, Hq) if "sink" in features else None,
        inputs.starts(gen, kv_len, unseen=bool(dims.get("unseen"))) if "kv_start" in features else None,
        *inputs.scales(gen, "scales" in features, B, Hkv),
    )
    return args, dict(causal="bidirectional" not in features) | inputs.score_arguments(features, S)


def bench(dims: dict[str, int], dtype: torch.dtype, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Full caches, or lengths spread evenly, in a random order."""
    args, _ = make(dims, dtype, ("gqa",), gen)
    return (*args[:3], torch.tensor(_lengths(dims), dtype=torch.int32), None, None), dict(causal=bool(dims["causal"]))


def _lengths(dims: dict[str, int]) -> list[int]:
    B, T, S = dims["B"], dims["T"], dims["S"]
    if not dims.get("ragged"):
        return [S] * B
    lengths = [T + (S - T) * b // (B - 1) for b in range(B)]
    random.Random(0).shuffle(lengths)
    return lengths


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read q and the caches once, write out and lse."""
    tokens = sum(_lengths(dims)) * dims["Hkv"] * (dims["D"] + dims["Dv"])
    heads = dims["B"] * dims["T"] * dims["Hq"]
    inside = (tokens + heads * dims["D"]) * dtype.itemsize
    return inside + heads * dims["Dv"] * max(2, dtype.itemsize) + (heads + dims["B"]) * 4


def flops(dims: dict[str, int]) -> int:
    """Two products, two operations a term; under causal query r leaves out the T - 1 - r keys behind it."""
    T = dims["T"]
    behind = T * (T - 1) // 2 if dims.get("causal", 1) else 0
    pairs = sum(T * keys - behind for keys in _lengths(dims))
    return 2 * dims["Hq"] * pairs * (dims["D"] + dims["Dv"])


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    facts, on = sampling.attention(d, row, (1, 1, 2, 3, 4, 8, 16))
    T = 0 if d.sometimes(0.02) else d.size(min(150, d.limits.keys))
    S = 0 if d.sometimes(0.02) else d.size(d.limits.keys)
    S = min(S, sampling.most_keys(d, facts, T))
    facts |= dict(T=T, S=S, causal=int("bidirectional" not in on))
    facts |= sampling.batch(d, facts, T, S) | sampling.scores(d, facts, on, S)
    facts["kv_len"] = d.ragged(facts["B"], S)
    facts["kv_start"] = d.ragged(facts["B"], S) if "kv_start" in on else ""
    facts["q.at"] = d.layout(4, (0, 2))
    step = sampling.aligned(row, facts["dtype"])
    return facts | {f"{name}.at": d.layout(4, (0, 1), step) for name in ("k_cache", "v_cache")}


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    B, T, S, Hkv, Hq = f["B"], f["T"], f["S"], f["Hkv"], f["Hkv"] * f["group"]
    kv_len, kv_start = sampling.counts(f["kv_len"] or str(S), B, S), sampling.counts(f["kv_start"], B, S)
    assert kv_len is not None
    pos = kv_len[:, None] - T + torch.arange(T)  # (B, T)
    keep = visible(
        pos, S, 0 if kv_start is None else kv_start[:, None], kv_len[:, None], causal=bool(f["causal"]),
        window=f["window"], sink_tokens=f["sink_tokens"],
    )  # fmt: skip
    seen = (keep & (pos >= 0)[..., None]).any(1)[:, None].expand(B, Hkv, S)
    q, k, v = sampling.qkv(f, gen, (B, T, Hq), (B, Hkv, S), seen, ("k_cache", "v_cache"))
    rest = (sampling.sink(f, gen, Hq), kv_start, *sampling.scales(f, gen, B, Hkv))
    return (q, k, v, kv_len, *rest), dict(causal=bool(f["causal"])) | sampling.score_arguments(f)
