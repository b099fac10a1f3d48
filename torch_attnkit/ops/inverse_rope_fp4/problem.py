"""A call of inverse_rope_fp4 as a problem of the fp4 kernels."""

from __future__ import annotations

import torch

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.fp4.problem import Rotate, Rotated


def problem(call: Call) -> Rotate:
    a, dim = call.arg, call.dim
    return Rotate(
        a.format, call.device, a.o.dtype, a.cos.dtype, dim["Tq"], dim["Hq"], dim["D"], dim["R2"], _steps(a.o),
        _steps(a.cos) + _steps(a.sin), a.groups, a.scale_layout == "128x4", a.global_scale is not None,
    )  # fmt: skip


def _steps(t: torch.Tensor) -> tuple[int, ...]:
    return tuple(step if size > 1 else 0 for size, step in zip(t.shape[:-1], t.stride()[:-1], strict=True))


def operands(o, cos, sin, global_scale, groups, format, scale_layout, codes, scale) -> Rotated:
    return Rotated(o, cos, sin, global_scale, codes, scale)
