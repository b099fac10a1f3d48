"""sdpa_decode_paged on the CPU: in one pass over the pages, or two products of PyTorch's own with gathered ones
(``kernels/decode/cpu.py``).

What the definition refuses, it refuses here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core import Call, Target
from torch_attnkit.cpu.blocks import Axes, blocks
from torch_attnkit.cpu.pages import gathered, pages_of
from torch_attnkit.kernels.decode.cpu import Rules, in_blocks, solve
from torch_attnkit.kernels.decode.problem import Operands

from .problem import operands
from .reference import reference


def build(call: Call, target: Target) -> Callable[..., None]:
    a, rules, (B, Mp, Ps, Np) = (
        call.arg,
        Rules.of(call.dim["D"], call.arg),
        (call.dim[axis] for axis in ("B", "Mp", "Ps", "Np")),
    )
    native = blocks(call, (a.q, a.k_cache, a.v_cache), Axes(-1, 1), Axes(1, 2), paged=True)

    def keys(o: Operands, rows: slice | None, seen: slice) -> tuple[torch.Tensor, torch.Tensor] | None:
        assert o.table is not None
        held = [pages_of(o.table[b], Ps, seen.start, seen.stop, Np) for b in range(B)[rows or slice(None)]]
        if None in held:
            return None
        k, v = (torch.stack([gathered(cache, *h) for h in held if h]).transpose(1, 2) for cache in (o.k, o.v))
        return k, v

    def launch(*arguments: Any) -> None:
        o = operands(*arguments)
        if in_blocks(native, o, Mp * Ps):
            return
        if not solve(rules, o, Mp * Ps, lambda rows, seen: keys(o, rows, seen)):
            for result, from_reference in zip((o.out, o.lse), reference(*arguments[:-2]), strict=True):
                result.copy_(from_reference)

    return launch
