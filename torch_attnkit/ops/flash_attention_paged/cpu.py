"""flash_attention_paged on the CPU: in one pass over the pages in C++ (``csrc/cpu/blocks.cpp``), or of gathered pages
sequence by sequence, by the kernel of ``kernels/prefill/cpu.py``.

What the definition refuses, it refuses here.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from torch_attnkit.core import Call, Target
from torch_attnkit.cpu.blocks import Axes, Sequence, addresses, blocks
from torch_attnkit.cpu.pages import gathered, pages_of
from torch_attnkit.kernels.prefill.cpu import Block, Rules, at_the_end, nothing
from torch_attnkit.kernels.prefill.problem import PagedOperands

from .problem import operands
from .reference import reference


def build(call: Call, target: Target) -> Callable[..., None]:
    a, rules = call.arg, Rules.of(call.dim["D"], call.arg)
    Tq, Mp, Ps, Np = (call.dim[axis] for axis in ("Tq", "Mp", "Ps", "Np"))
    hints = a.max_seqlen_q, a.max_seqlen_k
    most_q, most_k = (most if hint < 0 else min(hint, most) for hint, most in zip(hints, (Tq, Mp * Ps), strict=True))
    native = blocks(call, (a.q, a.k_cache, a.v_cache), Axes(0, 1), Axes(1, 2), causal=a.causal, paged=True)

    def in_blocks(o: PagedOperands, tokens: list[tuple[int, int]], lengths: list[int]) -> bool:
        if native is None:
            return False
        table = o.table if o.table.dtype == torch.int32 else o.table.int()
        q, out, lse = (addresses(t, Tq + 1) for t in (o.q, o.out, o.lse))
        rows, k, v = addresses(table, len(lengths)), o.k.data_ptr(), o.v.data_ptr()
        sequences = [
            Sequence(q[q0], k, v, out[q0], lse[q0], row, q1 - q0, length, 0, length)
            for (q0, q1), row, length in zip(tokens, rows, lengths, strict=True)
        ]
        return native(sequences, o.sink)

    def gather(o: PagedOperands, tokens: list[tuple[int, int]], lengths: list[int]) -> list[Block] | None:
        """The blocks of all sequences; None where one has a page that is none."""
        found = []
        for b, ((q0, q1), length) in enumerate(zip(tokens, lengths, strict=True)):
            held = pages_of(o.table[b], Ps, 0, length, Np)
            if held is None:
                return None
            k, v = (gathered(cache, *held)[None] for cache in (o.k, o.v))
            found.append(Block(o.q[None, q0:q1], k, v, o.out[None, q0:q1], o.lse[None, q0:q1], o.sink))
        return found

    def launch(*arguments: Any) -> None:
        o = operands(*arguments)
        offsets, lengths = o.cu_q.tolist(), o.kv_len.tolist()
        tokens = list(pairwise(offsets))
        plain = offsets[0] == 0 and offsets[-1] <= Tq and all(0 <= q1 - q0 <= most_q for q0, q1 in tokens)
        plain = plain and all(0 <= length <= most_k for length in lengths)
        if not (plain and in_blocks(o, tokens, lengths)):
            found = gather(o, tokens, lengths) if plain else None
            if found is None:
                for result, from_reference in zip((o.out, o.lse), reference(*arguments[:-2]), strict=True):
                    result.copy_(from_reference)
                return
            for block in found:
                at_the_end(rules, block)
        nothing(o.out[offsets[-1] :], o.lse[offsets[-1] :])

    return launch
