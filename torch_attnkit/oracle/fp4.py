"""What the tables and references of the FP4 ops share: block scales in both layouts, coded matrices, activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core.op import Call
from torch_attnkit.core.spec import MODEL_DTYPES, short
from torch_attnkit.formats import fp8, mxfp4, nvfp4, scale_layout

from . import checks

BLOCK = {"nvfp4": nvfp4.BLOCK, "mxfp4": mxfp4.BLOCK, "mxfp8": fp8.MXFP8_BLOCK}  # numbers under one scale
LAYOUTS = ("linear", "128x4")
SCALE = "u8|f8e4m3|f8e8m0"  # what a table accepts for scales; `scale_dtypes` then looks at the format
SCALE_DTYPE = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.float8_e8m0fnu}


def swizzled(spec: str) -> Callable[[Call], str | None]:
    """An entry of ``layouts``: these dims where scale_layout is 128x4, those of the table otherwise."""
    return lambda c: spec if c.arg.scale_layout == "128x4" else None


def scale_dtypes(*names: str) -> Callable[[Call], bool]:
    """A rule: these scales are bytes or the 8-bit float of the format. Raises TypeError, as the table does."""

    def rule(c: Call) -> bool:
        for name in names:
            tensor, want = getattr(c.arg, name), SCALE_DTYPE.get(c.arg.format)
            if tensor is not None and want is not None and tensor.dtype not in (torch.uint8, want):
                accepted = f"accepted with format {c.arg.format!r}: u8, {short(want)}"
                raise TypeError(f"{c.op}: {name} is {short(tensor.dtype)}, {accepted}")
        return True

    return rule


def scale_fits(c: Call, rows: str, kb: str, k: int) -> bool:
    """Whether a scale has one byte per block of k numbers: axes (rows, kb), in the 128x4 layout (P rows, P kb)."""
    blocks = k // c.dim["blk"]
    if c.arg.scale_layout == "linear":
        return c.dim[kb] == blocks
    return (c.dim["P" + rows], c.dim["P" + kb]) == scale_layout.padded_shape(c.dim[rows], blocks)


def _float_dtype(c: Call) -> bool:
    if c.arg.dtype is not None and c.arg.dtype not in MODEL_DTYPES:
        accepted = ", ".join(short(d) for d in MODEL_DTYPES)
        raise TypeError(f"{c.op}: dtype is {short(c.arg.dtype)}, accepted: {accepted}")
    return True


DTYPE: dict[str, Callable[[Call], Any]] = {"dtype must be a floating point type": _float_dtype}
SWIZZLED = {"swizzled": lambda c: c.arg.scale_layout == "128x4"}


def check_global(op: str, **scales: torch.Tensor | None) -> None:
    """Global scales, by argument name: positive and within the range of the format."""
    for name, scale in scales.items():
        checks.positive(op, name, scale, nvfp4.GLOBAL_SCALE_MAX)


def check_factor(op: str, global_scale: torch.Tensor | None) -> None:
    """The same of one by which codes are made and read back, where 0, infinity and NaN are accepted, too: they are what
    448 * 6 / amax is for a tensor of infinities, of zeros or with NaN."""
    if global_scale is not None:
        odd = (global_scale == 0) | (global_scale == torch.inf) | global_scale.isnan()
        check_global(op, global_scale=global_scale.masked_fill(odd, 1.0))


def check_experts(op: str, chosen: torch.Tensor, **scales: torch.Tensor | None) -> None:
    """The same of those global scales (E,) whose experts are ``chosen``, int64 (n,). The others may be anything."""
    for name, scale in scales.items():
        kept = None if scale is None else torch.ones_like(scale).index_put((chosen,), scale[chosen])
        check_global(op, **{name: kept})


def store_scale(scale: torch.Tensor, layout: str) -> torch.Tensor:
    """Scales (..., Kb) as they are, or as one matrix of prod(...) rows in the 128x4 layout (padded M, padded Kb)."""
    if layout == "linear":
        return scale
    return scale_layout.to_128x4(scale.reshape(math.prod(scale.shape[:-1]), scale.shape[-1]))


def load_scale(scale: torch.Tensor, layout: str, rows: int, kb: int) -> torch.Tensor:
    """Bytes or 8-bit floats of either layout to linear bytes (..., rows, kb)."""
    scale = scale.view(torch.uint8)
    return scale if layout == "linear" else scale_layout.from_128x4(scale, rows, kb)


def dequantize(
    codes: torch.Tensor, scale: torch.Tensor, format: str, global_scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Codes (..., K/2) under linear scales (..., K/block) to the numbers they stand for (..., K)."""
    if format == "nvfp4":
        return nvfp4.dequantize(codes, scale, global_scale, dtype)
    return mxfp4.dequantize(codes, scale, dtype)


def round_trip(x: torch.Tensor, format: str, global_scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x (..., K) quantised along its last axis and read back in ``dtype``; format "none" only converts.

    The codes are those of x and global_scale rounded to float32, so that a run in float64 on the same numbers meets
    the same codes: a code of its own would differ from its neighbour by far more than any rounding of the arithmetic.
    """
    if format == "none":
        return x.to(dtype)
    x = x.to(torch.float32)
    if format == "mxfp8":
        return fp8.dequantize(*fp8.quantize(x), dtype=dtype)
    if format == "mxfp4":
        return mxfp4.dequantize(*mxfp4.quantize(x), dtype)
    global_scale = None if global_scale is None else global_scale.to(torch.float32)
    return nvfp4.dequantize(*nvfp4.quantize(x, global_scale), global_scale, dtype)


def spread(gen: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random numbers (..., K) to quantise: rows of very different size, zeros among them, quarters that meet ties."""
    x = torch.randn(*shape, generator=gen)
    size = torch.exp2(torch.randint(-8, 9, (*shape[:-1], 1), generator=gen).float())  # (..., 1)
    size = torch.where(torch.rand(*shape[:-1], 1, generator=gen) < 0.1, 0.0, size)
    quarters = (x * 8).round() / 4
    return (torch.where(torch.rand(*shape[:-1], 1, generator=gen) < 0.3, quarters, x * size)).to(dtype)


def coded(
    gen: torch.Generator, format: str, layout: str, shape: tuple[int, ...], global_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random matrices (..., M, K) of variance near 1/K: codes (..., M, K/2) and each matrix' scales in the layout.

    Every code occurs, under scales within an octave or so of each other; nothing is quantised, since benches ask for
    gigabytes. global_scale: 0-dim, or one for each index of the first axis.
    """
    size = torch.tensor(max(shape[-1], 1) ** -0.5 / 2.93)  # 2.93: root mean square of the sixteen codes
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=gen, dtype=torch.uint8)
    blocks = (*shape[:-1], shape[-1] // BLOCK[format])
    if format == "nvfp4":
        if global_scale is not None:
            size = size * global_scale.reshape(-1, *[1] * (len(shape) - 1 if global_scale.dim() else 0))
        scale = fp8.e4m3_encode(size).short() + torch.randint(-8, 9, blocks, generator=gen, dtype=torch.int16)
        scale = scale.clamp(1, 126).to(torch.uint8)
    else:
        scale = fp8.ue8m0_encode(size) + torch.randint(0, 3, blocks, generator=gen, dtype=torch.uint8) - 1
    return codes, scale if layout == "linear" else scale_layout.to_128x4(scale)


def global_scales(gen: torch.Generator, *shape: int) -> torch.Tensor:
    """Float32 numbers such as 448 * 6 / amax gives for tensors of the size that `coded` and activations have."""
    return 300 + 900 * torch.rand(shape, generator=gen)
