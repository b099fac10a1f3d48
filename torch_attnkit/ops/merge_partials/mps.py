"""merge_partials on Metal: the kernels are the family ``kernels/merge``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core.op import Call
from torch_attnkit.core.target import Target
from torch_attnkit.kernels.merge import metal

from .problem import operands, problem


def build(call: Call, target: Target) -> Callable[..., None]:
    run = metal.launcher(call.op, problem(call), target)

    def launch(*arguments: Any) -> None:
        run(operands(*arguments))

    return launch
