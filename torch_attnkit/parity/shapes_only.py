"""Inputs whose values are left uninitialised, for callers that look at shapes, strides and lengths alone."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64)
_LARGE = 1 << 20  # integers of a tensor from which on they are no lengths, offsets or pages


class ShapesOnly(TorchFunctionMode):
    """Inside, tensors of normal numbers hold what was in memory before: to fill them takes most of the time.

    On the device "meta" they have no memory, and large tensors of integers are there, too: what is made of
    gigabytes costs nothing. Lengths, offsets and page tables are what they are outside.
    """

    def __init__(self, device: str = "cpu"):
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        options: dict[str, Any] = {"device": self.device, **kwargs}
        options.pop("generator", None)
        if func is torch.randn:
            return torch.empty(*args, **options)
        if func is torch.full and _floating(args, kwargs):
            return torch.empty(args[0], **options)
        if func is torch.randint and self.device == "meta":
            size = next(a for a in args if isinstance(a, (tuple, list)))
            if math.prod(size) > _LARGE:
                return torch.empty(size, **{"dtype": torch.int64} | options)
        if func is torch.Tensor.to and args[0].is_floating_point() and args[1:] and args[1] in _FLOATS:
            return torch.empty_like(args[0], dtype=args[1])
        if func is torch.Tensor.copy_ and args[0].is_floating_point():
            return args[0]
        return func(*args, **kwargs)


def _floating(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call of ``torch.full`` makes numbers, not lengths or pages."""
    return kwargs["dtype"] in _FLOATS if "dtype" in kwargs else isinstance(args[1], float)


def materialised(value: Any) -> Any:
    """A tensor of the device "meta" on the CPU, with whatever is in memory there; all else as it is."""
    if not isinstance(value, torch.Tensor) or not value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
