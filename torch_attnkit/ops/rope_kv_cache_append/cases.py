"""Inputs of rope_kv_cache_append for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.oracle import sampling

# full=1: no slots, caches are full; joined=1: heads are views of one product of q, k and v; one=1: all sequences share
# a slot and angles; long=1: slots are int64; absent=1: some sequences are skipped; t_angles=1: cos and sin in the model
# dtype; sink: none, 1 in the model dtype, 2 in float32.
PARITY = {
    "apart": dict(B=5, Hq=3, Hkv=3, D=48, Dv=24, S=7, R2=8, absent=1, sink=2),
    "gptoss": dict(B=2, Hq=16, Hkv=2, D=64, Dv=64, S=20, R2=32, joined=1, t_angles=1, long=1, one=1, sink=1),
    "window": dict(B=2, Hq=16, Hkv=2, D=64, Dv=64, S=128, R2=32, joined=1, full=1, t_angles=1, one=1, sink=1),
    "odd": dict(B=3, Hq=6, Hkv=2, D=33, Dv=20, S=9, R2=5, full=1),
    "long": dict(B=1, Hq=2, Hkv=1, D=128, Dv=128, S=300, R2=64, full=1, one=1),
}
DEGENERATE = {
    "one": dict(B=1, Hq=1, Hkv=1, D=1, Dv=1, S=1, R2=0, full=1),
    "no-sequences": dict(B=0, Hq=4, Hkv=2, D=64, Dv=64, S=8, R2=32, sink=1),
    "no-heads": dict(B=2, Hq=0, Hkv=2, D=64, Dv=64, S=8, R2=32),
    "no-rows": dict(B=2, Hq=4, Hkv=2, D=64, Dv=64, S=0, R2=32, full=1),
    "no-kv-heads": dict(B=2, Hq=4, Hkv=0, D=64, Dv=64, S=8, R2=32, sink=1),
}
_GPTOSS = dict(Hq=64, Hkv=8, D=64, Dv=64, R2=32, joined=1, t_angles=1, one=1, sink=1)
BENCH = {
    f"gptoss-{name}-{b}": _GPTOSS | dict(B=b, S=rows, full=full, long=1)
    for name, rows, full in (("window", 128, 1), ("context", 4096, 0))
    for b in (1, 8, 64)
}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    B, S, Hq, Hkv = (dims[axis] for axis in ("B", "S", "Hq", "Hkv"))
    heads = _heads(dims, lambda *shape: torch.randn(*shape, generator=gen).to(dtype))
    caches = (torch.randn(B, Hkv, S, dims[d], generator=gen).to(dtype) for d in ("D", "Dv"))
    rows = 1 if dims.get("one") else B
    angle = 6.28 * torch.rand(rows, 1, dims["R2"], generator=gen)
    cos, sin = (t.to(dtype if dims.get("t_angles") else torch.float32) for t in (angle.cos(), angle.sin()))
    slot = None
    if not dims.get("full"):
        slot = torch.randint(0, S, (rows,), generator=gen) if S else torch.full((rows,), -1)
        slot[1 :: 2 if dims.get("absent") else max(B, 2)] = -1
        slot = slot.to(torch.int64 if dims.get("long") else torch.int32)
    sink = None
    if dims.get("sink"):
        sink = torch.randn(Hq, generator=gen).to(dtype if dims["sink"] == 1 else torch.float32)
    return (*heads, *caches, cos, sin, slot, sink), {}


def _heads(dims: dict[str, int], randn: Any) -> tuple[torch.Tensor, ...]:
    B, Hq, Hkv, D, Dv = (dims[axis] for axis in ("B", "Hq", "Hkv", "D", "Dv"))
    if not dims.get("joined"):
        return randn(B, Hq, D), randn(B, Hkv, D), randn(B, Hkv, Dv)
    q, k, v = randn(B, (Hq + Hkv) * D + Hkv * Dv).split((Hq * D, Hkv * D, Hkv * Dv), -1)
    return q.unflatten(-1, (Hq, D)), k.unflatten(-1, (Hkv, D)), v.unflatten(-1, (Hkv, Dv))


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Heads read and written; full caches read and written but for a row."""
    rows = max(dims["S"] - 1, 0) if dims.get("full") else 0
    kv = dims["Hkv"] * (dims["D"] + dims["Dv"]) * (1 + rows)
    return 2 * dims["B"] * (dims["Hq"] * dims["D"] + kv) * dtype.itemsize


def flops(dims: dict[str, int]) -> int:
    """Six a pair."""
    return 6 * dims["B"] * (dims["Hq"] + dims["Hkv"]) * dims["R2"]


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    k = d.kernel
    facts: sampling.Facts = dict(
        dtype=k.choice(row.dtypes.split()), ids=k.choice(("i32", "i64")), full=k.choice((0, 1)),
        Hkv=k.choice((1, 2, 3, 8)), D=k.choice((1, 7, 33, 64, 96, 128, 256)), t_angles=k.choice((0, 1)),
        sinks=k.choice((0, 1, 2)), joined=k.choice((0, 1)),
    )  # fmt: skip
    facts |= dict(Dv=k.choice((facts["D"], facts["D"], 24, 64)), Hq=facts["Hkv"] * k.choice((1, 3, 8)))
    facts |= dict(R2=facts["D"] // k.choice((2, 2, 2, 4, 1000)))
    most = max(1, min(200, d.limits.terms // (64 * facts["Hkv"] * (facts["D"] + facts["Dv"]))))
    facts |= dict(B=0 if d.sometimes(0.02) else d.size(max(1, min(most, 9))), one=d.pick((0, 1)))
    facts |= dict(S=d.size(max(1, most // max(facts["B"], 1))), absent=d.pick((0, 0, 2, 3)))
    return facts | {"seed": d.call.randrange(1 << 30), "k_cache.at": d.layout(4), "slot.at": d.layout(1)}


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dims = {k: v for k, v in f.items() if isinstance(v, int)}
    randn = lambda *shape: sampling.cast(sampling.randn(gen, *shape), f["dtype"])
    heads = _heads(dims, randn)
    caches = (randn(f["B"], f["Hkv"], f["S"], f[d]) for d in ("D", "Dv"))
    rows = 1 if f.get("one") else f["B"]
    angles = (2 * torch.rand(rows, 1, f["R2"], generator=gen) - 1 for _ in range(2))
    cos, sin = (sampling.cast(t, f["dtype"] if f.get("t_angles") else "f32") for t in angles)
    slot = None
    if not f.get("full"):
        slot = torch.randint(0, f["S"], (rows,), generator=gen) if f["S"] else torch.full((rows,), -1)
        if f.get("absent"):
            slot[:: f["absent"]] = -1
        slot = slot.to(DTYPES[f["ids"]])
    sink = None
    if f.get("sinks"):
        sink = sampling.cast(sampling.randn(gen, f["Hq"]), f["dtype"] if f["sinks"] == 1 else "f32")
    return (*heads, *caches, cos, sin, slot, sink), {}
