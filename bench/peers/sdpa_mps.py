"""``F.scaled_dot_product_attention`` on an Apple GPU, where PyTorch chooses between its own Metal kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """A call on the op's own inputs, or None where it would compute something else (masks, sinks, lengths)."""
    if op not in ("sdpa_decode", "flash_attention") or kwargs.get("window", -1) >= 0 or kwargs.get("softcap"):
        return None
    q, k, v = args[:3]
    scale, causal = kwargs.get("scale"), False
    if op == "sdpa_decode" and all(a is None for a in args[4:]):
        if bool((args[3] != k.shape[2]).any()):
            return None
        q, back = q[:, :, None], lambda o: o[:, :, 0]
    elif op == "flash_attention" and all(a is None for a in args[3:]) and kwargs.get("normalize", True):
        causal = bool(kwargs.get("causal"))
        if causal and q.shape[1] != k.shape[1]:  # PyTorch has the diagonal at the upper left
            return None
        (q, k, v), back = (t.transpose(1, 2) for t in (q, k, v)), lambda o: o.transpose(1, 2)
    else:
        return None

    def call() -> torch.Tensor:
        shared = q.shape[1] != k.shape[1]
        out: torch.Tensor = back(
            F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=shared)
        )
        return out

    return call
