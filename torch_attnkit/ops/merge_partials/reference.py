"""What merge_partials computes."""

from __future__ import annotations

import torch


def reference(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    sink: torch.Tensor | None = None,
    row_sum: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    acc = torch.promote_types(out_partial.dtype, torch.float32)
    part = lse_partial.to(acc).masked_fill(lse_partial == torch.inf, -torch.inf)  # (P, R, H)
    lse = part.logsumexp(0) if len(part) else part.new_full(part.shape[1:], -torch.inf)  # (R, H)
    empty = part == -torch.inf  # (P, R, H)
    # A partial that saw nothing has weight 0 and may hold anything; -inf - -inf must not be formed.
    weight = (part - lse).exp().masked_fill(empty, 0.0)  # (P, R, H)
    if row_sum is not None:
        weight = weight / row_sum.to(acc).masked_fill(empty, 1.0)
    out = (weight[..., None] * out_partial.to(acc).masked_fill(empty[..., None], 0.0)).sum(0)  # (R, H, Dv)
    if sink is not None:
        out = out * (lse - sink.to(acc)).sigmoid().masked_fill(lse == -torch.inf, 0.0)[..., None]
    return out.to(dtype or out_partial.dtype).contiguous(), lse.contiguous()
