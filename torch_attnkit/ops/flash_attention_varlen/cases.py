"""Inputs of flash_attention_varlen for parity and bench. L is the longest sequence; lengths are ragged below it."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.oracle import inputs, sampling
from torch_attnkit.oracle.attention import visible

# In turns up to 128 rows and more, and tiles that are drawn, as in flash_attention; causal=1: as many queries as keys;
# gqa=1: heads share keys.
PARITY = {
    "ragged": dict(B=4, L=65, Hq=4, Hkv=2, D=64, Dv=64),
    "prefill": dict(B=3, L=129, Hq=2, Hkv=1, D=64, Dv=64, causal=1),
    "tail": dict(B=3, L=63, Hq=6, Hkv=2, D=64, Dv=32, tail=5),
    "long": dict(B=2, L=256, Hq=2, Hkv=1, D=64, Dv=64),
    "many": dict(B=36, L=150, Hq=8, Hkv=4, D=64, Dv=64, gqa=1),
}
DEGENERATE = {
    "one": dict(B=1, L=1, Hq=4, Hkv=1, D=64, Dv=64),
    "no-tokens": dict(B=2, L=0, Hq=2, Hkv=1, D=64, Dv=64),
    "only-tail": dict(B=2, L=0, Hq=2, Hkv=1, D=64, Dv=64, tail=3),
    "empty": dict(B=0, L=0, Hq=2, Hkv=1, D=64, Dv=64),
}
# Values of NaN: see flash_attention.
EXTRAS = (
    ("nan:q", "prefill", "all"),
    ("nan:k", "ragged", "all"),
    ("nan:v", "ragged"),
    ("nan:v", "ragged", "softcap"),
    ("nan:sink", "ragged", "sink"),
    ("sink:-inf", "tail", "all"),
    ("sink:inf", "ragged", "sink"),
)
# 64 sequences whose lengths are spread evenly over 1..4096, in random order.
BENCH = {
    f"{kind}-64x1..4096-D{d}": dict(B=64, L=4096, Hq=32, Hkv=8, D=d, Dv=d, causal=int(kind == "causal"))
    for d in (128, 64)
    for kind in ("causal", "full")
}


def _offsets(length: torch.Tensor) -> torch.Tensor:
    return torch.cat([length.new_zeros(1), length.cumsum(0, dtype=torch.int32)])  # (B + 1,)


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    B, L, Hq, tail = dims["B"], dims["L"], dims["Hq"], dims.get("tail", 0)
    Hkv = dims["Hkv"] if "gqa" in features or dims.get("gqa") else Hq
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
        *inputs.scales(gen, "scales" in features, B, Hkv),
    )
    kwargs = dict(
        causal="causal" in features,
        **inputs.score_arguments(features, L),
        normalize="unnormalized" not in features,
        max_seqlen_q=L,
        max_seqlen_k=L,
    )
    return args, kwargs


def bench(dims: dict[str, int], dtype: torch.dtype, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    length = _spread(dims)
    random.Random(0).shuffle(length)
    tokens, offsets = sum(length), torch.tensor([0, *itertools.accumulate(length)], dtype=torch.int32)
    args = (
        inputs.normal(gen, dtype, tokens, dims["Hq"], dims["D"]),
        inputs.normal(gen, dtype, tokens, dims["Hkv"], dims["D"]),
        inputs.normal(gen, dtype, tokens, dims["Hkv"], dims["Dv"]),
        offsets,
        offsets.clone(),
    )
    return args, dict(causal=bool(dims["causal"]), max_seqlen_q=dims["L"], max_seqlen_k=dims["L"])


def _spread(dims: dict[str, int]) -> list[int]:
    return [1 + (dims["L"] - 1) * i // (dims["B"] - 1) for i in range(dims["B"])]


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read q, k and v once, write out and lse."""
    tokens = sum(_spread(dims))
    read = tokens * (dims["Hkv"] * (dims["D"] + dims["Dv"]) + dims["Hq"] * dims["D"]) * dtype.itemsize
    out = tokens * dims["Hq"] * dims["Dv"] * max(2, dtype.itemsize)
    return read + out + tokens * dims["Hq"] * 4 + 2 * (dims["B"] + 1) * 4


def flops(dims: dict[str, int]) -> int:
    """Two products, two operations a term; causal counts each sequence's triangle."""
    pairs = sum(n * (n + 1) // 2 if dims.get("causal") else n * n for n in _spread(dims))
    return 2 * dims["Hq"] * pairs * (dims["D"] + dims["Dv"])


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    facts, on = sampling.attention(d, row, (1, 1, 2, 3, 4, 6, 8))
    T, same = d.size(min(d.limits.keys, 2048)), d.sometimes(0.4)
    S = min(T if same else d.size(d.limits.keys), sampling.most_keys(d, facts, T))
    T = min(T, S) if same else T
    facts |= dict(T=T, S=S) | sampling.batch(d, facts, T, S) | sampling.scores(d, facts, on, S)
    len_q = d.ragged(facts["B"], T)
    facts |= dict(len_q=len_q, len_k=len_q if same else d.ragged(facts["B"], S))
    facts |= dict(tail_q=d.pick((0, 0, 1, 5)), tail_k=d.pick((0, 0, 1, 7)), hints=d.pick(("", "exact", "more")))
    return facts | {f"{name}.at": d.layout(3, (1,)) for name in "qkv"}


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``T`` and ``S`` bound the lengths; tails are tokens past the last offset; hints are "", "exact" or "more"."""
    B, Hkv, Hq = f["B"], f["Hkv"], f["Hkv"] * f["group"]
    len_q, len_k = sampling.counts(f["len_q"], B, f["T"]), sampling.counts(f["len_k"], B, f["S"])
    assert len_q is not None and len_k is not None
    scores = sampling.score_arguments(f)
    seen = [torch.zeros(0, dtype=torch.bool)]
    for t, s in zip(len_q.tolist(), len_k.tolist(), strict=True):
        keep = visible(
            torch.arange(s - t, s)[None], s, 0, s, causal=bool(f["causal"]), window=f["window"],
            sink_tokens=f["sink_tokens"],
        )  # fmt: skip
        seen.append(keep[0].any(0))
    seen.append(torch.zeros(f["tail_k"], dtype=torch.bool))
    rows = torch.cat(seen)[:, None].expand(-1, Hkv)  # (Tk, Hkv)
    q, k, v = sampling.qkv(f, gen, (int(len_q.sum()) + f["tail_q"], Hq), tuple(rows.shape), rows)
    sink, scales = sampling.sink(f, gen, Hq), sampling.scales(f, gen, B, Hkv)
    longest = [max(n.tolist(), default=0) + (f["hints"] == "more") * 100 if f["hints"] else -1 for n in (len_q, len_k)]
    kwargs = dict(causal=bool(f["causal"]), normalize=bool(f["normalize"])) | scores
    kwargs |= dict(max_seqlen_q=longest[0], max_seqlen_k=longest[1])
    return (q, k, v, _offsets(len_q), _offsets(len_k), sink, *scales), kwargs
