"""The caches of a call of sparse_fmha_with_swa: how their axes are called, and what their rows must be."""

from __future__ import annotations

import torch

from torch_attnkit.core.op import Call, Predicate
from torch_attnkit.core.spec import short
from torch_attnkit.formats import kv_cache


def layout(c: Call, keys: str) -> str:
    """The axes of a cache: those of its keys, and numbers or bytes of a row."""
    return f"{keys} {'D' if c.arg.format == 'none' else 'Rb'}"


def entries(c: Call) -> int:
    """Of a request."""
    if c.arg.compressed_kv is None:
        return 0
    return c.dim["C"] if c.arg.compressed_block_table is None else c.dim["Mc"] * c.dim["Pc"]


def given(c: Call) -> list[torch.Tensor]:
    """Those that a call has."""
    return [rows for rows in (c.arg.swa_kv, c.arg.compressed_kv) if rows is not None]


def aligned(rows: torch.Tensor, nbytes: int) -> bool:
    """Whether all rows start at multiples of so many bytes where the first does."""
    return all(stride * rows.itemsize % nbytes == 0 for stride in rows.stride()[:-1])


def _dtype(c: Call) -> bool:
    """Numbers for format "none", bytes for the others. Raises TypeError, as the table does."""
    plain = c.arg.format == "none"
    want = c.dtype if plain else torch.uint8
    for name in ("swa_kv", "compressed_kv"):
        rows = getattr(c.arg, name)
        if rows is not None and rows.dtype != want:
            accepted = f"accepted with format {c.arg.format!r}: {short(want)}"
            raise TypeError(f"{c.op}: {name} is {short(rows.dtype)}, {accepted}")
    return True


def _size(c: Call) -> bool:
    if c.arg.format == "none":
        return True
    size = kv_cache.row_bytes(c.arg.format, c.dim["D"], c.arg.rope_dim)
    if c.dim["Rb"] != size:
        given = f"format {c.arg.format!r}, D={c.dim['D']}, rope_dim={c.arg.rope_dim}"
        raise ValueError(f"{c.op}: the caches have rows of Rb={c.dim['Rb']}, accepted with {given}: {size}")
    return True


# format "none" does not look at rope_dim.
RULES: dict[str, Predicate] = {
    "dtype of the caches": _dtype,
    "rope_dim must be 0 to D": lambda c: c.arg.format == "none" or 0 <= c.arg.rope_dim <= c.dim["D"],
    "D - rope_dim must be a multiple of the block of format, 64 for fp8, 16 for nvfp4, 32 for mxfp4": lambda c: (
        c.arg.format == "none" or (c.dim["D"] - c.arg.rope_dim) % kv_cache.BLOCK[c.arg.format] == 0
    ),
    "size of a row of the caches": _size,
    "global_scale is accepted with format 'nvfp4' only": lambda c: (
        c.arg.format == "nvfp4" or c.arg.global_scale is None
    ),
}
