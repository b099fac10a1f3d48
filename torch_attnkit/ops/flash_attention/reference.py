"""What flash_attention computes."""

from __future__ import annotations

import torch

from torch_attnkit.oracle import checks
from torch_attnkit.oracle.attention import attend, visible


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None = None,
    kv_len: torch.Tensor | None = None,
    kv_start: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: int = -1,
    sink_tokens: int = 0,
    softcap: float = 0.0,
    normalize: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (B, T), S = q.shape[:2], k.shape[1]
    checks.in_range("flash_attention", "kv_len", kv_len, 0, S)
    checks.in_range("flash_attention", "kv_start", kv_start, 0, S)
    keep = visible(
        torch.arange(S - T, S, device=q.device).expand(B, T),
        S,
        0 if kv_start is None else kv_start[:, None],
        S if kv_len is None else kv_len[:, None],
        causal=causal,
        window=window,
        sink_tokens=sink_tokens,
    )  # (B, T, S)
    scales = checks.scales("flash_attention", keep.any((1, 2)), q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    out, lse, row_sum = attend(
        q, k, v, keep, scale=scale, softcap=softcap, sink=sink, normalize=normalize, scales=scales
    )  # (B, T, Hq, Dv), (B, T, Hq), (B, T, Hq)
    return out, lse, row_sum.new_empty(0) if normalize else row_sum
