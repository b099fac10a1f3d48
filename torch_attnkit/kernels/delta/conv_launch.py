"""Host side of causal_conv1d on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile

from .conv_problem import VECTOR, ConvOperands, ConvProblem


def conv(problem: ConvProblem, target: Target) -> Callable[[ConvOperands], None]:
    """What solves ``problem`` on ``target``. A thread has four channels where x and out allow it, else one."""
    p = problem
    if p.empty:
        return lambda operands: None
    even = p.channels % VECTOR == 0 and p.steps[0] % VECTOR == 0
    odd = VECTOR * p.dtype.itemsize - 1

    def compiled(vector: int) -> Callable[..., None]:
        return compile.launcher(
            target, p.device, trace_conv, dtype=short(p.dtype), width=p.width, columns=p.columns, vector=vector,
            silu=p.silu, bias=p.bias, past=p.past,
        )  # fmt: skip

    launches = {VECTOR if even else 1: compiled(VECTOR if even else 1)}

    def launch(o: ConvOperands) -> None:
        width = VECTOR if even and not (o.x.data_ptr() | o.out.data_ptr()) & odd else 1
        if width not in launches:
            launches[width] = compiled(width)
        sequences = o.cu_seqlens, o.state_index, o.past
        launches[width](o.x, o.weight, o.conv_state, sequences, o.bias, o.out, p.runs)

    return launch


def trace_conv(arch: str, **signature: Any) -> compile.Traced:
    """``conv_kernel.py``."""
    from . import conv_kernel

    return conv_kernel.trace(arch, **signature)
