"""Memory for what an op returns, at little cost to the host, and which memory a tensor has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

# What the code that torch.compile makes calls: a third of torch.empty's time, for it parses nothing and knows only the
# current device.
_quick: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
_quick_cpu: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)


@functools.lru_cache(maxsize=4096)
def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def empty(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``torch.empty`` for a shape that comes again; where a dispatch mode is active, through it."""
    quick = _quick is not None and device.type == "cuda" and torch._C._cuda_getDevice() == device.index
    if quick and not torch._C._len_torch_dispatch_stack():
        made: torch.Tensor = _quick(shape, _contiguous(shape), dtype)
        return made
    return torch.empty(shape, dtype=dtype, device=device)


def on_cpu(outputs: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> Callable[[], list[torch.Tensor]] | None:
    """``empty`` for all of these (shape, dtype) on the CPU, made ready; None where torch has no quick way."""
    ready = [(shape, _contiguous(shape), dtype) for shape, dtype in outputs]

    def empties() -> list[torch.Tensor]:
        if torch._C._len_torch_dispatch_stack():
            return [torch.empty(shape, dtype=dtype, device="cpu") for shape, _, dtype in ready]
        return [_quick_cpu(shape, strides, dtype) for shape, strides, dtype in ready]

    return empties if _quick_cpu is not None else None


def span(t: torch.Tensor) -> tuple[int, int]:
    """The addresses from the first byte of ``t`` to behind the last."""
    begin = t.data_ptr()
    if t.numel() == 0:
        return begin, begin
    return begin, begin + (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.itemsize
