"""sdpa_decode on the CPU: one pass over few keys (csrc/cpu), else two products of PyTorch's own with the keys that
count; the definition scores and masks all.

Sequences that see the same keys go through together. A call in which a sequence has no keys, or with scores that are
not finite, goes to the definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit import cpu
from torch_attnkit.core import Call, Target
from torch_attnkit.core.native import ready
from torch_attnkit.core.numerics import exact
from torch_attnkit.oracle import checks

from .problem import operands
from .reference import reference

_FEW = 1 << 20  # numbers that one thread multiplies in 0.1 ms


def build(call: Call, target: Target) -> Callable[..., None]:
    B, Hkv, S, D, G = (*(call.dim[axis] for axis in ("B", "Hkv", "S", "D")), call.dim["Hq"] // call.dim["Hkv"])
    window, softcap = call.arg.window, call.arg.softcap
    scale = D**-0.5 if call.arg.scale is None else call.arg.scale
    a = call.arg
    few = 0 < B * call.dim["Hq"] * S * (D + call.dim["Dv"]) <= _FEW and call.dim["Dv"] > 0

    def ranges(name: str, given: torch.Tensor) -> list[int]:
        found: list[int] = given.tolist()
        if found and not 0 <= min(found) <= max(found) <= S:
            checks.in_range(call.op, name, given, 0, S)
        return found

    def seen(kv_len: torch.Tensor, kv_start: torch.Tensor | None) -> list[tuple[slice | None, slice]]:
        """Which sequences see which keys; None stands for all of them."""
        ends, starts = ranges("kv_len", kv_len), [0] * B if kv_start is None else ranges("kv_start", kv_start)
        found = [
            (max(start, end - window) if window >= 0 else start, end) for start, end in zip(starts, ends, strict=True)
        ]
        if found[1:] == found[:-1]:
            return [(None, slice(*keys)) for keys in found[:1]]
        return [(slice(b, b + 1), slice(*keys)) for b, keys in enumerate(found)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q (b, Hq, D) over k (b, Hkv, s, D) and v: out (b, Hq, Dv) and lse (b, Hq), in float32."""
        s = (q.float() * scale).reshape(-1, Hkv, G, D) @ k.float().mT  # (b, Hkv, G, s)
        if softcap > 0:
            s = softcap * (s / softcap).tanh_()
        lse = s.logsumexp(-1)  # (b, Hkv, G)
        return (s.sub_(lse[..., None]).exp_() @ v.float()).flatten(1, 2), lse.flatten(1)

    def launch(*arguments: Any) -> None:
        o = operands(*arguments)
        parts = seen(o.kv_len, o.kv_start)
        found = []
        for rows, keys in parts if o.out.numel() else []:
            if keys.start < keys.stop:
                q, k, v = (t if rows is None else t[rows] for t in (o.q, o.k, o.v))
                found.append((rows, *attend(q, k[:, :, keys], v[:, :, keys])))
        # A sum of numbers of which one is infinite or NaN is, too.
        if len(found) < len(parts) or not all(math.isfinite(float(lse.sum())) for _, _, lse in found):
            out, lse = reference(*arguments[:-2])
            found = [(None, out, lse)]
        elif o.sink is not None:  # it joins the denominator only
            found = [(rows, out.mul_((lse - o.sink).sigmoid_()[..., None]), lse) for rows, out, lse in found]
        for rows, out, lse in found:
            (o.out if rows is None else o.out[rows]).copy_(out)
            (o.lse if rows is None else o.lse[rows]).copy_(lse)

    if cpu.kernels is None or not few or any(t.dtype != torch.float32 for t in (a.q, a.k_cache, a.v_cache)):
        return launch
    kernel = cpu.kernels.Decode(
        [B, call.dim["Hq"], Hkv, S, D, call.dim["Dv"]], window=window, scale=scale, softcap=softcap,
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
