"""What sdpa_decode computes."""

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
    window: int = -1,
    sink_tokens: int = 0,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    B, Hkv, S, D = k_cache.shape
    checks.in_range("sdpa_decode", "kv_len", kv_len, 0, S)
    start = torch.zeros_like(kv_len) if kv_start is None else kv_start  # (B,)
    checks.in_range("sdpa_decode", "kv_start", start, 0, S)
    pos = kv_len[:, None] - 1  # (B, 1)
    keep = visible(
        pos, S, start[:, None], kv_len[:, None], causal=True, window=window, sink_tokens=sink_tokens
    )  # (B, 1, S)
    out, lse, _ = attend(
        q[:, None],  # (B, 1, Hq, D)
        k_cache.transpose(1, 2),  # (B, S, Hkv, D)
        v_cache.transpose(1, 2),  # (B, S, Hkv, Dv)
        keep,
        scale=scale,
        softcap=softcap,
        sink=sink,
        scales=checks.scales("sdpa_decode", keep.any((1, 2)), q_scale=q_scale, k_scale=k_scale, v_scale=v_scale),
    )
    return out[:, 0], lse[:, 0]  # (B, Hq, Dv), (B, Hq)
