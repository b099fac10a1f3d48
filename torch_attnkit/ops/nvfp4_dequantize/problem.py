"""A call of nvfp4_dequantize as a problem of the fp4 kernels."""

from __future__ import annotations

import torch

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.fp4.problem import Dequantize, Dequantized


def problem(call: Call) -> Dequantize:
    a = call.arg
    return Dequantize(
        "nvfp4", call.device, a.dtype or torch.float32, call.dim["K"], call.batch, a.codes.stride()[:-1],
        a.scale.stride()[:-1], a.scale_layout == "128x4", global_scale=a.global_scale is not None,
    )  # fmt: skip


def operands(codes, scale, global_scale, scale_layout, dtype, x) -> Dequantized:
    return Dequantized(codes, scale.view(torch.uint8), global_scale, x)
