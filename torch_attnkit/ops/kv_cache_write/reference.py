"""What kv_cache_write computes."""

from __future__ import annotations

import torch

from torch_attnkit.formats import kv_cache
from torch_attnkit.oracle import checks, fp4


def reference(
    kv: torch.Tensor,
    cache: torch.Tensor,
    slot: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    format: str = "none",
    rope_dim: int = 64,
) -> None:
    checks.in_range("kv_cache_write", "slot", slot, -1, cache.shape[0] - 1)
    checks.distinct("kv_cache_write", "slot", slot)
    fp4.check_factor("kv_cache_write", global_scale)
    rows = kv if format == "none" else kv_cache.encode_rows(kv, format, rope_dim, global_scale)  # (R, Rb)
    keep = slot >= 0  # (R,)
    cache[slot[keep].long()] = rows[keep]
