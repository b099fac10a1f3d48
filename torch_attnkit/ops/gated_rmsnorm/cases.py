"""Inputs of gated_rmsnorm for parity and bench."""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.oracle import inputs, sampling

# R rows (-1: no batch axis), H heads beside them, N features; y32 and w32: y and w are float32 whatever T is.
PARITY = {
    "odd": dict(R=3, H=5, N=127, y32=0, w32=1),
    "heads": dict(R=4, H=8, N=128, y32=1, w32=1),
    "wide": dict(R=2, H=1, N=5000, y32=0, w32=0),
    "cluster": dict(R=2, H=1, N=16392, y32=0, w32=1),
    "rows": dict(R=40, H=1, N=8200, y32=0, w32=0),
    "spread": dict(R=2, H=1, N=40008, y32=0, w32=0),
    "longest": dict(R=1, H=1, N=131080, y32=1, w32=0),
}
DEGENERATE = {
    "one": dict(R=1, H=1, N=1, y32=1, w32=0),
    "no_batch": dict(R=-1, H=1, N=33, y32=1, w32=0),
    "empty": dict(R=0, H=4, N=64, y32=1, w32=0),
}
EXTRAS = (("nan:y", "heads"), ("nan:z", "odd"), ("nan:w", "odd"), ("w:inf", "heads"))
BENCH = {f"qwen3_next-{r}": dict(R=r, H=32, N=128, y32=1, w32=0) for r in (1, 16, 128, 4096, 32768)} | {
    f"{r}x{n}": dict(R=r, H=1, N=n, y32=0, w32=0)
    for r, n in ((8, 4096), (32, 16384), (16384, 4096), (65536, 2048), (262144, 128))
}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    N = dims["N"]
    shape = (N,) if dims["R"] < 0 else (dims["R"], dims["H"], N)
    args = (
        inputs.normal(gen, torch.float32 if dims["y32"] else dtype, *shape),
        inputs.normal(gen, dtype, *shape),
        inputs.normal(gen, torch.float32 if dims["w32"] else dtype, N),
    )
    return args, dict(eps=1e-5)


def _count(dims: dict[str, int]) -> int:
    return math.prod((abs(dims["R"]), dims["H"], dims["N"]))


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read y, z and w once, write out."""
    y, w = (4 if dims[f] else dtype.itemsize for f in ("y32", "w32"))
    return _count(dims) * (y + 2 * dtype.itemsize) + dims["N"] * w


def flops(dims: dict[str, int]) -> int:
    """Square and add; three products; silu counted as four."""
    return 9 * _count(dims)


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    k, few = d.kernel, (1, 2, 31, 33, 64, 127, 128, 129, 256, 500, 1000, 2048)
    facts: sampling.Facts = dict(
        dtype=k.choice(row.dtypes.split()), N=k.choice((*few, *few, 4096, 5000, 8200, 16392, 40008)),
        rank=k.choice((0, 1, 2, 2, 3)), y32=k.choice((0, 1)), w32=k.choice((0, 1)),
    )  # fmt: skip
    most = max(1, d.limits.terms // (facts["N"] * 64))
    axes = [0 if d.sometimes(0.02) else min(d.pick((1, 2, 3, 5, 8, 17, 64)), most) for _ in range(3)]
    while axes[0] * axes[1] * axes[2] > most:
        axes[axes.index(max(axes))] //= 2
    facts |= dict(zip(("A", "B", "C"), axes, strict=True))
    facts |= dict(eps=d.pick((1e-6, 1e-5, 1e-12, 1.0)), y_by=d.pick((1, 1, 0, 1000, 0.001)), z_by=d.pick((1, 1, 30)))
    facts |= dict(nan=d.pick("yz") if d.sometimes(0.1) else "", seed=d.call.randrange(1 << 30))
    facts |= {f"{name}.at": d.layout(facts["rank"] + 1, range(facts["rank"])) for name in "yz"}
    return facts | {"w.at": d.layout(1)}


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch axes are the first ``rank`` of A, B, C; ``nan`` names the tensor of which a row is NaN."""
    shape = (f["A"], f["B"], f["C"])[: f["rank"]] + (f["N"],)
    y, z, w = (
        sampling.randn(gen, *shape) * f["y_by"],
        sampling.randn(gen, *shape) * f["z_by"],
        sampling.randn(gen, f["N"]),
    )
    broken = dict(y=y, z=z).get(f["nan"])
    if broken is not None and broken.numel():
        broken.view(-1, f["N"])[0, -1] = torch.nan
    kinds = ("f32" if f["y32"] else f["dtype"], f["dtype"], "f32" if f["w32"] else f["dtype"])
    return tuple(sampling.cast(t, kind) for t, kind in zip((y, z, w), kinds, strict=True)), dict(eps=f["eps"])
