"""What kv_cache_gather computes."""

from __future__ import annotations

import torch

from torch_attnkit.formats import kv_cache
from torch_attnkit.oracle import checks, fp4


def reference(
    cache: torch.Tensor,
    slot: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    format: str = "none",
    head_dim: int = 0,
    rope_dim: int = 64,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    checks.in_range("kv_cache_gather", "slot", slot, -1, cache.shape[0] - 1)
    fp4.check_factor("kv_cache_gather", global_scale)
    keep = slot >= 0  # (R,)
    rows = cache[slot[keep].long()]  # (those kept, Rb)
    if format == "none":
        found = rows.to(dtype or cache.dtype)
    else:
        found = kv_cache.decode_rows(rows, format, head_dim, rope_dim, global_scale, dtype or torch.float32)
    out = torch.zeros(len(slot), found.shape[1], dtype=found.dtype, device=cache.device)  # (R, D)
    out[keep] = found
    return out
