"""What paged_kv_cache_write computes."""

from __future__ import annotations

import torch

from torch_attnkit.oracle import checks


def reference(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    op, (pages, size) = "paged_kv_cache_write", k_cache.shape[:2]
    checks.in_range(op, "slot", slot, -1, pages * size - 1)
    checks.distinct(op, "slot", slot)
    checks.positive(op, "k_scale", k_scale)
    checks.positive(op, "v_scale", v_scale)
    keep = slot >= 0  # (R,)
    page, place = slot[keep].long() // size, slot[keep].long() % size
    rows = [stored(new[keep], cache.dtype, scale) for new, cache, scale in
            ((key, k_cache, k_scale), (value, v_cache, v_scale))]  # fmt: skip
    k_cache[page, place], v_cache[page, place] = rows


def stored(new: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """Tokens (R, Hkv, D) as the cache holds them; ``scale`` () or (Hkv,)."""
    if dtype != torch.float8_e4m3fn:
        return new
    x = new.float() if scale is None else new.float() / scale.view(-1, 1)
    return x.clamp(-448, 448).to(dtype)
