"""Blocks of consecutive elements along the last axis: how they are cut, measured and checked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype the arithmetic runs in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_float(op: str, name: str, dtype: torch.dtype) -> None:
    """Raise TypeError unless `dtype` is one of the floating dtypes of the package."""
    if dtype not in FLOATS:
        accepted = ", ".join(str(d) for d in FLOATS)
        raise TypeError(f"{op}: {name} is {dtype}; accepted: {accepted}")


def check_bytes(op: str, name: str, t: Tensor) -> None:
    """Raise TypeError unless `t` is uint8."""
    if t.dtype != torch.uint8:
        raise TypeError(f"{op}: {name} is {t.dtype}; accepted: torch.uint8")


def check_choice(op: str, name: str, value: str, accepted: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of `accepted`."""
    if value not in accepted:
        raise ValueError(f"{op}: {name} is {value!r}; accepted: {', '.join(map(repr, accepted))}")


def check_axis(op: str, name: str, t: Tensor, multiple: int) -> None:
    """Raise ValueError unless the last axis of `t` exists and is a multiple of `multiple`."""
    if t.dim() == 0:
        raise ValueError(f"{op}: {name} is 0-dimensional; accepted: at least one axis")
    if t.shape[-1] % multiple != 0:
        raise ValueError(f"{op}: the last axis of {name} is {t.shape[-1]}; accepted: multiples of {multiple}")


def check_scale(op: str, scale: Tensor, batch: Sequence[int], count: int) -> None:
    """Raise unless `scale` is uint8 of shape (*batch, count): one scale per block."""
    check_bytes(op, "scale", scale)
    if tuple(scale.shape) != (*batch, count):
        raise ValueError(f"{op}: scale has shape {tuple(scale.shape)}; accepted: {(*batch, count)}, one per block")


def check_broadcast(op: str, name: str, sizes: Sequence[int], batch: Sequence[int]) -> None:
    """Raise ValueError unless axes `sizes` broadcast to the axes `batch` without enlarging them."""
    pairs = zip(reversed(sizes), reversed(batch), strict=False)
    if len(sizes) > len(batch) or any(s != 1 and s != b for s, b in pairs):
        raise ValueError(
            f"{op}: {name} has batch axes {tuple(sizes)}; accepted: none, or axes that broadcast to {tuple(batch)}"
        )


def split(op: str, x: Tensor, size: int) -> Tensor:
    """(..., K) to (..., K/size, size) in the dtype of the arithmetic."""
    check_float(op, "x", x.dtype)
    check_axis(op, "x", x, size)
    x = x.to(math_dtype(x.dtype))
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)  # (..., K/size, size)


def amax(blocks: Tensor) -> Tensor:
    """The largest magnitude of each block, (..., K/size, size) to (..., K/size).

    NaN elements are skipped, as the maximum instructions of GPUs do; a block of only NaN
    gives 0.
    """
    return blocks.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1)  # (..., K/size)
