"""``F.scaled_dot_product_attention`` with one backend forced: shared by the cuDNN and the FA2 peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right


def adapt(backend: SDPBackend, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    plain, mask = kwargs.get("window", -1) < 0 and not kwargs.get("softcap"), None
    if op == "sdpa_decode" and plain and all(a is None for a in args[4:]):
        q, k, v, kv_len = args[:4]
        if bool((kv_len != k.shape[2]).any()):  # padding would need a mask, which neither backend takes at full speed
            return None
        q, causal, back = q[:, :, None], False, lambda o: o[:, :, 0]
    elif op == "sdpa_multi" and plain and all(a is None for a in args[4:]):
        q, k, v, kv_len = args[:4]
        if bool((kv_len != k.shape[2]).any()):
            return None
        q, causal, back = q.transpose(1, 2), False, lambda o: o.transpose(1, 2)
        if kwargs.get("causal", True):
            if backend != SDPBackend.FLASH_ATTENTION:  # the only one to take the diagonal at the lower right
                return None
            mask = causal_lower_right(q.shape[2], k.shape[2])
    elif op == "flash_attention" and plain and all(a is None for a in args[3:]) and kwargs.get("normalize", True):
        q, k, v = (a.transpose(1, 2) for a in args[:3])
        causal, back = bool(kwargs.get("causal")), lambda o: o.transpose(1, 2)
        if causal and q.shape[2] != k.shape[2]:
            return None
    else:
        return None

    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal, scale=kwargs.get("scale"), enable_gqa=True
            )
        return back(out)

    return call
