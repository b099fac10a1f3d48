"""Inputs of indexer_select for parity and bench: numbers whose scores are exact in float32, in whatever order a kernel
adds them up, so that indices are exact, too. They tie often, above all where there are few heads.

q, k and weights are small integers, scales 1 or 2: the products of two rows add up to 2^9 at most, for which the 14
bits of Hopper's E4M3 sums are enough, and the terms of a score to less than 2^24.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.formats import mxfp4
from torch_attnkit.ops.indexer_scores import cases as scores
from torch_attnkit.oracle import inputs, sampling

FORMATS = {16: "none", 8: "fp8", 4: "mxfp4"}

# S entries per request (with pages: rounded up to whole pages of Ps); Qb stored elements per head, with bits=4 bytes of
# two numbers; K to choose. q_scale=1: fp8 with scales of q. ``full``: every token sees all entries.
PARITY = {
    "decode": dict(Tq=3, R=3, S=37, Hi=4, Qb=64, Ps=8, K=9, bits=16),
    "heads": dict(Tq=2, R=1, S=130, Hi=64, Qb=128, Ps=64, K=64, bits=16),
    "tokens": dict(Tq=40, R=2, S=300, Hi=10, Qb=128, Ps=32, K=33, bits=16),
    "fewer": dict(Tq=4, R=2, S=50, Hi=2, Qb=128, Ps=16, K=512, bits=16),
    "fp8": dict(Tq=10, R=2, S=65, Hi=3, Qb=128, Ps=16, K=7, bits=8),
    "fp8_heads": dict(Tq=3, R=1, S=600, Hi=64, Qb=128, Ps=64, K=512, bits=8),
    "fp8_q_scale": dict(Tq=4, R=4, S=9, Hi=2, Qb=128, Ps=4, K=2, bits=8, q_scale=1),
    "mxfp4": dict(Tq=10, R=2, S=65, Hi=3, Qb=64, Ps=16, K=20, bits=4),
}
DEGENERATE = {
    "one": dict(Tq=1, R=1, S=1, Hi=1, Qb=32, Ps=1, K=1, bits=16),
    "no_entries": dict(Tq=2, R=2, S=0, Hi=2, Qb=32, Ps=4, K=3, bits=16),
    "empty": dict(Tq=0, R=2, S=8, Hi=2, Qb=32, Ps=4, K=3, bits=16),
}
EXTRAS = (
    ("nan:q", "tokens", "all"),
    ("nan:k", "tokens", "all"),
    ("nan:weights", "heads"),
    ("nan:k", "fp8", "paged"),
    ("k_scale:255", "mxfp4"),
)
BENCH = {
    f"{FORMATS[bits]}-{t}-{r}x{s}": dict(
        Tq=t, R=r, S=s, Hi=64, Qb=min(bits, 8) * 16, Ps=64, K=512, bits=bits, full=1, paged=1
    )
    for bits in (8, 4)
    for t, r, s in ((1, 1, 8192), (1, 1, 65536), (1, 1, 262144), (32, 32, 65536), (32, 32, 262144))
}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    Tq, R, S, bits = (dims[n] for n in ("Tq", "R", "S", "bits"))
    k_len = torch.full((Tq,), S, dtype=torch.int32) if dims.get("full") else inputs.lengths(gen, Tq, S)
    ids = inputs.integers(gen, 0, R - 1, Tq) if "request_ids" in features else None
    table, stored = None, (R, S)
    if "paged" in features:
        pages = -(-S // dims["Ps"])
        longest = torch.zeros(R, dtype=torch.int32)  # (R,)
        # The same table is for a call without request_ids, by which a test sees what they do.
        for owner in (torch.arange(Tq) * R // max(Tq, 1), *([] if ids is None else [ids])):
            longest = longest.scatter_reduce(0, owner.long(), k_len, "amax")
        stored = (R * pages + 1, dims["Ps"])
        table = inputs.block_table(gen, longest, dims["Ps"], stored[0], pages)
    q, q_scale = _coded(gen, dtype, bits, Tq, dims["Hi"], dims["Qb"])
    k, k_scale = _coded(gen, dtype, bits, *stored, dims["Qb"])
    # The more weights differ, the fewer scores are equal.
    weights = inputs.integers(gen, -60, 60, Tq, dims["Hi"]).to(torch.float32 if bits == 16 else dtype)
    q_scale = q_scale if bits == 4 or dims.get("q_scale") else None
    return (q, k, weights, k_len, ids, table, q_scale, k_scale), dict(format=FORMATS[bits], topk=dims["K"])


def _coded(
    gen: torch.Generator, dtype: torch.dtype, bits: int, *shape: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of integers from -2 to 2 in a format, and their scales."""
    if bits == 4:
        return mxfp4.quantize(inputs.integers(gen, -2, 2, *shape[:-1], 2 * shape[-1]).float())
    x = inputs.integers(gen, -2, 2, *shape)
    if bits == 16:
        return x.to(dtype), None
    return x.to(torch.float8_e4m3fn), inputs.integers(gen, 0, 1, *shape[:-1], 1).add(1).float()


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read q, its weights and k with its scales once, write the indices."""
    Qb, bits = dims["Qb"], dims["bits"]
    row = {16: Qb * dtype.itemsize, 8: Qb + 4, 4: Qb + Qb // 16}[bits]
    weight = 4 if bits == 16 else dtype.itemsize
    return dims["R"] * dims["S"] * row + dims["Tq"] * (dims["Hi"] * (row + weight) + 4 + dims["K"] * 4)


def flops(dims: dict[str, int]) -> int:
    """One product over the numbers of a head for each head and entry, then relu, weight and sum, and a comparison."""
    channels = dims["Qb"] * (2 if dims["bits"] == 4 else 1)
    return dims["Tq"] * dims["S"] * (dims["Hi"] * (2 * channels + 3) + 1)


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    facts = scores.sample(d, row)
    return facts | {"K": d.pick((1, 2, 9, 64, 512, facts["S"], facts["S"] + 3)) or 1}


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Those of indexer_scores, made integers; NaN and signs of scales stay."""
    (q, k, weights, k_len, ids, table, q_scale, k_scale), named = scores.generate(f, gen)
    size = (f["H"] * f["Qb"]) ** 0.5  # what weights were divided by
    weights = (weights.float() * (30 * size)).round().clamp(-60, 60).to(weights.dtype)
    q, q_scale = _integers(q, q_scale)
    k, k_scale = _integers(k, k_scale)
    return (q, k, weights, k_len, ids, table, q_scale, k_scale), named | dict(topk=f["K"])


def _integers(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The nearest rows of integers from -2 to 2, and scales of 1 or 2."""
    if x.dtype == torch.uint8:
        assert scale is not None
        codes, fitting = mxfp4.quantize(mxfp4.dequantize(x, scale).float().nan_to_num(0).round().clamp(-2, 2))
        return codes, fitting.masked_fill(scale == 255, 255)
    if scale is not None:
        scale = torch.where(scale.abs() > 1, scale.sign() * 2, scale.sign()).masked_fill(scale.isnan(), torch.nan)
    return x.float().round().clamp(-2, 2).to(x.dtype), scale
