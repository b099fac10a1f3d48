"""Inputs of inverse_rope_fp4 for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.oracle import fp4, fp4_rows, sampling

# blk as in op.py: 16 NVFP4, 32 MXFP4; t_angles=1: cos and sin in the model dtype.
PARITY = {
    "heads": dict(Tq=5, Hq=6, D=96, R2=16, groups=3, blk=16),
    "mxfp4": dict(Tq=130, Hq=2, D=64, R2=32, groups=1, blk=32, t_angles=1),
    "v4": dict(Tq=3, Hq=4, D=512, R2=32, groups=2, blk=16),
    "no_rope": dict(Tq=3, Hq=2, D=32, R2=0, groups=2, blk=32),
}
DEGENERATE = {
    "one": dict(Tq=1, Hq=1, D=32, R2=1, groups=1, blk=16),
    "empty": dict(Tq=0, Hq=2, D=64, R2=8, groups=1, blk=16),
}
BENCH = {
    f"{name}-{t}x64": dict(Tq=t, Hq=64, D=512, R2=32, groups=8, blk=blk)
    for name, blk in (("nvfp4", 16), ("mxfp4", 32))
    for t in (1, 128, 8192)
}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    angle = 6.28 * torch.rand(dims["Tq"], dims["R2"], generator=gen)  # (Tq, R2)
    angle_dtype = dtype if dims.get("t_angles") else torch.float32
    scaled = "global_scale" in features  # only nvfp4 has one
    args = (
        fp4.spread(gen, dtype, dims["Tq"], dims["Hq"], dims["D"]),
        angle.cos().to(angle_dtype),
        angle.sin().to(angle_dtype),
        fp4.global_scales(gen) if scaled else None,
    )
    return args, dict(
        groups=dims["groups"],
        format="nvfp4" if scaled or dims["blk"] == 16 else "mxfp4",
        scale_layout="128x4" if "swizzled" in features else "linear",
    )


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read o and the angles, write half a byte an element and the scales."""
    n = dims["Tq"] * dims["Hq"] * dims["D"]
    return n * dtype.itemsize + n // 2 + n // dims["blk"] + dims["Tq"] * dims["R2"] * 8


def flops(dims: dict[str, int]) -> int:
    """A maximum and a product an element; six operations a pair."""
    return dims["Tq"] * dims["Hq"] * (2 * dims["D"] + 6 * dims["R2"])


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    """Blocks that are rotated in whole, in part or not at all."""
    k = d.kernel
    format = k.choice(("nvfp4", "mxfp4"))
    D = fp4.BLOCK[format] * k.choice((1, 2, 3, 5, 16, 16, 17))
    facts: sampling.Facts = dict(
        dtype=k.choice(row.dtypes.split()), format=format, D=D, R2=min(D // 2, k.choice((0, 1, 5, 8, 32, 32, 33))),
        t_angles=k.choice((0, 1)), layout=k.choice(("", "128x4")), gs="",
    )  # fmt: skip
    if format == "nvfp4" and k.random() < 0.7:
        facts |= dict(gs=d.pick((1.0, 731.37, 1 / 3, 2688.0, 1e-5)))
    groups, each = d.pick((1, 1, 2, 3)), d.pick((1, 2, 3, 5))
    most = max(1, min(300, d.limits.terms // (D * groups * each * 64)))
    facts |= dict(T=0 if d.sometimes(0.02) else d.size(most), groups=groups, H=each)
    facts |= dict(x_by=d.pick((1.0, 1.0, 2.0**-120, 2.0**9, 2.0**100)), odd=d.pick(("", "nans", "infs", "all")))
    facts |= {"seed": d.call.randrange(1 << 30), "ties": int(d.sometimes(0.4)), "o.at": d.layout(3, (0, 1))}
    return facts | {"cos.at": d.layout(2, (0,)), "sin.at": d.layout(2, (0,))}


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``H`` heads in each group."""
    groups, format = f.get("groups") or 1, f.get("format") or "nvfp4"
    rows = f | dict(rank=2, A=f["T"], B=groups * f["H"], K=f["D"])
    cos, sin = (2 * torch.rand(f["T"], f.get("R2") or 0, generator=gen) - 1 for _ in range(2))
    angles = (sampling.cast(t, f["dtype"] if f.get("t_angles") else "f32") for t in (cos, sin))
    kwargs = dict(groups=groups, format=format, scale_layout=fp4_rows.layout_of(f))
    return (fp4_rows.generate_values(rows, gen), *angles, fp4_rows.global_of(f)), kwargs
