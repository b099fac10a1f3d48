"""indexer_scores on the CPU: PyTorch's products of a batch of matrices, one a request; the definition goes request by
request and looks for its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core import Call, Target
from torch_attnkit.oracle import checks

from .problem import operands

_PRODUCTS = 1 << 22  # at a time: 16 MB


def build(call: Call, target: Target) -> Callable[..., None]:
    Tq, H, D, R, S = (call.dim[axis] for axis in ("Tq", "Hi", "Qb", "R", "S"))

    def scored(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """q (r, t, H, D), k (r, n, D) and weights (r, t, H): (r, t, n)."""
        products = torch.bmm(q.flatten(1, 2), k.mT).relu_()  # (r, t * H, n)
        heads = products.unflatten(1, (-1, H)).flatten(0, 1)  # (r * t, H, n)
        return torch.bmm(weights.flatten(0, 1)[:, None], heads).view(*q.shape[:2], -1)

    def launch(*arguments: Any) -> None:
        o = operands(*arguments)
        checks.in_range(call.op, "k_len", o.k_len, 0, S)
        most = int(o.k_len.max()) if Tq else 0
        if most < S:
            o.scores.fill_(-torch.inf)
        if min(Tq, most) == 0:
            return
        T = Tq // R
        q = o.q.float().unflatten(0, (R, T))  # (R, T, H, D)
        k, weights = o.k[:, :most].float(), o.weights.float().unflatten(0, (R, T))  # (R, n, D), (R, T, H)
        out = o.scores.unflatten(0, (R, T))[..., :most]  # (R, T, n)
        one = T * max(H, 1) * most <= _PRODUCTS  # whether the tokens of a request go together
        requests, tokens = (
            (max(1, _PRODUCTS // (T * max(H, 1) * most)), T) if one else (1, max(1, _PRODUCTS // (max(H, 1) * most)))
        )
        for r in range(0, R, requests):
            for t in range(0, T, tokens):
                at = slice(r, r + requests), slice(t, t + tokens)
                out[at] = scored(q[at], k[at[0]], weights[at])
        if int(o.k_len.min()) < most:
            entry = torch.arange(most, dtype=torch.int32, device="cpu")  # (n,)
            o.scores[:, :most].masked_fill_(entry >= o.k_len[:, None], -torch.inf)

    return launch
