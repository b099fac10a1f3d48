"""Rows of a key-value cache: quantised NoPE channels, bfloat16 RoPE channels, block scales.

A head of head_dim channels ends in rope_dim rotated ones; the NoPE channels before them are
quantised. An encoded row is

    [ NoPE codes | RoPE bfloat16, little endian | NoPE scales | zeros up to a multiple of 4 bytes ]

| format | NoPE channels | scale | row for 512/64 |
|---|---|---|---|
| none  | as they are, with the RoPE channels | | 512 elements |
| fp8   | E4M3 | UE8M0 per 64, 2^ceil(log2(amax / 448)) | 448 + 128 + 7 + 1 = 584 bytes |
| nvfp4 | E2M1 | E4M3 per 16, with a global scale | 224 + 128 + 28 = 380 bytes |
| mxfp4 | E2M1 | UE8M0 per 32, 2^ceil(log2(amax / 6)) | 224 + 128 + 14 + 2 = 368 bytes |
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import fp8, mxfp4, nvfp4
from .blocks import check_axis, check_bytes, check_choice, check_float

FORMATS = ("none", "fp8", "nvfp4", "mxfp4")
BLOCK = {"fp8": 64, "nvfp4": nvfp4.BLOCK, "mxfp4": mxfp4.BLOCK}  # Channels under one scale.
ROW_MULTIPLE = 4  # Bytes; so that a row starts at a whole 32-bit word.


class RowLayout(NamedTuple):
    """Byte offsets inside an encoded row; NoPE codes start at 0."""

    rope: int
    scales: int
    end: int  # Of the scales; zeros from here on.
    size: int


def row_layout(format: str, head_dim: int, rope_dim: int) -> RowLayout:
    """Where the parts of an encoded row (fp8, nvfp4, mxfp4) lie.

    Raises ValueError for another format, a rope_dim outside [0, head_dim], or a number of NoPE
    channels that is not a multiple of the format's block.
    """
    check_choice("kv_cache", "format", format, FORMATS[1:])
    block = BLOCK[format]
    nope_dim = _nope_dim(head_dim, rope_dim)
    if nope_dim % block != 0:
        raise ValueError(
            f"kv_cache: head_dim {head_dim} - rope_dim {rope_dim} = {nope_dim} NoPE channels; "
            f"accepted by format {format!r}: multiples of {block}"
        )
    rope = nope_dim if format == "fp8" else nope_dim // 2
    scales = rope + 2 * rope_dim
    end = scales + nope_dim // block
    return RowLayout(rope, scales, end, -(-end // ROW_MULTIPLE) * ROW_MULTIPLE)


def row_bytes(format: str, head_dim: int, rope_dim: int) -> int:
    """The size of a row: bytes of an encoded format, head_dim elements of format "none".

    Raises ValueError as `row_layout` does.
    """
    check_choice("kv_cache", "format", format, FORMATS)
    if format == "none":
        _nope_dim(head_dim, rope_dim)
        return head_dim
    return row_layout(format, head_dim, rope_dim).size


def encode_rows(kv: Tensor, format: str, rope_dim: int, global_scale: Tensor | None = None) -> Tensor:
    """Floats (..., D) to rows: uint8 (..., row_bytes), or a copy of kv for format "none".

    global_scale: of format nvfp4 only, as in `nvfp4.quantize`. NoPE channels are encoded as
    `fp8.quantize`, `nvfp4.quantize` and `mxfp4.quantize` (rounding "ceil") say; RoPE channels are
    rounded to bfloat16, ties to even.

    Raises TypeError for dtypes, ValueError as `row_layout` does and for a global_scale with another
    format.
    """
    _check_scale_use("kv_cache.encode_rows", format, global_scale)
    check_float("kv_cache.encode_rows", "kv", kv.dtype)
    check_axis("kv_cache.encode_rows", "kv", kv, 1)
    head_dim = kv.shape[-1]
    if format == "none":
        _nope_dim(head_dim, rope_dim)
        return kv.clone(memory_format=torch.contiguous_format)
    layout = row_layout(format, head_dim, rope_dim)
    nope, rope = kv[..., : head_dim - rope_dim], kv[..., head_dim - rope_dim :]
    if format == "fp8":
        codes, scale = fp8.quantize(nope, block=BLOCK["fp8"])
    elif format == "nvfp4":
        codes, scale = nvfp4.quantize(nope, global_scale)
    else:
        codes, scale = mxfp4.quantize(nope)
    rope_bytes = rope.to(torch.bfloat16).contiguous().view(torch.uint8)  # (..., 2 * rope_dim)
    pad = scale.new_zeros((*kv.shape[:-1], layout.size - layout.end))
    return torch.cat((codes, rope_bytes, scale, pad), dim=-1)  # (..., row_bytes)


def decode_rows(
    rows: Tensor,
    format: str,
    head_dim: int,
    rope_dim: int,
    global_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows (..., row_bytes) to floats (..., D) in `dtype`: what `encode_rows` stored.

    dtype None is bfloat16 for encoded rows and the dtype of the rows for format "none".

    Raises TypeError for dtypes, ValueError as `encode_rows` does and for rows of another size.
    """
    op = "kv_cache.decode_rows"
    _check_scale_use(op, format, global_scale)
    size = row_bytes(format, head_dim, rope_dim)
    if rows.dim() == 0 or rows.shape[-1] != size:
        raise ValueError(
            f"{op}: rows has shape {tuple(rows.shape)}; accepted: (..., {size}) for format "
            f"{format!r}, head_dim {head_dim}, rope_dim {rope_dim}"
        )
    if format == "none":
        check_float(op, "rows", rows.dtype)
        dtype = rows.dtype if dtype is None else dtype
        check_float(op, "dtype", dtype)
        return rows.to(dtype, copy=True)
    check_bytes(op, "rows", rows)
    dtype = torch.bfloat16 if dtype is None else dtype
    check_float(op, "dtype", dtype)
    layout = row_layout(format, head_dim, rope_dim)
    codes, scale = rows[..., : layout.rope], rows[..., layout.scales : layout.end]
    if format == "fp8":
        nope = fp8.dequantize(codes, scale, block=BLOCK["fp8"], dtype=dtype)
    elif format == "nvfp4":
        nope = nvfp4.dequantize(codes, scale, global_scale, dtype)
    else:
        nope = mxfp4.dequantize(codes, scale, dtype)
    # A copy, since a view as bfloat16 needs an even byte offset and rows may start anywhere; by pairs of bytes, since
    # no bytes at all are a legal number of them.
    pairs = rows[..., layout.rope : layout.scales].reshape(*rows.shape[:-1], rope_dim, 2)
    rope = pairs.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).squeeze(-1)  # (..., rope_dim)
    return torch.cat((nope, rope.to(dtype)), dim=-1)  # (..., D)


def _nope_dim(head_dim: int, rope_dim: int) -> int:
    if not 0 <= rope_dim <= head_dim:
        raise ValueError(f"kv_cache: rope_dim is {rope_dim}; accepted: 0 to head_dim, here {head_dim}")
    return head_dim - rope_dim


def _check_scale_use(op: str, format: str, global_scale: Tensor | None) -> None:
    check_choice(op, "format", format, FORMATS)
    if global_scale is not None and format != "nvfp4":
        raise ValueError(f"{op}: global_scale given with format {format!r}; accepted: 'nvfp4'")
