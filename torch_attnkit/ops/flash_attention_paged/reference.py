"""What flash_attention_paged computes."""

from __future__ import annotations

import torch

from torch_attnkit.oracle import checks
from torch_attnkit.oracle.attention import attend, visible

_NAME = "flash_attention_paged"


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    block_table: torch.Tensor,
    kv_len: torch.Tensor,
    sink: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int = -1,
    sink_tokens: int = 0,
    softcap: float = 0.0,
    max_seqlen_q: int = -1,
    max_seqlen_k: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:
    Tq, Hq, _ = q.shape
    Ps, Dv = v_cache.shape[1], v_cache.shape[3]
    Mp = block_table.shape[1]
    checks.cu_seqlens(_NAME, "cu_seqlens_q", cu_seqlens_q, Tq)
    checks.in_range(_NAME, "kv_len", kv_len, 0, Mp * Ps)
    for name, lengths, hint in (("q", cu_seqlens_q.diff(), max_seqlen_q), ("k", kv_len, max_seqlen_k)):
        longest = max(lengths.tolist(), default=0)
        if 0 <= hint < longest:
            raise ValueError(
                f"{_NAME}: max_seqlen_{name} is {hint}, accepted: -1 or at least the longest sequence, {longest}"
            )
    offsets = cu_seqlens_q.tolist()
    keeps = []  # of each sequence (1, T, S)
    seen = torch.zeros(len(kv_len), Mp * Ps, dtype=torch.bool, device=q.device)  # (B, Mp*Ps)
    for b, (q0, q1, S) in enumerate(zip(offsets, offsets[1:], kv_len.tolist(), strict=False)):
        pos = torch.arange(S - (q1 - q0), S, device=q.device)[None]  # (1, T)
        keep = visible(pos, S, 0, S, causal=causal, window=window, sink_tokens=sink_tokens)  # (1, T, S)
        keeps.append(keep & (pos >= 0)[..., None])
        seen[b, :S] = keeps[b][0].any(0)
    table = checks.pages(_NAME, block_table, seen, k_cache)  # (B, Mp)
    scales = checks.scales(_NAME, seen.any(1), q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    stored = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    out = q.new_zeros(Tq, Hq, Dv, dtype=stored)  # (Tq, Hq, Dv)
    lse = q.new_full((Tq, Hq), -torch.inf, dtype=torch.promote_types(stored, torch.float32))  # (Tq, Hq)
    for b, (q0, q1, keep) in enumerate(zip(offsets, offsets[1:], keeps, strict=False)):
        S = keep.shape[2]
        if not bool(keep.any()):
            continue
        pages = table[b, : -(-S // Ps)].long()  # (M,)
        k, v = (cache[pages].flatten(0, 1)[None, :S] for cache in (k_cache, v_cache))  # (1, S, Hkv, D), ... Dv
        own = [None if s is None else s[b : b + 1] for s in scales]  # (1, Hkv) each
        rows, sums, _ = attend(q[None, q0:q1], k, v, keep, scale=scale, softcap=softcap, sink=sink, scales=own)
        out[q0:q1], lse[q0:q1] = rows[0], sums[0]  # (T, Hq, Dv), (T, Hq)
    return out, lse
