"""``torch.bmm`` (cuBLAS) for products of groups. FP4 operands are read to bf16 once, outside of the timing: what a user
does who has no kernel for them, at four times the memory, and for activations by never rounding them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.oracle import fp4


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    if op != "grouped_output_projection":
        return None
    dtype = kwargs.get("dtype")
    if dtype not in (torch.bfloat16, torch.float16) and (dtype is not None or kwargs["format"] != "none"):
        return None
    if kwargs.get("scale_layout", "linear") != "linear":  # no bench case has the other
        return None
    x, w = _dequantised(args, kwargs)  # (Tq, G, K), (G, R, K)
    x, w = x.transpose(0, 1), w.transpose(1, 2)
    return lambda: torch.bmm(x, w).transpose(0, 1)


def _dequantised(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    o, wo_a, o_scale, wo_scale, o_global, wo_global = (*args, *[None] * 6)[:6]
    if kwargs["format"] == "none":
        return o, wo_a
    each = (o, o_scale, o_global), (wo_a, wo_scale, wo_global)
    x, w = (fp4.dequantize(c, s, kwargs["format"], g, kwargs["dtype"]) for c, s, g in each)
    return x, w
