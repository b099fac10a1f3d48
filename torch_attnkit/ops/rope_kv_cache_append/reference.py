"""What rope_kv_cache_append computes."""

from __future__ import annotations

import torch

from torch_attnkit.formats import rope
from torch_attnkit.oracle import checks


def reference(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, turned = (rope.apply(x, cos, sin, interleaved=False, trailing=False) for x in (q, key))
    rows = k_cache.shape[2]
    checks.in_range("rope_kv_cache_append", "slot", slot, -1, rows - 1)
    sink_out = torch.empty(0, dtype=torch.float32, device=q.device) if sink is None else sink.float().clone()
    pairs = ((k_cache, turned), (v_cache, value.clone()))  # a token may lie in a cache
    if slot is None:
        for cache, new in pairs:
            cache.copy_(torch.cat((cache, new[:, :, None]), 2)[:, :, 1:] if rows else cache)
        return out, sink_out
    slot = slot.expand(q.shape[0])  # (B,)
    sequences = (slot >= 0).nonzero()[:, 0]
    for cache, new in pairs:
        cache[sequences, :, slot[sequences].long()] = new[sequences]
    return out, sink_out
