"""Inputs of linear_decode for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.oracle import sampling

# view=1: x and the weight are columns of wider tensors. 4300 rows are so many that few tokens get CTAs of 8 rows and
# more of 16.
PARITY = {
    "one": dict(Tq=1, K=2880, N=40),
    "few": dict(Tq=3, K=416, N=33, view=1),
    "eight": dict(Tq=8, K=1056, N=16),
    "sixteen": dict(Tq=16, K=2048, N=70),
    "nine": dict(Tq=9, K=32, N=5),
    "many-rows": dict(Tq=2, K=288, N=4300),
    "eleven-many-rows": dict(Tq=11, K=352, N=4300),
}
DEGENERATE = {
    "no-tokens": dict(Tq=0, K=64, N=4),
    "no-rows": dict(Tq=2, K=64, N=0),
    "no-numbers": dict(Tq=2, K=0, N=20),
}
# GPT-OSS-20B: q, k and v, the output's product, the router's.
BENCH = {
    f"gptoss-{name}-{t}": dict(Tq=t, K=k, N=n)
    for name, k, n in (("qkv", 2880, 5120), ("out", 4096, 2880), ("router", 2880, 32))
    for t in (1, 8, 16)
}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    Tq, K, N = (dims[axis] for axis in ("Tq", "K", "N"))
    more = 32 * dims.get("view", 0)
    x = torch.randn(Tq, K + more, generator=gen).to(dtype)[:, more:]
    weight = (torch.randn(N, K + more, generator=gen) * max(K, 1) ** -0.5).to(dtype)[:, more:]
    bias = torch.randn(N, generator=gen).to(dtype) if "bias" in features else None
    return (x, weight, bias), {}


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read x, the weight and the bias, write the result."""
    Tq, K, N = (dims[axis] for axis in ("Tq", "K", "N"))
    return (Tq * (K + N) + N * (K + 1)) * dtype.itemsize


def flops(dims: dict[str, int]) -> int:
    """A product and a sum a term."""
    return 2 * dims["Tq"] * dims["K"] * dims["N"]


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    k = d.kernel
    facts: sampling.Facts = dict(dtype=k.choice(row.dtypes.split()), Tq=k.choice((1, 1, 2, 7, 8, 9, 16)))
    facts |= dict(K=32 * d.size(60), biased=k.choice((0, 1)))
    facts |= dict(N=d.size(max(1, min(200, d.limits.terms // (facts["Tq"] * facts["K"])))))
    if d.sometimes(0.02):
        facts |= dict(Tq=0)
    return facts | {"seed": d.call.randrange(1 << 30), "x.at": d.layout(2, (), 8), "weight.at": d.layout(2, (), 8)}


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x, weight = (sampling.cast(sampling.randn(gen, rows, f["K"]), f["dtype"]) for rows in (f["Tq"], f["N"]))
    bias = sampling.cast(sampling.randn(gen, f["N"]), f["dtype"]) if f.get("biased") else None
    return (x, weight, bias), {}
