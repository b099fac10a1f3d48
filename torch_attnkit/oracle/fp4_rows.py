"""Cases of the ops that quantise rows of numbers in blocks under scales, and of those that bring them back.

R x H rows of K numbers; R -1: one row without batch axes.
"""

from __future__ import annotations

import torch

from . import fp4

Dims = dict[str, int]
BENCH = {f"{r}x{k}": dict(R=r, H=1, K=k) for r in (1, 128, 8192) for k in (4096, 7168)}


def parity(block: int, **special: int) -> dict[str, Dims]:
    """For blocks of so many numbers; ``special`` is what else the case of several heads switches on."""
    return {
        "vector": dict(R=-1, H=1, K=3 * block),
        "heads": dict(R=3, H=5, K=5 * block) | special,
        "tiles": dict(R=65, H=2, K=17 * block),
        "large": dict(R=130, H=1, K=8192),
    }


def degenerate(block: int) -> dict[str, Dims]:
    return {
        "one": dict(R=1, H=1, K=block),
        "no_columns": dict(R=2, H=3, K=0),
        "empty": dict(R=0, H=2, K=64),
    }


def _batch(dims: Dims) -> tuple[int, ...]:
    return () if dims["R"] < 0 else (dims["R"], dims["H"])


def scale_layout(features: tuple[str, ...]) -> str:
    return "128x4" if "swizzled" in features else "linear"


def numbers(dims: Dims, dtype: torch.dtype, gen: torch.Generator) -> torch.Tensor:
    """Rows (..., K) to quantise; with ``odd`` there are nan and infinities among them."""
    x = fp4.spread(gen, dtype, *_batch(dims), dims["K"])
    if dims.get("odd"):
        x[0, 0, :3] = torch.tensor((torch.nan, torch.inf, -torch.inf))
        x[1, :, 1] = torch.nan
    return x


def coded(
    dims: Dims, block: int, sizes: range, float8: torch.dtype, layout: str, gen: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows to bring back: every code under scales whose bytes are ``sizes``; with ``f8`` they are ``float8``."""
    batch, K = _batch(dims), dims["K"]
    codes = torch.randint(0, 256, (*batch, K // 2), generator=gen, dtype=torch.uint8)  # (..., K/2)
    scale = torch.randint(sizes.start, sizes.stop, (*batch, K // block), generator=gen, dtype=torch.uint8)
    scale = fp4.store_scale(scale, layout)  # (..., K/block) or one matrix
    return codes, scale.view(float8) if dims.get("f8") else scale


def elements(dims: Dims) -> int:
    return abs(dims["R"]) * dims["H"] * dims["K"]


def bytes(dims: Dims, dtype: torch.dtype, block: int) -> int:
    """Of the numbers on one side, and of half a byte for each and a scale a block on the other."""
    n = elements(dims)
    return n * dtype.itemsize + n // 2 + n // block
