"""What ops on encoded cache rows share: the rules of rows of Rb elements (D channels, rope_dim of them RoPE); sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core.op import Call
from torch_attnkit.core.spec import short
from torch_attnkit.formats import kv_cache


def _dtype(c: Call) -> bool:
    """Numbers for format "none", bytes for the others. Raises TypeError, as the table does."""
    found, plain = c.arg.cache.dtype, c.arg.format == "none"
    if plain == (found == torch.uint8):
        accepted = f"accepted with format {c.arg.format!r}: {short(c.dtype) if plain else 'u8'}"
        raise TypeError(f"{c.op}: cache is {short(found)}, {accepted}")
    return True


def _size(c: Call) -> bool:
    size = c.dim["D"] if c.arg.format == "none" else kv_cache.row_bytes(c.arg.format, c.dim["D"], c.arg.rope_dim)
    if c.dim["Rb"] != size:
        given = f"format {c.arg.format!r}, D={c.dim['D']}, rope_dim={c.arg.rope_dim}"
        raise ValueError(f"{c.op}: cache has rows of Rb={c.dim['Rb']}, accepted with {given}: {size}")
    return True


# format "none" does not look at rope_dim.
RULES: dict[str, Callable[[Call], Any]] = {
    "dtype of the cache": _dtype,
    "rope_dim must be 0 to D": lambda c: c.arg.format == "none" or 0 <= c.arg.rope_dim <= c.dim["D"],
    "D - rope_dim must be a multiple of the block of format, 64 for fp8, 16 for nvfp4, 32 for mxfp4": lambda c: (
        c.arg.format == "none" or (c.dim["D"] - c.arg.rope_dim) % kv_cache.BLOCK[c.arg.format] == 0
    ),
    "size of a row of the cache": _size,
    "global_scale is accepted with format 'nvfp4' only": lambda c: (
        c.arg.format == "nvfp4" or c.arg.global_scale is None
    ),
}

# Sizes for cases. fmt: 0 none, 1 fp8, 2 nvfp4, 3 mxfp4; long=1: slots are int64.
PARITY = {
    "plain": dict(R=7, D=33, Nc=20, rope=0, fmt=0, long=1),
    "fp8": dict(R=5, D=192, Nc=9, rope=64, fmt=1),
    "nvfp4": dict(R=5, D=112, Nc=9, rope=32, fmt=2),
    "mxfp4": dict(R=5, D=512, Nc=9, rope=64, fmt=3, long=1),
}
DEGENERATE = {
    "one": dict(R=1, D=64, Nc=1, rope=64, fmt=0),
    "empty": dict(R=0, D=64, Nc=4, rope=16, fmt=2),
}
BENCH = {
    f"{name}-{r}": dict(R=r, D=512, Nc=max(2 * r, 65536), rope=64, fmt=fmt)
    for fmt, name in enumerate(kv_cache.FORMATS)
    for r in (1, 128, 4096, 16384)
}


def bytes_moved(dims: dict[str, int], dtype: torch.dtype) -> int:
    """R rows as numbers on one side, encoded on the other, and a slot each."""
    plain = dims["D"] * dtype.itemsize
    row = kv_cache.row_bytes(kv_cache.FORMATS[dims["fmt"]], dims["D"], dims["rope"]) if dims["fmt"] else plain
    return dims["R"] * (plain + row + 4)
