"""A call of mxfp4_quantize as a problem of the fp4 kernels."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.fp4.problem import Quantize, Quantized


def problem(call: Call) -> Quantize:
    x, swizzled = call.arg.x, call.arg.scale_layout == "128x4"
    return Quantize(
        "mxfp4", call.device, x.dtype, call.dim["K"], call.batch, x.stride()[:-1], swizzled,
        floor=call.arg.rounding == "floor",
    )  # fmt: skip


def operands(x, scale_layout, rounding, codes, scale) -> Quantized:
    return Quantized(x, None, codes, scale)
