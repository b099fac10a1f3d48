"""Inputs of route_softmax for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.oracle import inputs, sampling

PARITY = {
    "all": dict(R=3, E=7, K=7),
    "odd": dict(R=5, E=144, K=6),
    "gptoss": dict(R=9, E=128, K=4),
    "qwen3_next": dict(R=2, E=512, K=10),
    "rows": dict(R=2117, E=24, K=3),
    "long": dict(R=3, E=1400, K=5),
    "deep": dict(R=2, E=70, K=40),
}
DEGENERATE = {
    "one": dict(R=1, E=1, K=1),
    "empty": dict(R=0, E=16, K=2),
}
EXTRAS = (("logits:-inf", "odd", "all"), ("logits:-inf", "gptoss"))
BENCH = {
    f"{name}-{r}": dict(R=r, E=e, K=k, softmax_first=qwen, renormalize=qwen, route_scale=1)
    for name, e, k, qwen in (("gptoss", 128, 4, 0), ("qwen3", 128, 8, 1), ("qwen3_next", 512, 10, 1))
    for r in (1, 64, 1024, 8192)
}
BENCH |= {f"gptoss20b-{r}": BENCH["gptoss-1"] | dict(R=r, E=32) for r in (1, 512)}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs = dict(
        topk=dims["K"],
        softmax_first="softmax_first" in features,
        renormalize="renormalize" in features,
        route_scale=1.5,
    )
    return (inputs.normal(gen, dtype, dims["R"], dims["E"]),), kwargs


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read logits, write weights and indices."""
    return dims["R"] * (dims["E"] * dtype.itemsize + dims["K"] * 8)


def flops(dims: dict[str, int]) -> int:
    """Exponential, difference and sum of an expert, and one comparison an expert and choice."""
    return dims["R"] * dims["E"] * (3 + dims["K"])


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    k = d.kernel
    E, K = sampling.experts(k)
    facts: sampling.Facts = dict(dtype=k.choice(row.dtypes.split()), E=E, K=K)
    facts |= {name: k.choice((0, 1)) for name in ("over_all", "renormalize")}
    facts |= dict(R=sampling.tokens(d, E * K), by=d.pick((1, 1, 8, 100)), steps=d.pick((0, 0, 1, 4)))
    facts |= dict(off=d.pick(("", "", "some", "row")), route_scale=d.pick((1.0, 1.5, -2.0, 0.0)))
    return facts | {"seed": d.call.randrange(1 << 30), "logits.at": d.layout(2, (0,))}


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (sampling.cast(sampling.logits(f, gen), f["dtype"]),), dict(
        topk=f["K"], softmax_first=bool(f["over_all"]), renormalize=bool(f["renormalize"]), route_scale=f["route_scale"]
    )
