"""One query over many keys on the CPU: one pass in C++ (``csrc/cpu/blocks.cpp``) on processors with AVX-512, else two
products of PyTorch's own with the keys that count."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torch_attnkit.cpu.blocks import Blocks, Sequence, addresses

from .problem import Operands

Keys = Callable[[slice | None, slice], tuple[torch.Tensor, torch.Tensor] | None]


class Rules(NamedTuple):
    """Which keys a query sees, and what becomes of the scores."""

    window: int
    sink_tokens: int
    scale: float
    softcap: float

    @classmethod
    def of(cls, dim: int, a: Any) -> Rules:
        """By the head size and the arguments of the table."""
        sinks = a.sink_tokens if a.window >= 0 else 0
        return cls(a.window, sinks, dim**-0.5 if a.scale is None else a.scale, a.softcap)


def seen(rules: Rules, ends: list[int], starts: list[int], most: int) -> list[tuple[slice | None, slice]] | None:
    """Which sequences see which keys; None for the sequences means all. None where a length is over ``most``."""
    if ends and not 0 <= min(*ends, *starts) <= max(*ends, *starts) <= most:
        return None
    found = [
        (max(start, end - rules.window) if rules.window >= 0 else start, end)
        for start, end in zip(starts, ends, strict=True)
    ]
    if found[1:] == found[:-1]:
        return [(None, slice(*keys)) for keys in found[:1]]
    return [(slice(b, b + 1), slice(*keys)) for b, keys in enumerate(found)]


def attend(rules: Rules, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q (b, Hq, D) over k (b, Hkv, s, D) and v: out (b, Hq, Dv) and lse (b, Hq), in float32."""
    s = (q.float() * rules.scale).unflatten(1, (k.shape[1], -1)) @ k.float().mT  # (b, Hkv, G, s)
    if rules.softcap > 0:
        s = rules.softcap * (s / rules.softcap).tanh_()
    lse = s.logsumexp(-1)  # (b, Hkv, G)
    return (s.sub_(lse[..., None]).exp_() @ v.float()).flatten(1, 2), lse.flatten(1)


def in_blocks(kernel: Blocks | None, o: Operands, most: int) -> bool:
    """Fill ``out`` and ``lse`` by ``csrc/cpu/blocks.cpp``. False: it does not take the call."""
    if kernel is None or not o.out.is_contiguous():
        return False
    ends = o.kv_len.tolist()
    starts = [0] * len(ends) if o.kv_start is None else o.kv_start.tolist()
    if not ends or not 0 <= min(*ends, *starts) <= max(*ends, *starts) <= most:
        return False
    table = o.table if o.table is None or o.table.dtype == torch.int32 else o.table.int()
    paged = table is not None
    parts = [[t.data_ptr()] * len(ends) if paged else addresses(t, len(ends)) for t in (o.k, o.v)]
    parts = [addresses(o.q, len(ends)), *parts, *(addresses(t, len(ends)) for t in (o.out, o.lse, table))]
    sequences = [
        Sequence._make((*pointers, 1, end, start, end))
        for pointers, start, end in zip(zip(*parts, strict=True), starts, ends, strict=True)
    ]
    return kernel(sequences, o.sink)


def solve(rules: Rules, o: Operands, most: int, of: Keys) -> bool:
    """Fill ``out`` and ``lse`` from the keys and values (b, Hkv, s, D) that ``of`` finds for sequences and a range.

    False, and nothing is filled: the call is the definition's.
    """
    if rules.sink_tokens:
        return False
    ends = o.kv_len.tolist()
    parts = seen(rules, ends, [0] * len(ends) if o.kv_start is None else o.kv_start.tolist(), most)
    found = []
    for rows, keys in (parts or []) if o.out.numel() else []:
        held = of(rows, keys) if keys.start < keys.stop else None
        if held is None:
            return False
        found.append((rows, *attend(rules, o.q if rows is None else o.q[rows], *held)))
    # A sum of numbers of which one is infinite or NaN is, too.
    if parts is None or len(found) < len(parts) or not all(math.isfinite(float(lse.sum())) for *_, lse in found):
        return False
    for rows, out, lse in found:
        if o.sink is not None:  # it joins the denominator only
            out.mul_((lse - o.sink).sigmoid_()[..., None])
        (o.out if rows is None else o.out[rows]).copy_(out)
        (o.lse if rows is None else o.lse[rows]).copy_(lse)
    return True
