"""What sdpa_multi computes."""

from __future__ import annotations

import torch

from torch_attnkit.oracle import checks
from torch_attnkit.oracle.attention import attend, visible


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_len: torch.Tensor,
    sink: torch.Tensor | None = None,
    kv_start: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int = -1,
    sink_tokens: int = 0,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    T, S = q.shape[1], k_cache.shape[2]
    checks.in_range("sdpa_multi", "kv_len", kv_len, 0, S)
    start = torch.zeros_like(kv_len) if kv_start is None else kv_start  # (B,)
    checks.in_range("sdpa_multi", "kv_start", start, 0, S)
    pos = kv_len[:, None] - T + torch.arange(T, device=q.device)  # (B, T)
    keep = visible(
        pos, S, start[:, None], kv_len[:, None], causal=causal, window=window, sink_tokens=sink_tokens
    )  # (B, T, S)
    keep = keep & (pos >= 0)[..., None]
    out, lse, _ = attend(
        q,  # (B, T, Hq, D)
        k_cache.transpose(1, 2),  # (B, S, Hkv, D)
        v_cache.transpose(1, 2),  # (B, S, Hkv, Dv)
        keep,
        scale=scale,
        softcap=softcap,
        sink=sink,
        scales=checks.scales("sdpa_multi", keep.any((1, 2)), q_scale=q_scale, k_scale=k_scale, v_scale=v_scale),
    )
    return out, lse  # (B, T, Hq, Dv), (B, T, Hq)
