"""Inputs of mxfp4_dequantize for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.oracle import draws, fp4

# R x H rows of K numbers (R -1: one row without batch axes); f8=1: scales as float8 instead of bytes.
PARITY = {
    "vector": dict(R=-1, H=1, K=96),
    "heads": dict(R=3, H=5, K=160, f8=1),
    "tiles": dict(R=65, H=2, K=544),
    "large": dict(R=130, H=1, K=8192),
}
DEGENERATE = {
    "one": dict(R=1, H=1, K=32),
    "no_columns": dict(R=2, H=3, K=0),
    "empty": dict(R=0, H=2, K=64),
}
BENCH = {f"{r}x{k}": dict(R=r, H=1, K=k) for r in (1, 128, 8192) for k in (4096, 7168)}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Every code under scales of ordinary size; ``dtype`` is that of the result."""
    batch, K = (() if dims["R"] < 0 else (dims["R"], dims["H"])), dims["K"]
    codes = torch.randint(0, 256, (*batch, K // 2), generator=gen, dtype=torch.uint8)  # (..., K/2)
    scale = torch.randint(120, 132, (*batch, K // 32), generator=gen, dtype=torch.uint8)
    scale = fp4.store_scale(scale, "128x4" if "swizzled" in features else "linear")
    scale = scale.view(torch.float8_e8m0fnu) if dims.get("f8") else scale
    kwargs = dict(scale_layout="128x4" if "swizzled" in features else "linear", dtype=dtype)
    return (codes, scale), kwargs


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read half a byte an element and a scale per 32, write the numbers."""
    n = abs(dims["R"]) * dims["H"] * dims["K"]
    return n // 2 + n // 32 + n * dtype.itemsize


def flops(dims: dict[str, int]) -> int:
    """One product an element."""
    return abs(dims["R"]) * dims["H"] * dims["K"]


def draw(d: draws.Draw, row: Kernel) -> draws.Facts:
    facts = fp4.draw_rows(d, row, fp4.BLOCK["mxfp4"])
    facts |= dict(f8=d.pick(("", 1)), any=d.pick(("", 1)))
    places = {"codes.at": d.place(facts["rank"] + 1, range(facts["rank"]))}
    axes = 2 if facts["layout"] else facts["rank"] + 1
    return facts | places | {"scale.at": d.place(axes, () if facts["layout"] else range(facts["rank"]))}


def drawn(f: draws.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs = dict(scale_layout=f.get("layout") or "linear", dtype=DTYPES[f["dtype"]])
    return fp4.drawn_codes(f, gen, "mxfp4"), kwargs
