"""What gated_delta_step computes."""

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
    beta_scale: float = 1.0,
) -> torch.Tensor:
    n, Hk, K = q.shape[1:]
    checks.in_range("gated_delta_step", "state_index", state_index, -1, state.shape[0] - 1)
    acc = torch.promote_types(q.dtype, torch.float32)
    group = v.shape[2] // Hk
    q, k = (x.to(acc).repeat_interleave(group, 2) for x in (q, k))  # (B, n, Hv, K)
    if qk_l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + eps).rsqrt() for x in (q, k))
    q = q * (K**-0.5 if scale is None else scale)
    decay = (-A_log.to(acc).exp() * functional.softplus(a.to(acc) + dt_bias.to(acc))).exp()  # (B, n, Hv)
    beta = beta_scale * b.to(acc).sigmoid()
    column = torch.zeros_like(state_index[:, 0]) if accepted is None else accepted.clamp(1, n) - 1
    first = state_index.gather(1, column.long()[:, None])[:, 0]  # (B,)
    held = first >= 0
    S = state[first.clamp(min=0).long()] if state.shape[0] else state.new_zeros(len(first), *state.shape[1:])
    S = S.to(acc)  # (B, Hv, V, K), a copy
    S[~held] = 0.0
    rows = []
    for t in range(n):
        S *= decay[:, t, :, None, None]
        u = beta[:, t, :, None] * (v[:, t].to(acc) - (S @ k[:, t, :, :, None])[..., 0])  # (B, Hv, V)
        S.addcmul_(u[..., None], k[:, t, :, None, :])
        rows.append((S @ q[:, t, :, :, None])[..., 0])
        kept = (held & (state_index[:, t] >= 0)).nonzero()[:, 0]
        state.index_copy_(0, state_index[kept, t].long(), S[kept].to(state.dtype))
    return torch.stack(rows, 1).masked_fill(~held[:, None, None, None], 0.0).to(v.dtype)
