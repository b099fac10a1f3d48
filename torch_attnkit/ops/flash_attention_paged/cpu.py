"""flash_attention_paged on the CPU: sequence by sequence, of gathered pages, by the kernel of
``kernels/prefill/cpu.py``.

What the definition refuses, it refuses here.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch_attnkit.core import Call, Target
from torch_attnkit.cpu.pages import gathered, pages_of
from torch_attnkit.kernels.prefill.cpu import Block, Rules, at_the_end, nothing
from torch_attnkit.kernels.prefill.paged import Operands

from .problem import operands
from .reference import reference


def build(call: Call, target: Target) -> Callable[..., None]:
    rules, (Tq, Mp, Ps, Np) = Rules.of(call), (call.dim[axis] for axis in ("Tq", "Mp", "Ps", "Np"))
    hints = call.arg.max_seqlen_q, call.arg.max_seqlen_k
    most_q, most_k = (most if hint < 0 else min(hint, most) for hint, most in zip(hints, (Tq, Mp * Ps), strict=True))

    def blocks(o: Operands) -> list[Block] | None:
        """Of each sequence; None where the definition refuses."""
        offsets, lengths = o.cu_q.tolist(), o.kv_len.tolist()
        if offsets[0] != 0 or offsets[-1] > Tq or any(not 0 <= b - a <= most_q for a, b in pairwise(offsets)):
            return None
        found = []
        for b, ((q0, q1), length) in enumerate(zip(pairwise(offsets), lengths, strict=True)):
            held = pages_of(o.table[b], Ps, 0, length, Np) if 0 <= length <= most_k else None
            if held is None:
                return None
            k, v = (gathered(cache, *held)[None] for cache in (o.k, o.v))
            found.append(Block(o.q[None, q0:q1], k, v, o.out[None, q0:q1], o.lse[None, q0:q1], o.sink))
        return found

    def launch(*arguments: Any) -> None:
        o = operands(*arguments)
        found = blocks(o)
        if found is None:
            for result, numbers in zip((o.out, o.lse), reference(*arguments[:-2]), strict=True):
                result.copy_(numbers)
            return
        for block in found:
            at_the_end(rules, block)
        last = sum(block.q.shape[1] for block in found)
        nothing(o.out[last:], o.lse[last:])

    return launch
