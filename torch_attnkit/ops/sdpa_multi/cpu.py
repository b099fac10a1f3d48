"""sdpa_multi on the CPU: sequences of one length together, by the kernel of ``kernels/prefill/cpu.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core import Call, Target
from torch_attnkit.cpu.blocks import Axes, blocks
from torch_attnkit.kernels.prefill.cpu import Block, Rules, at_the_end, in_blocks
from torch_attnkit.oracle import checks

from .problem import operands


def build(call: Call, target: Target) -> Callable[..., None]:
    a, rules, op, S = call.arg, Rules.of(call.dim["D"], call.arg), call.op, call.dim["S"]
    native = blocks(call, (a.q, a.k_cache, a.v_cache), Axes(1, 2), Axes(2, 1), causal=a.causal)

    def launch(*arguments: Any) -> None:
        o = operands(*arguments)
        checks.in_range(op, "kv_len", o.kv_len, 0, S)
        checks.in_range(op, "kv_start", o.kv_start, 0, S)
        assert o.kv_len is not None
        lengths = o.kv_len.tolist()
        alike, found = lengths[1:] == lengths[:-1], []
        for b, length in enumerate(lengths[:1] if alike else lengths):
            rows = slice(None) if alike else slice(b, b + 1)
            k, v = (cache[rows, :, :length].transpose(1, 2) for cache in (o.k, o.v))
            start = None if o.kv_start is None else o.kv_start[rows].clamp(max=length)
            found.append(Block(o.q[rows], k, v, o.out[rows], o.lse[rows], o.sink, start))
        if not in_blocks(native, found):
            for block in found:
                at_the_end(rules, block)

    return launch
