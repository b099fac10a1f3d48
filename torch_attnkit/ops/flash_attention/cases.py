"""Inputs of flash_attention for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.oracle import inputs, sampling
from torch_attnkit.oracle.attention import visible

# Sizes beside the borders of tiles of 64, 128 and 192 rows and of 8 to 128 keys; groups of 2 and of 3 heads. Up to 128
# rows and more have kernels of their own on Blackwell and come in turns, as dtypes do. "many" has two tiles for every
# multiprocessor, which persistent CTAs draw where heads share keys; gqa=1: they do, whatever the features.
PARITY = {
    "square": dict(B=2, T=65, S=65, Hq=4, Hkv=2, D=64, Dv=64),
    "more-queries": dict(B=3, T=129, S=63, Hq=2, Hkv=1, D=64, Dv=32),
    "prefix": dict(B=2, T=17, S=191, Hq=6, Hkv=2, D=64, Dv=64),
    "long": dict(B=2, T=256, S=319, Hq=2, Hkv=1, D=64, Dv=64),
    "many": dict(B=46, T=17, S=140, Hq=12, Hkv=6, D=64, Dv=64, gqa=1),
}
# unseen=1: lengths of 0, and starts at the end.
DEGENERATE = {
    "one": dict(B=1, T=1, S=1, Hq=4, Hkv=1, D=64, Dv=64),
    "no-queries": dict(B=2, T=0, S=5, Hq=2, Hkv=1, D=64, Dv=64),
    "no-keys": dict(B=2, T=3, S=0, Hq=2, Hkv=1, D=64, Dv=64),
    "no-batch": dict(B=0, T=3, S=5, Hq=2, Hkv=1, D=64, Dv=64),
    "unseen": dict(B=4, T=3, S=64, Hq=2, Hkv=1, D=64, Dv=64, unseen=1),
}
# A value of NaN stands where all queries of its sequence see it or none does: what a weight of 0 makes of it is not
# defined, and differs from tile to tile.
EXTRAS = (
    ("nan:q", "square", "all"),
    ("nan:k", "prefix", "all"),
    ("nan:v", "square", "kv_len"),
    ("nan:v", "prefix", "kv_start"),
    ("nan:sink", "square", "sink"),
    ("sink:-inf", "square", "all"),
    ("sink:inf", "prefix", "sink"),
)
# Name: (B, tokens, Hq, Hkv, D, Dv); each is run causal and full.
_SQUARES = {
    "8x2048": (8, 2048, 32, 8, 128, 128),
    "4x4096": (4, 4096, 32, 8, 128, 128),
    "2x8192": (2, 8192, 32, 8, 128, 128),
    "1x16384": (1, 16384, 32, 8, 128, 128),
    "4x4096-D64": (4, 4096, 32, 8, 64, 64),
    "4x4096-D96": (4, 4096, 32, 8, 96, 96),
    "4x4096-D192": (4, 4096, 16, 16, 192, 128),
    "2x8192-D256": (2, 8192, 16, 2, 256, 256),
    "2x8192-D512": (2, 8192, 8, 2, 512, 512),
}
BENCH = {
    f"{kind}-{name}": dict(B=b, T=n, S=n, Hq=hq, Hkv=hkv, D=d, Dv=dv, causal=int(kind == "causal"))
    for kind in ("causal", "full")
    for name, (b, n, hq, hkv, d, dv) in _SQUARES.items()
} | {
    "window1024-2x8192": dict(B=2, T=8192, S=8192, Hq=32, Hkv=8, D=128, Dv=128, causal=1, window=1024),
    "gptoss-4x4096": dict(B=4, T=4096, S=4096, Hq=64, Hkv=8, D=64, Dv=64, causal=1, window=128, sink=1),
    "gptoss-full-4x4096": dict(B=4, T=4096, S=4096, Hq=64, Hkv=8, D=64, Dv=64, causal=1, sink=1),
}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    B, T, S, Hq = dims["B"], dims["T"], dims["S"], dims["Hq"]
    Hkv = dims["Hkv"] if "gqa" in features or dims.get("gqa") else Hq
    kv_len = inputs.lengths(gen, B, S, unseen=bool(dims.get("unseen")))
    end = kv_len if "kv_len" in features else torch.full_like(kv_len, S)
    kv_start = inputs.starts(gen, end, unseen=bool(dims.get("unseen")))
    args = (
        inputs.normal(gen, dtype, B, T, Hq, dims["D"]),
        inputs.normal(gen, dtype, B, S, Hkv, dims["D"]),
        inputs.normal(gen, dtype, B, S, Hkv, dims["Dv"]),
        inputs.normal(gen, torch.float32, Hq) if "sink" in features else None,
        kv_len if "kv_len" in features else None,
        kv_start if "kv_start" in features else None,
        *inputs.scales(gen, "scales" in features, B, Hkv),
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
    heads = dims["B"] * dims["T"] * dims["Hq"]
    inside = (tokens + heads * dims["D"]) * dtype.itemsize
    return inside + heads * dims["Dv"] * max(2, dtype.itemsize) + heads * 4


def flops(dims: dict[str, int]) -> int:
    """Two products, two operations a term; causal counts the pairs on and below the diagonal, and in the window."""
    T, S = dims["T"], dims["S"]
    pairs = T * S - (T * (T - 1) // 2 if dims.get("causal") else 0)
    outside = max(0, S - dims["window"]) if "window" in dims else 0  # of a causal square: a triangle
    pairs -= outside * (outside + 1) // 2
    return 2 * dims["B"] * dims["Hq"] * pairs * (dims["D"] + dims["Dv"])


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    facts, on = sampling.attention(d, row, (1, 1, 2, 3, 4, 6, 8))
    T = 0 if d.sometimes(0.02) else d.size(min(d.limits.keys, 2048))
    S = d.pick((T, T, T + d.size(d.limits.keys // 2), d.size(d.limits.keys), d.size(d.limits.keys), d.size(20)))
    S = 0 if d.sometimes(0.02) else min(S, sampling.most_keys(d, facts, T))
    facts |= dict(T=T, S=S) | sampling.batch(d, facts, T, S) | sampling.scores(d, facts, on, S)
    for name in ("kv_len", "kv_start"):
        facts[name] = d.ragged(facts["B"], S) if name in on else ""
    return facts | {f"{name}.at": d.layout(4, (0, 2)) for name in "qkv"}


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    B, T, S, Hkv, Hq = f["B"], f["T"], f["S"], f["Hkv"], f["Hkv"] * f["group"]
    kv_len, kv_start = (sampling.counts(f[name], B, S) for name in ("kv_len", "kv_start"))
    scores = sampling.score_arguments(f)
    keep = visible(
        torch.arange(S - T, S).expand(B, T), S, 0 if kv_start is None else kv_start[:, None],
        S if kv_len is None else kv_len[:, None], causal=bool(f["causal"]), window=f["window"],
        sink_tokens=f["sink_tokens"],
    )  # fmt: skip
    q, k, v = sampling.qkv(f, gen, (B, T, Hq), (B, S, Hkv), keep.any(1)[..., None].expand(B, S, Hkv))
    args = (q, k, v, sampling.sink(f, gen, Hq), kv_len, kv_start, *sampling.scales(f, gen, B, Hkv))
    return args, dict(causal=bool(f["causal"]), normalize=bool(f["normalize"])) | scores
