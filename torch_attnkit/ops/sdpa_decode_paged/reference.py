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
    keep = visible(
        kv_len[:, None] - 1,
        Mp * Ps,
        start[:, None],
        kv_len[:, None],
        causal=True,
        window=window,
        sink_tokens=sink_tokens,
    )  # (B, 1, Mp*Ps)
    table = checks.pages("sdpa_decode_paged", block_table, keep[:, 0], k_cache)  # (B, Mp)
    M = -(-int(kv_len.max()) // Ps) if bool(keep.any()) else 0  # pages of the longest sequence
    k = k_cache[table[:, :M]].flatten(1, 2)  # (B, M*Ps, Hkv, D)
    v = v_cache[table[:, :M]].flatten(1, 2)  # (B, M*Ps, Hkv, Dv)
    keep = keep[..., : M * Ps]
    scales = checks.scales("sdpa_decode_paged", keep.any((1, 2)), q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    out, lse, _ = attend(q[:, None], k, v, keep, scale=scale, softcap=softcap, sink=sink, scales=scales)
    return out[:, 0], lse[:, 0]  # (B, Hq, Dv), (B, Hq)
