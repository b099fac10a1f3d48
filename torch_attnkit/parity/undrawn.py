"""Inputs whose numbers are not drawn, for those who look at shapes, strides and lengths alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Undrawn(TorchFunctionMode):
    """Inside, tensors of normal numbers hold what was in memory before: to fill them takes most of the time."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.randn:
            return torch.empty(*args, **{k: v for k, v in kwargs.items() if k != "generator"})
        if func is torch.full:
            return torch.empty(args[0], **kwargs)
        if func is torch.Tensor.to and args[0].is_floating_point() and args[1:] and args[1] in _FLOATS:
            return torch.empty_like(args[0], dtype=args[1])
        return args[0] if func is torch.Tensor.copy_ else func(*args, **kwargs)


_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64)
