"""flash_attention on the CPU: all sequences together, by the kernel of ``kernels/prefill/cpu.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core import Call, Target
from torch_attnkit.cpu.blocks import Axes, blocks
from torch_attnkit.kernels.prefill.cpu import Block, Rules, in_blocks, solve
from torch_attnkit.oracle import checks

from .problem import operands


def build(call: Call, target: Target) -> Callable[..., None]:
    a, rules, op, S = call.arg, Rules.of(call.dim["D"], call.arg), call.op, call.dim["S"]
    native = blocks(call, (a.q, a.k, a.v), Axes(1, 2), Axes(1, 2), causal=a.causal, among=False)

    def launch(*arguments: Any) -> None:
        o = operands(*arguments)
        checks.in_range(op, "kv_len", o.kv_len, 0, S)
        checks.in_range(op, "kv_start", o.kv_start, 0, S)
        block = Block(o.q, o.k, o.v, o.out, o.lse, o.sink, o.kv_start, o.kv_len)
        if not in_blocks(native, [block]):
            solve(rules, block)

    return launch
