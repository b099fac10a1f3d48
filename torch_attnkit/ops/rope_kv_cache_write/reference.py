"""What rope_kv_cache_write computes: norm and rotation of q, rotation of kv, and what kv_cache_write does with it."""

from __future__ import annotations

import torch

from torch_attnkit.formats import rope
from torch_attnkit.ops.kv_cache_write.reference import reference as written


def reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    cache: torch.Tensor,
    slot: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    format: str = "none",
    rope_dim: int = 64,
) -> torch.Tensor:
    turned = rope.apply(kv, cos, sin, interleaved=True)  # (Tq, D)
    x = q.to(torch.promote_types(q.dtype, torch.float32))  # (Tq, Hq, D)
    x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    out = rope.apply(x, cos[:, None], sin[:, None], interleaved=True).to(q.dtype)
    try:
        written(turned, cache, slot, global_scale, format, rope_dim)
    except ValueError as refusal:
        raise ValueError(str(refusal).replace("kv_cache_write", "rope_kv_cache_write", 1)) from None
    return out
