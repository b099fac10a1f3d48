"""Inputs of rope_kv_cache_write for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.formats import kv_cache
from torch_attnkit.oracle import cache_rows, fp4, fp4_rows, sampling

# fmt, long and full as in oracle/cache_rows.py; t_angles=1: cos and sin in the model dtype. D - rope is a multiple of
# 16, so that the blocks of nvfp4, of which a global scale is, fit.
PARITY = {
    "plain": dict(Tq=7, Hq=3, D=40, Nc=20, rope=24, fmt=0, long=1),
    "fp8": dict(Tq=5, Hq=2, D=192, Nc=9, rope=64, fmt=1),
    "nvfp4": dict(Tq=5, Hq=5, D=112, Nc=9, rope=32, fmt=2, t_angles=1),
    "mxfp4": dict(Tq=4, Hq=4, D=512, Nc=9, rope=64, fmt=3, long=1),
    "wide": dict(Tq=3, Hq=2, D=1024, Nc=4, rope=512, fmt=0),
    "many": dict(Tq=150, Hq=33, D=16, Nc=160, rope=0, fmt=0),
}
DEGENERATE = {
    "one": dict(Tq=1, Hq=1, D=8, Nc=1, rope=8, fmt=0),
    "no_heads": dict(Tq=2, Hq=0, D=32, Nc=3, rope=16, fmt=2),
    "no_slots": dict(Tq=2, Hq=3, D=16, Nc=0, rope=16, fmt=0),
    "empty": dict(Tq=0, Hq=2, D=64, Nc=4, rope=16, fmt=2),
}
EXTRAS = tuple((f"nan:{name}", "plain") for name in ("q", "kv", "cache", "cos", "sin"))
# A layer of DeepSeek-V4-Flash (64 heads) and of Pro (128).
BENCH = {
    f"{name}-{t}x{h}": dict(Tq=t, Hq=h, D=512, Nc=max(2 * t, 64), rope=64, fmt=fmt, full=1)
    for name, fmt in (("fp8", 1), ("bf16", 0))
    for h in (64, 128)
    for t in (1, 32, 128, 4096)
}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    Tq, D, Nc, rope = dims["Tq"], dims["D"], dims["Nc"], dims["rope"]
    format = "nvfp4" if "global_scale" in features else kv_cache.FORMATS[dims["fmt"]]
    cache = torch.randn(Nc, D, generator=gen).to(dtype)
    if format != "none":
        size = kv_cache.row_bytes(format, D, rope)
        cache = torch.randint(0, 256, (Nc, size), generator=gen, dtype=torch.uint8)
    slot = torch.full((Tq,), -1, dtype=torch.int64 if dims.get("long") else torch.int32)
    slot[:Nc] = torch.randperm(Nc, generator=gen)[:Tq]
    if not dims.get("full"):
        slot[2::3] = -1
    angle = 6.28 * torch.rand(Tq, rope // 2, generator=gen)  # (Tq, R2)
    angle_dtype = dtype if dims.get("t_angles") else torch.float32
    args = (
        torch.randn(Tq, dims["Hq"], D, generator=gen).to(dtype),
        fp4.spread(gen, dtype, Tq, D),
        cache,
        slot,
        angle.cos().to(angle_dtype),
        angle.sin().to(angle_dtype),
        fp4.global_scales(gen) if "global_scale" in features else None,
    )
    return args, dict(eps=1e-5, format=format, rope_dim=rope)


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """q read and written, kv read, the rows written, angles and slots read."""
    D, rope = dims["D"], dims["rope"]
    row = kv_cache.row_bytes(kv_cache.FORMATS[dims["fmt"]], D, rope) if dims["fmt"] else D * dtype.itemsize
    return dims["Tq"] * ((2 * dims["Hq"] + 1) * D * dtype.itemsize + row + 4 * rope + 4)


def flops(dims: dict[str, int]) -> int:
    """A square, a sum and a product a channel of q; six operations a pair; two an encoded channel."""
    Hq, D, rope = dims["Hq"], dims["D"], dims["rope"]
    return dims["Tq"] * (3 * Hq * D + 3 * (Hq + 1) * rope + (2 * (D - rope) if dims["fmt"] else 0))


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    """Heads of which some channels, all or none are rotated; rows of every format, and how large numbers are."""
    k = d.kernel
    format = k.choice(kv_cache.FORMATS)
    nope = kv_cache.BLOCK.get(format, 8) * k.choice((0, 1, 1, 2, 3, 5, 7, 7))
    rope = k.choice((0, 8, 16, 24, 64, 64, 64, 72, 256)) or 64 * (nope == 0)
    facts: sampling.Facts = dict(
        dtype=k.choice(row.dtypes.split()), format=format, D=nope + rope, rope=rope, ids=k.choice(("i32", "i64")),
        t_angles=k.choice((0, 1)), H=d.pick((0, 1, 1, 2, 3, 5, 33)), gs="",
    )  # fmt: skip
    if format == "nvfp4" and k.random() < 0.7:
        facts |= dict(gs=d.pick((1.0, 731.37, 1 / 3, 2688.0, 1e-5)))
    most = max(1, min(300, d.limits.terms // (64 * facts["D"] * (facts["H"] + 1))))
    facts |= dict(R=0 if d.sometimes(0.02) else d.size(most), S=d.size(most), absent=d.pick((0, 0, 3, 10)))
    facts |= dict(x_by=d.pick((1, 1, 2.0**-120, 2.0**-135, 2.0**9, 2.0**100)), odd=d.pick(("", "", "nans", "infs")))
    facts |= dict(eps=d.pick((1e-6, 1e-5, 1.0)), q_by=d.pick((1, 1, 0, 1000, 0.001)), nan=d.pick(("", "", "", "q")))
    facts |= {"seed": d.call.randrange(1 << 30), "q.at": d.layout(3, (0, 1)), "kv.at": d.layout(2, (0,))}
    facts |= {"cache.at": d.layout(2), "slot.at": d.layout(1)}
    return facts | {"cos.at": d.layout(2, (0,)), "sin.at": d.layout(2, (0,))}


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How large numbers are, and which are odd, is said of NoPE channels: which bits a NaN has that a rotation makes of
    an infinity, no contract says, and Metal takes sums below 2^-126 for 0."""
    kwargs, T, D, rope = cache_rows.format_of(f), f["R"], f["D"], f.get("rope", 0)
    kv = cache_rows.generate_values(f, gen, T)
    kv[:, D - rope :] = sampling.cast(sampling.randn(gen, T, rope), f["dtype"])
    cache = torch.randint(0, 256, (f["S"], kv_cache.row_bytes(kwargs["format"], D, rope)), generator=gen).byte()
    if kwargs["format"] == "none":
        cache = sampling.cast(sampling.randn(gen, f["S"], D), f["dtype"])
    q = sampling.randn(gen, T, f.get("H") or 0, D) * f.get("q_by", 1)
    if f.get("nan") and q.numel():
        q[-1, 0, -1] = torch.nan
    angles = (2 * torch.rand(T, rope // 2, generator=gen) - 1 for _ in range(2))
    cos, sin = (sampling.cast(t, f["dtype"] if f.get("t_angles") else "f32") for t in angles)
    slot = cache_rows.generate_slots(f, gen, distinct=True)
    args = (sampling.cast(q, f["dtype"]), kv, cache, slot, cos, sin, fp4_rows.global_of(f))
    return args, kwargs | dict(eps=f.get("eps") or 1e-6)
