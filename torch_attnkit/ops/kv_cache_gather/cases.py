"""Inputs of kv_cache_gather for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.formats import kv_cache
from torch_attnkit.oracle import cache_rows, fp4, fp4_rows, sampling

PARITY = cache_rows.PARITY | {"cast": dict(R=3, D=32, Nc=4, rope=0, fmt=0, cast=1)}  # cast=1: out in another dtype
DEGENERATE, BENCH = cache_rows.DEGENERATE, cache_rows.bench(640, 8192, 65536)
bytes = cache_rows.bytes_moved


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    R, D, Nc, fmt = dims["R"], dims["D"], dims["Nc"], dims["fmt"]
    rope = dims["rope"] if fmt else D % 16 or 16  # where a global scale asks for nvfp4, of which the blocks are 16
    scale = fp4.global_scales(gen) if "global_scale" in features else None
    format = "nvfp4" if scale is not None else kv_cache.FORMATS[fmt]
    rows = torch.randn(Nc, D, generator=gen).to(dtype)
    cache = rows if format == "none" else kv_cache.encode_rows(rows, format, rope, scale)  # (Nc, Rb)
    slot = torch.randint(
        -1 + dims.get("full", 0), Nc, (R,), generator=gen, dtype=torch.int64 if dims.get("long") else torch.int32
    )
    if not dims.get("full"):
        slot[2::3] = -1
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    cast = other if dims.get("cast") else None
    return (cache, slot, scale), dict(
        format=format, head_dim=D, rope_dim=rope, dtype=cast if format == "none" else dtype
    )


def flops(dims: dict[str, int]) -> int:
    """One product an encoded channel."""
    return dims["R"] * (dims["D"] - dims["rope"]) if dims["fmt"] else 0


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    facts = cache_rows.sample(d, row)
    out = row.dtypes.split() if facts["format"] == "none" else [facts["dtype"]]
    return facts | dict(out=d.kernel.choice(out), any=d.pick(("", 1)))


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Rows as they are written, or with ``any`` whatever the bytes are."""
    kwargs, gs = cache_rows.format_of(f), fp4_rows.global_of(f)
    cache = cache_rows.generate_values(f, gen, f["S"])
    if kwargs["format"] != "none":
        cache = kv_cache.encode_rows(cache, kwargs["format"], kwargs["rope_dim"], gs)
        if f.get("any"):
            cache = torch.randint(0, 256, cache.shape, generator=gen, dtype=torch.uint8)
    dtype = DTYPES[f.get("out") or f["dtype"]]
    return (cache, cache_rows.generate_slots(f, gen, distinct=False), gs), kwargs | dict(head_dim=f["D"], dtype=dtype)
