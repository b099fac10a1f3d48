"""sdpa_decode on the CPU: two products of PyTorch's own with the keys that count; the definition scores and masks all.

Sequences that see the same keys go through together. A call in which a sequence has no keys, or with scores that are
not finite, goes to the definition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core import Call, Target
from torch_attnkit.oracle import checks

from .problem import operands
from .reference import reference


def build(call: Call, target: Target) -> Callable[..., None]:
    B, Hkv, S, D, G = (*(call.dim[axis] for axis in ("B", "Hkv", "S", "D")), call.dim["Hq"] // call.dim["Hkv"])
    window, softcap = call.arg.window, call.arg.softcap
    scale = D**-0.5 if call.arg.scale is None else call.arg.scale

    def seen(kv_len: torch.Tensor, kv_start: torch.Tensor | None) -> list[tuple[slice, slice]]:
        """Which sequences see which keys."""
        starts = [0] * B if kv_start is None else kv_start.tolist()
        found = [
            (max(start, end - window) if window >= 0 else start, end)
            for start, end in zip(starts, kv_len.tolist(), strict=True)
        ]
        same = found[1:] == found[:-1]
        return [
            (slice(None) if same else slice(b, b + 1), slice(*keys)) for b, keys in enumerate(found[: 1 if same else B])
        ]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q (b, Hq, D) over k (b, Hkv, s, D) and v: out (b, Hq, Dv) and lse (b, Hq), in float32."""
        s = (q.float() * scale).unflatten(1, (Hkv, G)) @ k.float().mT  # (b, Hkv, G, s)
        if softcap > 0:
            s = softcap * (s / softcap).tanh_()
        lse = s.logsumexp(-1)  # (b, Hkv, G)
        return (s.sub_(lse[..., None]).exp_() @ v.float()).flatten(1, 2), lse.flatten(1)

    def launch(*arguments: Any) -> None:
        o = operands(*arguments)
        checks.in_range(call.op, "kv_len", o.kv_len, 0, S)
        checks.in_range(call.op, "kv_start", o.kv_start, 0, S)
        parts = seen(o.kv_len, o.kv_start) if o.out.numel() else []
        found = [
            (rows, *attend(o.q[rows], o.k[rows, :, keys], o.v[rows, :, keys]))
            for rows, keys in parts
            if keys.start < keys.stop
        ]
        if len(found) < len(parts) or not all(bool(lse.isfinite().all()) for _, _, lse in found):
            out, lse = reference(*arguments[:-2])
            found = [(slice(None), out, lse)]
        elif o.sink is not None:  # it joins the denominator only
            found = [(rows, out * (lse - o.sink).sigmoid_()[..., None], lse) for rows, out, lse in found]
        for rows, out, lse in found:
            o.out[rows] = out
            o.lse[rows] = lse

    return launch
