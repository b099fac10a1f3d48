"""sdpa_decode on the CPU: one pass over few keys (csrc/cpu), else two products of PyTorch's own with the keys that
count (``kernels/decode/cpu.py``); the definition scores and masks all.

Sequences that see the same keys go through together. A call in which a sequence has no keys, or with scores that are
not finite, goes to the definition, and so does what it refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit import cpu
from torch_attnkit.core import Call, Target, invariance
from torch_attnkit.core.native import ready
from torch_attnkit.core.numerics import exact
from torch_attnkit.cpu.blocks import Axes, blocks
from torch_attnkit.kernels.decode.cpu import Rules, in_blocks, solve

from .problem import operands
from .reference import reference

_FEW = 1 << 20  # numbers that one thread multiplies in 0.1 ms


def build(call: Call, target: Target) -> Callable[..., None]:
    B, Hq, Hkv, S, D, Dv = (call.dim[axis] for axis in ("B", "Hq", "Hkv", "S", "D", "Dv"))
    a, rules = call.arg, Rules.of(call.dim["D"], call.arg)
    # How large caches are is the batch's.
    few = not invariance.is_on() and 0 < B * Hq * S * (D + Dv) <= _FEW and Dv > 0 and not rules.sink_tokens
    native = blocks(call, (a.q, a.k_cache, a.v_cache), Axes(-1, 1), Axes(2, 1))

    def launch(*arguments: Any) -> None:
        o = operands(*arguments)
        if in_blocks(native, o, S):
            return

        def keys(rows: slice | None, seen: slice) -> tuple[torch.Tensor, torch.Tensor]:
            k, v = (t if rows is None else t[rows] for t in (o.k, o.v))
            return k[:, :, seen], v[:, :, seen]

        if not solve(rules, o, S, keys):
            for result, from_reference in zip((o.out, o.lse), reference(*arguments[:-2]), strict=True):
                result.copy_(from_reference)

    if cpu.kernels is None or not few or any(t.dtype != torch.float32 for t in (a.q, a.k_cache, a.v_cache)):
        return launch
    kernel = cpu.kernels.Decode(
        [B, Hq, Hkv, S, D, Dv], window=rules.window, scale=rules.scale, softcap=rules.softcap,
        q=a.q.stride()[:2], k=a.k_cache.stride()[:3], v=a.v_cache.stride()[:3],
    )  # fmt: skip
    many = exact(launch)

    @ready(kernel)
    def in_one(*arguments: Any) -> None:
        o = operands(*arguments)
        if not kernel(
            o.q.data_ptr(), o.k.data_ptr(), o.v.data_ptr(), o.kv_len.data_ptr(), cpu.address(o.sink),
            cpu.address(o.kv_start), 0, 0, 0, o.out.data_ptr(), o.lse.data_ptr(),
        ):  # fmt: skip
            many(*arguments)

    return in_one
