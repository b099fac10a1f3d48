"""mxfp4_dequantize on Hopper and Blackwell: the kernels are the family ``kernels/fp4``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core.op import Call
from torch_attnkit.core.target import Target
from torch_attnkit.kernels.fp4.launch import dequantizer

from .problem import operands, problem


def build(call: Call, target: Target) -> Callable[..., None]:
    run = dequantizer(problem(call), target)

    def launch(*arguments: Any) -> None:
        run(operands(*arguments))

    return launch
