"""What sparse_fmha_with_swa computes."""

from __future__ import annotations

import torch

from torch_attnkit.oracle import checks
from torch_attnkit.oracle.attention import attend

NAME = "sparse_fmha_with_swa"
CHUNK = 1 << 24  # gathered key elements at a time: every token has keys of its own, which would not fit at once


def reference(
    q: torch.Tensor,
    swa_kv: torch.Tensor,
    swa_end: torch.Tensor,
    compressed_kv: torch.Tensor | None = None,
    topk_indices: torch.Tensor | None = None,
    compressed_len: torch.Tensor | None = None,
    request_ids: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
    window: int = 128,
    normalize: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (Tq, Hq, D), (R, S, _) = q.shape, swa_kv.shape
    C = 0 if compressed_kv is None else compressed_kv.shape[1]
    checks.in_range(NAME, "swa_end", swa_end, 0, S)
    checks.in_range(NAME, "topk_indices", topk_indices, -1, C - 1)
    checks.in_range(NAME, "compressed_len", compressed_len, 0, C)
    checks.in_range(NAME, "request_ids", request_ids, 0, R - 1)
    if topk_indices is not None:
        checks.distinct(NAME, "topk_indices", topk_indices)

    token = torch.arange(Tq, device=q.device)
    request = token * R // max(Tq, 1) if request_ids is None else request_ids.long()  # (Tq,)
    W = min(window, S)
    near = swa_end[:, None] - W + torch.arange(W, device=q.device)  # (Tq, W) keys of the window, negative before 0
    far = torch.arange(C, device=q.device).expand(Tq, C) if topk_indices is None else topk_indices  # (Tq, K)
    far = far[:, : far.shape[1] if C else 0]  # without entries every index is -1
    limit = far.new_full((Tq,), C) if compressed_len is None else compressed_len  # (Tq,)
    keep = torch.cat([near >= 0, (far >= 0) & (far < limit[:, None])], 1)  # (Tq, W + K)

    acc = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(Tq, Hq, D)
    lse, row_sum = (q.new_empty(Tq, Hq, dtype=acc) for _ in range(2))
    for t in token.split(max(1, CHUNK // max(1, keep.shape[1] * D))):
        r = request[t, None]  # (t, 1)
        kv = swa_kv[r, near[t].clamp(min=0)]  # (t, W, D)
        if compressed_kv is not None and C:
            kv = torch.cat([kv, compressed_kv[r, far[t].clamp(min=0)]], 1)  # (t, W + K, D)
        kv = kv[:, :, None]  # (t, W + K, 1, D): one KV head
        o, l, s = attend(q[t, None], kv, kv, keep[t, None], scale=scale, sink=sink, normalize=normalize)
        out[t], lse[t], row_sum[t] = o[:, 0], l[:, 0], s[:, 0]
    return out, lse, row_sum.new_empty(0) if normalize else row_sum
