"""What sdpa_decode_paged computes."""

from __future__ import annotations

import torch

from torch_attnkit.oracle import checks
from torch_attnkit.oracle.attention import attend, visible


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_len: torch.Tensor,
    sink: torch.Tensor | None = None,
    kv_start: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale: float | None = None,
    window: int = -1,
    sink_tokens: int = 0,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    Np, Ps, Hkv, D = k_cache.shape
    Mp = block_table.shape[1]
    checks.in_range("sdpa_decode_paged", "kv_len", kv_len, 0, Mp * Ps)
    start = torch.zeros_like(kv_len) if kv_start is None else kv_start  # (B,)
    checks.in_range("sdpa_decode_paged", "kv_start", start, 0, Mp * Ps)
    first = torch.arange(Mp, device=q.device) * Ps  # (Mp,) first key of each logical page
    used = first < kv_len[:, None]  # (B, Mp)
    if Np == 0 and bool(used.any()):
        raise ValueError("sdpa_decode_paged: k_cache has no pages, accepted: a page for every key below kv_len")
    checks.in_range("sdpa_decode_paged", "block_table", block_table.masked_fill(~used, 0), 0, max(Np - 1, 0))
    pages = block_table.masked_fill(~used, 0)[:, : int(used.any(0).sum())]  # (B, M) up to the longest sequence
    k = k_cache[pages].flatten(1, 2)  # (B, M*Ps, Hkv, D)
    v = v_cache[pages].flatten(1, 2)  # (B, M*Ps, Hkv, Dv)
    keep = visible(
        kv_len[:, None] - 1,
        k.shape[1],
        start[:, None],
        kv_len[:, None],
        causal=True,
        window=window,
        sink_tokens=sink_tokens,
    )  # (B, 1, M*Ps)
    scales = checks.scales("sdpa_decode_paged", q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    out, lse, _ = attend(q[:, None], k, v, keep, scale=scale, softcap=softcap, sink=sink, scales=scales)
    return out[:, 0], lse[:, 0]  # (B, Hq, Dv), (B, Hq)
