"""Inputs of route_sqrt_softplus for parity and bench."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.oracle import inputs, routing, sampling

PARITY = {
    "all": dict(R=3, E=7, K=7),
    "odd": dict(R=5, E=144, K=6),
    "flash": dict(R=9, E=256, K=6),
    "pro": dict(R=2, E=384, K=6),
    "rows": dict(R=2117, E=24, K=3),
    "long": dict(R=3, E=1400, K=5),
    "deep": dict(R=2, E=70, K=40),
}
DEGENERATE = {
    "one": dict(R=1, E=1, K=1),
    "empty": dict(R=0, E=16, K=2),
}
EXTRAS = (
    ("logits:-inf", "odd", "all"),
    ("logits:-inf", "flash"),
    ("bias:inf", "odd", "bias"),
    ("bias:-inf", "flash", "bias"),
)
BENCH = {f"{e}-{r}": dict(R=r, E=e, K=6, bias=1, renormalize=1) for e in (256, 384) for r in (1, 64, 1024, 8192)}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    logits = inputs.normal(gen, dtype, dims["R"], dims["E"])
    bias = inputs.normal(gen, torch.float32, dims["E"]) if "bias" in features else None
    logits = _cleared(logits, bias, lambda: inputs.normal(gen, dtype, dims["R"], dims["E"]))
    return (logits, bias), dict(topk=dims["K"], route_scale=1.5, renormalize="renormalize" in features)


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read logits and bias, write weights and indices."""
    return dims["R"] * (dims["E"] * dtype.itemsize + dims["K"] * 8) + dims["E"] * 4


def flops(dims: dict[str, int]) -> int:
    """The score counted as eight operations an expert, one comparison an expert and choice."""
    return dims["R"] * dims["E"] * (8 + dims["K"])


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    k = d.kernel
    E, K = sampling.experts(k)
    facts: sampling.Facts = dict(dtype=k.choice(row.dtypes.split()), E=E, K=K, renormalize=k.choice((0, 1)))
    facts["bias"] = d.pick(("plain", "plain", "same", "inf", "-inf")) if k.random() < 0.6 else ""
    facts |= dict(R=sampling.tokens(d, E * K), by=d.pick((1, 1, 4, 20, 200)), steps=d.pick((0, 0, 1, 4)))
    facts |= dict(off=d.pick(("", "", "some", "row")), route_scale=d.pick((1.0, 1.5, -2.0, 0.0)))
    facts |= {"seed": d.call.randrange(1 << 30), "logits.at": d.layout(2, (0,)), "bias.at": d.layout(1)}
    return facts


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``bias`` is plain numbers, the same for all experts, or plain with every third of them infinite."""
    bias = None
    if f["bias"]:
        bias = sampling.randn(gen, f["E"]) if f["bias"] != "same" else torch.full((f["E"],), 0.25)
        if f["bias"].endswith("inf"):
            bias[::3] = float(f["bias"])
    fresh = lambda facts: sampling.cast(sampling.logits(facts, gen), f["dtype"])
    logits = _cleared(fresh(f), bias, lambda: fresh(f | dict(steps=0, off="")))
    return (logits, bias), dict(topk=f["K"], route_scale=f["route_scale"], renormalize=bool(f["renormalize"]))


_TRIES = 12  # of drawing logits again; more of them would change nothing, and the row is switched off
# By which two float32 results for one expert may differ: the exponential's, the logarithm's, the root's, the sum's.
_ROUNDINGS = 8


def _cleared(logits: torch.Tensor, bias: torch.Tensor | None, fresh: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The logits, others where only the rounding of a key would decide the order: there any order is right."""
    for _ in range(_TRIES):
        doubtful = _doubtful(logits, bias)
        if not bool(doubtful.any()):
            return logits
        logits = torch.where(doubtful, fresh(), logits)
    return logits.masked_fill(_doubtful(logits, bias).any(-1, keepdim=True), -torch.inf)


def _doubtful(logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """(R, E): experts whose key is another's but for roundings, so that their order is a matter of luck.

    Not those that must tie: equal logits with equal biases.
    """
    s = routing.sqrt_softplus(logits.double())  # (R, E)
    b = s.new_zeros(logits.shape[1]) if bias is None else bias
    key, order = (s + b).sort(dim=-1, descending=True, stable=True)
    s, x, b = s.gather(-1, order), logits.gather(-1, order), b[order]
    size = (s[:, 1:] + key[:, 1:].abs()).maximum(s[:, :-1] + key[:, :-1].abs())
    gap = key[:, :-1] - key[:, 1:]  # infinite or nan beside infinite biases, which nobody confuses
    near = gap.isfinite() & (gap <= _ROUNDINGS * 2.0**-23 * size)
    near &= (x[:, 1:] != x[:, :-1]) | (b[:, 1:] != b[:, :-1])
    found = torch.nn.functional.pad(near, (1, 0))
    return torch.zeros_like(found).scatter(-1, order, found)
