"""fp4_moe on Hopper: the kernels are the family ``kernels/grouped_gemm``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core.op import Call
from torch_attnkit.core.target import Target
from torch_attnkit.kernels.grouped_gemm.launch import launcher

from .problem import operands, problem


def build(call: Call, target: Target) -> Callable[..., None]:
    run = launcher(problem(call), target)

    def launch(*arguments: Any) -> None:
        run(operands(*arguments))

    return launch
