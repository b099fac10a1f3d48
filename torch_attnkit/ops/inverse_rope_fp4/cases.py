"""Inputs of inverse_rope_fp4 for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.oracle import fp4

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
    f"{'nvfp4' if blk == 16 else 'mxfp4'}-{h}-{t}": dict(Tq=t, Hq=h, D=512, R2=32, groups=h // 8, blk=blk)
    for blk in (16, 32)
    for h in (64, 128)
    for t in (1, 16, 128, 4096)
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
