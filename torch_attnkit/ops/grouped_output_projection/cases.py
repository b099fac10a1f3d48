"""Inputs of grouped_output_projection for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.oracle import fp4, sampling

FORMATS = {0: "none", 16: "nvfp4", 32: "mxfp4"}

# Kn numbers per group and token; blk as in op.py, 0 the model dtype, 16 NVFP4, 32 MXFP4; cast=1: out in another dtype.
# A Kn of whole steps (whole: multiples of 128) needs no bound on K, as in DeepSeek-V4's 4096.
PARITY = {
    "plain": dict(Tq=5, G=3, Kn=96, R=7, blk=0),
    "nvfp4": dict(Tq=5, G=3, Kn=80, R=10, blk=16),
    "mxfp4": dict(Tq=130, G=2, Kn=160, R=3, blk=32),
    "nvfp4_stages": dict(Tq=40, G=2, Kn=2320, R=70, blk=16),
    "mxfp4_few": dict(Tq=17, G=3, Kn=544, R=130, blk=32),
    "nvfp4_whole": dict(Tq=70, G=1, Kn=256, R=136, blk=16),
    "mxfp4_whole": dict(Tq=9, G=2, Kn=384, R=72, blk=32),
    "tiles": dict(Tq=150, G=2, Kn=208, R=264, blk=0),
    "few": dict(Tq=33, G=2, Kn=1040, R=100, blk=0),
    "cast": dict(Tq=4, G=2, Kn=64, R=5, blk=0, cast=1),
}
DEGENERATE = {
    "one": dict(Tq=1, G=1, Kn=32, R=1, blk=0),
    "no_columns": dict(Tq=2, G=2, Kn=0, R=3, blk=0),
    "empty": dict(Tq=0, G=2, Kn=64, R=4, blk=0),
}
BENCH = {
    f"{FORMATS[blk]}-{g}-{t}": dict(Tq=t, G=g, Kn=4096, R=1024, blk=blk)
    for blk in FORMATS
    for g in (8, 16)
    for t in (1, 32, 128, 4096)
}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    Tq, G, Kn, R, blk = (dims[n] for n in ("Tq", "G", "Kn", "R", "blk"))
    if not blk and {"swizzled", "global_scale"} & set(features):
        blk = 32 if Kn % 32 == 0 and "global_scale" not in features else 16  # the model dtype has neither
    format = "nvfp4" if "global_scale" in features else FORMATS[blk]  # only nvfp4 has global scales
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    kwargs: dict[str, Any] = dict(format=format, dtype=dtype)
    if format == "none":
        kwargs["dtype"] = other if dims.get("cast") else None
        o = torch.randn(Tq, G, Kn, generator=gen).to(dtype)
        return (o, (torch.randn(G, R, Kn, generator=gen) * max(Kn, 1) ** -0.5).to(dtype)), kwargs
    layout = kwargs["scale_layout"] = "128x4" if "swizzled" in features else "linear"
    go, gw = (fp4.global_scales(gen) if "global_scale" in features else None for _ in range(2))
    return _coded(gen, format, layout, (Tq, G, Kn, R), go, gw), kwargs


def _coded(
    gen: torch.Generator, format: str, layout: str, sizes: tuple[int, int, int, int], go: Any, gw: Any
) -> tuple[Any, ...]:
    """The tensors of an FP4 call of (Tq, G, K, R), with or without global scales."""
    Tq, G, K, R = sizes
    o, o_scale = fp4.coded(gen, format, layout, (G, Tq, K), go)
    wo_a, wo_scale = fp4.coded(gen, format, layout, (G, R, K), gw)
    o_scale = o_scale.transpose(0, 1).contiguous() if layout == "linear" else o_scale
    return o.transpose(0, 1).contiguous(), wo_a, o_scale, wo_scale, go, gw


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read o and wo_a with their scales, write out."""
    blk, rows = dims["blk"], dims["G"] * (dims["Tq"] + dims["R"])
    row = dims["Kn"] // 2 + dims["Kn"] // blk if blk else dims["Kn"] * dtype.itemsize
    return rows * row + dims["Tq"] * dims["G"] * dims["R"] * dtype.itemsize


def flops(dims: dict[str, int]) -> int:
    """One product, two operations a term."""
    return 2 * dims["Tq"] * dims["G"] * dims["R"] * dims["Kn"]


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    k, coded = d.kernel, "global_scale" in row.features
    facts: sampling.Facts = dict(G=d.pick((1, 1, 2, 3, 8)), N=d.size(300))
    if coded:
        facts |= dict(format=k.choice(("nvfp4", "mxfp4")), out=k.choice(row.dtypes.split()))
        facts |= dict(swizzled=k.choice((0, 1)), globals=k.choice((0, 1, 2, 3)))
    else:
        facts |= dict(dtype=k.choice(row.dtypes.split()), out=k.choice(("", *row.dtypes.split())))
    step = fp4.BLOCK[facts["format"]] if coded else 1
    facts["K"] = 0 if d.sometimes(0.02) else step * d.size(600 // step)
    most = max(1, min(300, d.limits.terms // (facts["G"] * facts["N"] * max(facts["K"], 64))))
    facts |= dict(T=0 if d.sometimes(0.02) else d.size(most), seed=d.call.randrange(1 << 30))
    facts |= {"o.at": d.layout(3, (0, 1)), "wo_a.at": d.layout(3, (0,))}
    return facts | ({f"{name}.at": d.layout(3) for name in ("o_scale", "wo_scale")} if coded else {})


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``format``: "" of numbers in the model dtype. ``globals``: the global scales that there are, as bits."""
    K, G = f["K"], f.get("G") or 1
    out = DTYPES[f["out"]] if f["out"] else None
    if format := f.get("format", ""):
        layout = "128x4" if f["swizzled"] else "linear"
        go, gw = (fp4.global_scales(gen) if f["globals"] & bit and format == "nvfp4" else None for bit in (1, 2))
        return _coded(gen, format, layout, (f["T"], G, K, f["N"]), go, gw), dict(
            format=format, scale_layout=layout, dtype=out
        )
    o, wo_a = sampling.randn(gen, f["T"], G, K), sampling.randn(gen, G, f["N"], K) * max(K, 1) ** -0.5
    return tuple(sampling.cast(t, f["dtype"]) for t in (o, wo_a)), dict(dtype=out)
