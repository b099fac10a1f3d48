"""What causal_conv1d computes."""

from __future__ import annotations

import torch
from torch.nn import functional

from torch_attnkit.oracle import checks


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    state_index: torch.Tensor,
    bias: torch.Tensor | None = None,
    past: torch.Tensor | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    (Tq, _), W = x.shape, weight.shape[1]
    Ns, _, Ws = conv_state.shape
    checks.cu_seqlens("causal_conv1d", "cu_seqlens", cu_seqlens, Tq)
    checks.in_range("causal_conv1d", "state_index", state_index, -1, Ns - 1)
    acc = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros_like(x)  # (Tq, C)
    offsets = cu_seqlens.tolist()
    for b, slot in enumerate(state_index.tolist()):
        first, last = offsets[b : b + 2]
        if slot < 0 or first == last:
            continue
        held = conv_state[slot].T.clone()  # (Ws, C)
        if past is not None and int(past[b]) == 0:
            held.zero_()
        rows = torch.cat([held.to(x.dtype), x[first:last]])  # (Ws + T, C)
        begin = Ws - (W - 1)
        sums = torch.zeros_like(rows[:1], dtype=acc) if bias is None else bias.to(acc)
        for i in range(W):
            sums = sums + rows[begin + i : begin + i + last - first].to(acc) * weight[:, i].to(acc)
        out[first:last] = (functional.silu(sums) if activation == "silu" else sums).to(x.dtype)
        conv_state[slot] = rows[-Ws:].T.to(conv_state.dtype)
    return out
