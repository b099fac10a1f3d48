"""Inputs of indexer_topk for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.oracle import inputs, sampling

# ties: scores are small integers, so that most places are decided by index; 2: every third is -inf, every fourth NaN.
PARITY = {
    "ties": dict(Tq=5, S=130, K=17, ties=1),
    "odd": dict(Tq=3, S=1037, K=512, ties=0),
    "short": dict(Tq=4, S=100, K=512, ties=0),
    "holes": dict(Tq=6, S=260, K=100, ties=2),
    "cluster": dict(Tq=2, S=20008, K=64, ties=1),
    "rows": dict(Tq=140, S=520, K=33, ties=1),
}
DEGENERATE = {
    "one": dict(Tq=1, S=1, K=1, ties=0),
    "no_entries": dict(Tq=2, S=0, K=4, ties=0),
    "empty": dict(Tq=0, S=64, K=8, ties=0),
}
# f32: float32 scores whatever the model dtype, as indexer_scores writes them.
BENCH = {
    f"{t}x{s}-{k}": dict(Tq=t, S=s, K=k, ties=0, f32=1)
    for t, s, k in (
        (1, 2048, 512),
        (1, 8192, 512),
        (1, 65536, 512),
        (1, 262144, 512),
        (1, 1048576, 512),
        (32, 65536, 512),
        (64, 8192, 512),
        (128, 32768, 1024),
        (4096, 8192, 512),
        (4096, 32768, 512),
    )
}


def _dtype(dims: dict[str, int], dtype: torch.dtype) -> torch.dtype:
    """The dtype of the scores."""
    return torch.float32 if dims.get("f32") else dtype


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    Tq, S, dtype = dims["Tq"], dims["S"], _dtype(dims, dtype)
    scores = inputs.integers(gen, -2, 2, Tq, S).to(dtype) if dims["ties"] else inputs.normal(gen, dtype, Tq, S)
    if dims["ties"] == 2:
        scores[:, ::3], scores[:, ::4], scores[:, ::8] = -torch.inf, torch.nan, -torch.nan
    k_len = inputs.lengths(gen, Tq, S) if "k_len" in features else None
    return (scores, k_len), dict(topk=dims["K"])


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read the scores once, write the indices."""
    return dims["Tq"] * (dims["S"] * _dtype(dims, dtype).itemsize + dims["K"] * 4)


def flops(dims: dict[str, int]) -> int:
    """One comparison a score."""
    return dims["Tq"] * dims["S"]


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    k = d.kernel
    facts: sampling.Facts = dict(dtype=k.choice(row.dtypes.split()))
    # Of one size, so that signatures share kernels: a block, a block of many loads, a cluster, more than it holds.
    kind = k.choice((1, 1, 2, 3))
    facts["S"] = {1: k.randint(0, 1500), 2: 8 * k.randint(200, 1100), 3: 8 * k.randint(2000, 3400)}[kind]
    facts["T"] = d.pick((1, 1, 2, 3, 5)) if kind > 1 or k.random() < 0.7 else 140
    facts["K"] = d.pick((1, 2, 7, 31, 32, 33, 512, facts["S"], facts["S"] + 3)) or 1
    facts |= dict(by=d.pick((1, 1, 4, 200)), steps=d.pick((0, 0, 1, 4)), off=d.pick(("", "", "some", "row")))
    facts["nan"] = "scores" if d.sometimes(0.1) else ""
    facts["kv_len"] = d.ragged(min(facts["T"], 8), facts["S"]) if k.random() < 0.5 else ""
    facts |= dict(hidden=d.pick(("nan", "inf")) if d.sometimes(0.6) else "", seed=d.call.randrange(1 << 30))
    return facts | {"scores.at": d.layout(2, (0,))}


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``nan``: every seventh score is NaN, of either sign."""
    x = sampling.logits(f | dict(R=f["T"], E=f["S"]), gen)  # (Tq, S)
    if f["nan"]:
        x[:, ::7] = torch.nan
        x[:, ::14] = -torch.nan
    k_len = sampling.counts(f["kv_len"], f["T"], f["S"])
    if k_len is not None:
        x = x.masked_fill(torch.arange(f["S"]) >= k_len[:, None], float(f["hidden"] or 0))
    return (x.to(DTYPES[f["dtype"]]), k_len), dict(topk=f["K"])
