"""Inputs of nvfp4_quantize for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.oracle import draws, fp4

# R x H rows of K numbers (R -1: one row without batch axes); odd=1: nan and infinities among them.
PARITY = {
    "vector": dict(R=-1, H=1, K=48),
    "heads": dict(R=3, H=5, K=80, odd=1),
    "tiles": dict(R=65, H=2, K=272),
    "large": dict(R=130, H=1, K=8192),
}
DEGENERATE = {
    "one": dict(R=1, H=1, K=16),
    "no_columns": dict(R=2, H=3, K=0),
    "empty": dict(R=0, H=2, K=64),
}
BENCH = {f"{r}x{k}": dict(R=r, H=1, K=k) for r in (1, 128, 8192) for k in (4096, 7168)}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = fp4.spread(gen, dtype, *((dims["K"],) if dims["R"] < 0 else (dims["R"], dims["H"], dims["K"])))
    if dims.get("odd"):
        x[0, 0, :3] = torch.tensor((torch.nan, torch.inf, -torch.inf))
        x[1, :, 1] = torch.nan
    global_scale = fp4.global_scales(gen) if "global_scale" in features else None
    return (x, global_scale), dict(scale_layout="128x4" if "swizzled" in features else "linear")


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read x, write half a byte an element and a scale per 16."""
    n = abs(dims["R"]) * dims["H"] * dims["K"]
    return n * dtype.itemsize + n // 2 + n // 16


def flops(dims: dict[str, int]) -> int:
    """A maximum and a product an element."""
    return 2 * abs(dims["R"]) * dims["H"] * dims["K"]


def draw(d: draws.Draw, row: Kernel) -> draws.Facts:
    facts = fp4.draw_rows(d, row, fp4.BLOCK["nvfp4"]) | fp4.draw_numbers(d)
    return facts | {"x.at": d.place(facts["rank"] + 1, range(facts["rank"]))}


def drawn(f: draws.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (fp4.drawn_numbers(f, gen), fp4.drawn_global(f)), dict(scale_layout=f.get("layout") or "linear")
