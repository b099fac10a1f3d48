"""What flash_attention_varlen computes."""

from __future__ import annotations

import torch

from torch_attnkit.oracle import checks
from torch_attnkit.oracle.attention import attend, visible


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    sink: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: int = -1,
    sink_tokens: int = 0,
    softcap: float = 0.0,
    normalize: bool = True,
    max_seqlen_q: int = -1,
    max_seqlen_k: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    Tq, Hq, _ = q.shape
    checks.cu_seqlens("flash_attention_varlen", "cu_seqlens_q", cu_seqlens_q, Tq)
    checks.cu_seqlens("flash_attention_varlen", "cu_seqlens_k", cu_seqlens_k, k.shape[0])
    for name, cu, hint in (("q", cu_seqlens_q, max_seqlen_q), ("k", cu_seqlens_k, max_seqlen_k)):
        longest = max(cu.diff().tolist(), default=0)
        if 0 <= hint < longest:
            raise ValueError(
                f"flash_attention_varlen: max_seqlen_{name} is {hint}, accepted: -1 or at least the longest"
                f" sequence of cu_seqlens_{name}, {longest}"
            )
    stored = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    acc = torch.promote_types(stored, torch.float32)
    out = q.new_zeros(Tq, Hq, v.shape[2], dtype=stored)  # (Tq, Hq, Dv)
    lse = q.new_full((Tq, Hq), -torch.inf, dtype=acc)  # (Tq, Hq)
    row_sum = torch.zeros_like(lse)  # (Tq, Hq)
    cq, ck = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    keeps = []  # of each sequence (1, T, S)
    for q0, q1, k0, k1 in zip(cq, cq[1:], ck, ck[1:], strict=False):
        T, S = q1 - q0, k1 - k0
        pos = torch.arange(S - T, S, device=q.device)[None]  # (1, T)
        keeps.append(visible(pos, S, 0, S, causal=causal, window=window, sink_tokens=sink_tokens))
    seen = torch.tensor([bool(keep.any()) for keep in keeps], dtype=torch.bool, device=q.device)  # (B,)
    scales = checks.scales("flash_attention_varlen", seen, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    for b, (q0, q1, k0, k1) in enumerate(zip(cq, cq[1:], ck, ck[1:], strict=False)):
        out[q0:q1], lse[q0:q1], row_sum[q0:q1] = (
            t[0]  # (T, Hq, Dv), (T, Hq), (T, Hq)
            for t in attend(
                q[None, q0:q1],
                k[None, k0:k1],
                v[None, k0:k1],
                keeps[b],
                scale=scale,
                softcap=softcap,
                sink=sink,
                normalize=normalize,
                scales=[None if s is None else s[b : b + 1] for s in scales],
            )  # fmt: skip
        )
    return out, lse, row_sum.new_empty(0) if normalize else row_sum
