"""Inputs of merge_partials for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.oracle import inputs, sampling

PARITY = {
    "two": dict(P=2, R=5, H=3, Dv=64),
    "many": dict(P=17, R=3, H=8, Dv=128),
    "odd": dict(P=3, R=7, H=5, Dv=33),
    "wide": dict(P=65, R=2, H=3, Dv=520),
}
DEGENERATE = {
    "one": dict(P=1, R=1, H=1, Dv=64),
    "no-parts": dict(P=0, R=2, H=2, Dv=64),
    "no-columns": dict(P=2, R=2, H=2, Dv=0),
    "empty": dict(P=2, R=0, H=4, Dv=64),
}
EXTRAS = (
    ("nan:out_partial", "odd", "all"),
    ("nan:out_partial", "many"),
    ("nan:lse_partial", "odd", "all"),
    ("lse_partial:inf", "odd", "all"),
    ("lse_partial:inf", "many"),
    ("lse_partial:inf", "wide", "row_sum"),
    ("nan:row_sum", "odd", "row_sum"),
    ("nan:sink", "odd", "sink"),
    ("sink:-inf", "odd", "all"),
    ("sink:inf", "many", "sink"),
)
BENCH = {
    f"{p}x{r}x{h}x{d}": dict(P=p, R=r, H=h, Dv=d)
    for p, r, h, d in ((16, 1, 32, 128), (8, 128, 32, 128), (2, 4096, 64, 512), (2, 8192, 32, 128))
}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    P, R, H = dims["P"], dims["R"], dims["H"]
    lse = inputs.normal(gen, torch.float32, P, R, H) * 3
    lse[torch.rand(P, R, H, generator=gen) < 0.2] = -torch.inf  # parts that saw nothing
    lse[:, 1::4] = -torch.inf  # rows of which no part saw anything
    row_sum = (1 + 9 * torch.rand(P, R, H, generator=gen)).masked_fill(lse == -torch.inf, 0.0)
    args = (
        inputs.normal(gen, dtype, P, R, H, dims["Dv"]),
        lse,
        inputs.normal(gen, torch.float32, H) if "sink" in features else None,
        row_sum if "row_sum" in features else None,
    )
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    return args, dict(dtype=other if "dtype" in features else None)


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read the partials and their lse once, write out and lse."""
    rows = dims["R"] * dims["H"]
    return (dims["P"] + 1) * rows * (dims["Dv"] * dtype.itemsize + 4)


def flops(dims: dict[str, int]) -> int:
    """One multiply and one add an element."""
    return 2 * dims["P"] * dims["R"] * dims["H"] * dims["Dv"]


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    k = d.kernel
    facts: sampling.Facts = dict(
        dtype=k.choice(row.dtypes.split()), P=k.choice((0, 1, 2, 3, 5, 16, 17, 33, 64)),
        Dv=k.choice((1, 8, 33, 64, 96, 128, 129, 256, 512, 1000)), out=k.choice(("", "", "f32", "f16", "bf16")),
        row_sum=k.choice((0, 1)), sink=d.pick(tuple(sampling.SINKS)) if k.random() < 0.5 else "",
    )  # fmt: skip
    most = max(1, d.limits.terms // (max(facts["P"], 1) * facts["Dv"] * 64))
    R = 0 if d.sometimes(0.02) else d.size(min(most, d.limits.keys))
    H = 0 if d.sometimes(0.02) else d.pick([h for h in (1, 2, 3, 5, 8, 32) if h == 1 or h * R <= most])
    facts |= dict(R=R, H=H, lse_by=d.pick((1, 3, 3, 300)), hidden=d.pick(("", "nan", "inf")))
    facts["empty"] = d.pick(("", "positive"))
    facts |= {"seed": d.call.randrange(1 << 30), "out_partial.at": d.layout(4, (0, 1, 2))}
    return facts | {f"{name}.at": d.layout(3, (0, 1)) for name in ("lse_partial", "row_sum")}


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``lse_by`` is the deviation of lse; a fifth of the parts saw nothing, and of every fourth row none did. ``empty``
    is the lse of every other one of these; the others have -inf."""
    P, R, H = f["P"], f["R"], f["H"]
    lse, empty = sampling.randn(gen, P, R, H) * f["lse_by"], torch.rand(P, R, H, generator=gen) < 0.2
    empty[:, 1::4] = True
    at = f.get("lse_partial.at", "")
    seen = ~empty
    if sampling.expanded(at):  # a part counts if any that shares its lse does
        seen = seen.any(sampling.expanded(at)[0], keepdim=True).expand(P, R, H)
    sums = (1 + 9 * torch.rand(P, R, H, generator=gen)).masked_fill(~seen, 0.0)
    sums = sums if not sampling.expanded(f.get("row_sum.at", "")) else sums + 1
    out = sampling.hide(sampling.randn(gen, P, R, H, f["Dv"]), seen, f, "out_partial")
    args = (
        sampling.cast(out, f["dtype"]),
        _without_keys(lse, seen, torch.inf if f.get("empty") else -torch.inf),
        sampling.sink(f, gen, H),
        sums if f["row_sum"] else None,
    )
    return args, dict(dtype=DTYPES[f["out"]] if f["out"] else None)


def _without_keys(lse: torch.Tensor, seen: torch.Tensor, empty: float) -> torch.Tensor:
    """``lse`` (P, R, H) with -inf where ``seen`` is false, and ``empty`` in the partials of odd number."""
    lse = lse.masked_fill(~seen, -torch.inf)
    lse[1::2] = lse[1::2].masked_fill(~seen[1::2], empty)
    return lse
