"""flash_attention_varlen on the CPU: sequence by sequence, by the kernel of ``kernels/prefill/cpu.py``.

What the definition refuses, it refuses here.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from torch_attnkit.core import Call, Target
from torch_attnkit.cpu.blocks import Axes, blocks
from torch_attnkit.kernels.prefill.cpu import Block, Rules, in_blocks, nothing, solve

from .problem import operands
from .reference import reference


def _offsets(cu: torch.Tensor, total: int, hint: int) -> list[tuple[int, int]] | None:
    """Where each sequence begins and ends; None if the offsets are no offsets, or a sequence longer than ``hint``."""
    found: list[int] = cu.tolist()
    parts = list(pairwise(found))
    right = found[0] == 0 and found[-1] <= total and all(0 <= b - a for a, b in parts)
    return parts if right and all(b - a <= hint for a, b in parts if hint >= 0) else None


def build(call: Call, target: Target) -> Callable[..., None]:
    a, rules = call.arg, Rules.of(call.dim["D"], call.arg)
    native = blocks(call, (a.q, a.k, a.v), Axes(0, 1), Axes(0, 1), causal=a.causal, among=False)

    def launch(*arguments: Any) -> None:
        o = operands(*arguments)
        assert o.cu_q is not None and o.cu_k is not None
        tokens, keys = _offsets(o.cu_q, len(o.q), a.max_seqlen_q), _offsets(o.cu_k, len(o.k), a.max_seqlen_k)
        if tokens is None or keys is None:
            for result, from_reference in zip((o.out, o.lse), reference(*arguments[:-3]), strict=False):
                result.copy_(from_reference)
            return
        found = [
            Block(o.q[None, q0:q1], o.k[None, k0:k1], o.v[None, k0:k1], o.out[None, q0:q1], o.lse[None, q0:q1], o.sink)
            for (q0, q1), (k0, k1) in zip(tokens, keys, strict=True)
        ]
        if not in_blocks(native, found):
            for block in found:
                solve(rules, block)
        last = tokens[-1][1] if tokens else 0
        nothing(o.out[last:], o.lse[last:])

    return launch
