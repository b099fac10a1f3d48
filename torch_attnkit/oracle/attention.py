"""Masked softmax attention in plain torch: the one definition behind every attention reference.

Positions are integers per sequence. A query at position p sees key j when every rule that is switched on allows it:
causal (j <= p), window (p - W < j, and j < p + W when not causal), the valid range [start, end), sink tokens.
"""

from __future__ import annotations

import torch


def visible(
    pos: torch.Tensor,
    n_keys: int,
    start: torch.Tensor | int,
    end: torch.Tensor | int,
    *,
    causal: bool,
    window: int,
    sink_tokens: int,
) -> torch.Tensor:
    """Which keys each query sees: pos (B, T), start and end (B, 1) or ints -> bool (B, T, n_keys).

    A query whose position lies before ``start`` or is negative sees nothing under ``causal``.
    """
    key = torch.arange(n_keys, device=pos.device)  # (S,)
    p = pos.long()[..., None]  # (B, T, 1)
    first = torch.as_tensor(start, device=pos.device)[..., None]  # (B, 1, 1)
    # Callers may say "all" with any large number; these cannot overflow.
    window, sink_tokens = min(window, 2**31), min(sink_tokens, n_keys)
    keep = (key >= first) & (key < torch.as_tensor(end, device=pos.device)[..., None])
    keep = keep.expand(*pos.shape, n_keys)  # (B, T, S)
    if window >= 0:
        near = key > p - window
        if not causal:
            near = near & (key < p + window)
        keep = keep & (near | (key < first + sink_tokens))
    if causal:
        keep = keep & (key <= p)
    return keep


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor,
    *,
    scale: float | None,
    softcap: float = 0.0,
    sink: torch.Tensor | None = None,
    normalize: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of q (B, T, Hq, D) over k (B, S, Hkv, D), v (B, S, Hkv, Dv) where keep (B, T, S) is true.

    Returns out (B, T, Hq, Dv) in q's dtype, lse (B, T, Hq) and row_sum (B, T, Hq) in the accumulation dtype (float32,
    or float64 for float64 inputs). Rows that see nothing give out 0, lse -inf, row_sum 0. ``sink`` (Hq) joins the
    denominator only; ``lse`` and ``row_sum`` leave it out.
    """
    B, T, Hq, D = q.shape
    Hkv, Dv = k.shape[2], v.shape[3]
    acc = torch.promote_types(q.dtype, torch.float32)
    qg = q.to(acc).reshape(B, T, Hkv, Hq // Hkv, D)
    s = torch.einsum("bthgd,bshd->bthgs", qg, k.to(acc)) * (D**-0.5 if scale is None else scale)
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~keep[:, :, None, None, :], -torch.inf).flatten(2, 3)  # (B, T, Hq, S)
    top = s.amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)  # (B, T, Hq)
    base = top.masked_fill(top == -torch.inf, 0.0)  # an empty row subtracts 0 and keeps exp(-inf) = 0
    p = (s - base[..., None]).exp()
    row_sum = p.sum(-1)  # (B, T, Hq)
    lse = base + row_sum.log()  # log(0) = -inf for an empty row
    # Masked values may be anything, nan included: a weight of 0 must not meet them.
    seen = keep.any(1)[..., None, None]  # (B, S, 1, 1)
    vg = v.to(acc).masked_fill(~seen, 0.0)
    o = torch.einsum("bthgs,bshd->bthgd", p.unflatten(2, (Hkv, Hq // Hkv)), vg).reshape(B, T, Hq, Dv)
    if normalize:
        total = row_sum
        if sink is not None:
            total = total + (sink.to(acc) - base).exp()  # the sink as a virtual key with value 0
        o = o / total.masked_fill(total == 0, 1.0)[..., None]
    return o.to(q.dtype).contiguous(), lse.contiguous(), row_sum.contiguous()
