"""route_softmax on Hopper and Blackwell: the kernels are the family ``kernels/routing``."""

from __future__ import annotations

from collections.abc import Callable

from torch_attnkit.core.op import Call
from torch_attnkit.core.target import Target
from torch_attnkit.kernels.routing.launch import launcher

from .problem import operands, problem


def build(call: Call, target: Target) -> Callable[..., None]:
    run = launcher(problem(call), target)
    return lambda *arguments: run(operands(*arguments))
