"""Inputs of kv_cache_write for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.formats import kv_cache
from torch_attnkit.oracle import cache_rows, fp4, fp4_rows, sampling

PARITY, DEGENERATE, BENCH = cache_rows.PARITY, cache_rows.DEGENERATE, cache_rows.bench(1, 64, 8192)
bytes = cache_rows.bytes_moved


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    R, D, Nc, fmt = dims["R"], dims["D"], dims["Nc"], dims["fmt"]
    rope = dims["rope"] if fmt else D % 16 or 16  # where a global scale asks for nvfp4, of which the blocks are 16
    format = "nvfp4" if "global_scale" in features else kv_cache.FORMATS[fmt]
    size = kv_cache.row_bytes(format, D, rope) if format != "none" else D
    cache = torch.randn(Nc, D, generator=gen).to(dtype)
    if format != "none":
        cache = torch.randint(0, 256, (Nc, size), generator=gen, dtype=torch.uint8)
    slot = torch.randperm(Nc, generator=gen)[:R].to(torch.int64 if dims.get("long") else torch.int32)  # (R,)
    if not dims.get("full"):
        slot[2::3] = -1
    args = (
        fp4.spread(gen, dtype, R, D),
        cache,
        slot,
        fp4.global_scales(gen) if "global_scale" in features else None,
    )
    return args, dict(format=format, rope_dim=rope)


def flops(dims: dict[str, int]) -> int:
    """A maximum and a product an encoded channel."""
    return 2 * dims["R"] * (dims["D"] - dims["rope"]) if dims["fmt"] else 0


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    return cache_rows.sample(d, row)


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs = cache_rows.format_of(f)
    size = kv_cache.row_bytes(kwargs["format"], f["D"], kwargs["rope_dim"])
    cache = torch.randint(0, 256, (f["S"], size), generator=gen, dtype=torch.uint8)
    if kwargs["format"] == "none":
        cache = sampling.cast(sampling.randn(gen, f["S"], f["D"]), f["dtype"])
    kv, slot = cache_rows.generate_values(f, gen, f["R"]), cache_rows.generate_slots(f, gen, distinct=True)
    return (kv, cache, slot, fp4_rows.global_of(f)), kwargs
