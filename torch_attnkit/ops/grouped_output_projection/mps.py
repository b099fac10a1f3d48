"""grouped_output_projection on Metal: the kernel is the family ``kernels/batched_gemm``."""

from __future__ import annotations

from collections.abc import Callable

from torch_attnkit.core.op import Call
from torch_attnkit.core.target import Target
from torch_attnkit.kernels.batched_gemm import metal

from .problem import operands, problem


def build(call: Call, target: Target) -> Callable[..., None]:
    a = call.arg
    scales = metal.Scales()
    if a.o_scale is not None and a.scale_layout == "linear":
        scales = metal.Scales(a.o_scale.stride()[:-1], a.wo_scale.stride()[:-1])
    run = metal.launcher("grouped_output_projection", problem(call), scales, target)
    return lambda *arguments: run(operands(*arguments))
