"""What kimi_delta_step computes."""

from __future__ import annotations

import torch
from torch.nn import functional

from torch_attnkit.oracle import checks


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    state_index: torch.Tensor,
    accepted: torch.Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    eps: float = 1e-6,
    lower_bound: float | None = None,
) -> torch.Tensor:
    B, n, _, K = q.shape
    checks.in_range("kimi_delta_step", "state_index", state_index, -1, state.shape[0] - 1)
    acc = torch.promote_types(q.dtype, torch.float32)
    rate, x = A_log.to(acc).exp()[:, None], a.to(acc) + dt_bias.to(acc)  # (H, 1), (B, n, H, K)
    g = -rate * functional.softplus(x) if lower_bound is None else lower_bound * (rate * x).sigmoid()
    decay, beta = g.exp(), b.to(acc).sigmoid()
    query, key = q.to(acc), k.to(acc)
    if qk_l2norm:
        query, key = (t * (t.square().sum(-1, keepdim=True) + eps).rsqrt() for t in (query, key))
    query = query * (K**-0.5 if scale is None else scale)
    out = torch.zeros_like(v)
    for i in range(B):
        slots = state_index[i].tolist()
        first = slots[0 if accepted is None else min(max(int(accepted[i]), 1), n) - 1]
        if first < 0:
            continue
        S = state[first].to(acc).clone()  # (H, V, K)
        for t in range(n):
            S = S * decay[i, t, :, None]
            u = beta[i, t, :, None] * (v[i, t].to(acc) - torch.einsum("hvk,hk->hv", S, key[i, t]))
            S = S + torch.einsum("hv,hk->hvk", u, key[i, t])
            out[i, t] = torch.einsum("hvk,hk->hv", S, query[i, t]).to(v.dtype)
            if slots[t] >= 0:
                state[slots[t]] = S.to(state.dtype)
    return out
