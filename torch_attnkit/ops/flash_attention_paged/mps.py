"""flash_attention_paged on Metal: the kernel is of the family ``kernels/prefill``."""

from __future__ import annotations

from collections.abc import Callable

from torch_attnkit.core.op import Call
from torch_attnkit.core.target import Target
from torch_attnkit.kernels.prefill import metal

from .problem import operands, problem


def build(call: Call, target: Target) -> Callable[..., None]:
    run = metal.paged_launcher(call.op, problem(call), target, table_row=call.arg.block_table.stride(0))
    return lambda *arguments: run(operands(*arguments))
