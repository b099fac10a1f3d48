"""indexer_topk on the CPU: PyTorch's own selection; the definition sorts all entries of a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core import Call, Target
from torch_attnkit.oracle import checks

from .problem import operands
from .reference import reference


def build(call: Call, target: Target) -> Callable[..., None]:
    Tq, S, K = (call.dim[axis] for axis in ("Tq", "S", "K"))

    def entry() -> torch.Tensor:
        """(S,), made for each call: plans of every length of a growing cache would keep it."""
        return torch.arange(S, dtype=torch.int32, device="cpu")

    def chosen(scores: torch.Tensor, k_len: torch.Tensor | None) -> torch.Tensor | None:
        """The entries (Tq, min(K, S)), ascending, None where a row has fewer or PyTorch had a choice."""
        s = scores
        if k_len is not None and int(k_len.min()) < S:
            s = s.masked_fill(entry() >= k_len[:, None], -torch.inf)  # (Tq, S)
        if K >= S:
            return entry() if bool((s > -torch.inf).all()) else None
        top, index = s.topk(K + 1)  # (Tq, K + 1)
        # In descending order, but NaN first: it counts as -inf.
        if bool(((top[:, K - 1] > top[:, K]) & (top[:, 0] == top[:, 0])).all()):
            return index[:, :K].sort(1).values
        return None

    def launch(*arguments: Any) -> None:
        o = operands(*arguments)
        found = None
        if Tq and S:
            checks.in_range(call.op, "k_len", o.length, 0, S)
            found = chosen(o.scores, o.length)
        if found is None:
            o.indices.copy_(reference(o.scores, o.length, K))
            return
        if K > S:
            o.indices.fill_(-1)
        o.indices[:, : min(K, S)] = found

    return launch
