"""What routers do on the CPU: which calls are C++'s (csrc/cpu), and for the others the largest entries of rows, by
PyTorch's own selection where it leaves no choice.

Routers have few numbers: what they cost is the number of calls of PyTorch, of which a Python list is one.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from torch_attnkit import cpu
from torch_attnkit.oracle.routing import FAR, NOTHING, TINY

_FEW = 1024  # elements that Python looks at in less time than three calls of PyTorch

_FEW_LOGITS = 4096  # for which one pass in scalar code takes 40 us


def in_one(logits: torch.Tensor) -> bool:
    """Whether the C++ kernels take these logits (R, E)."""
    return cpu.kernels is not None and logits.dtype == torch.float32 and logits.numel() <= _FEW_LOGITS


def ranked(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The k largest of x (R, E), descending, and where they are, int64, (R, k) each; None if there is more to say.

    ``topk`` takes any of equal entries, in any order: there is more to say where two neighbours of its result are
    equal, or the last one and the first that was left out. There is, too, where one is infinite, or an entry of x NaN,
    which ``topk`` puts first.
    """
    top, index = x.topk(min(k + 1, x.shape[1]))  # (R, k + 1)
    if top.numel() <= _FEW:
        plain = all(
            row[0] < math.inf and row[-1] > -math.inf and all(a > b for a, b in pairwise(row)) for row in top.tolist()
        )
    else:
        plain = bool((top[:, :-1] > top[:, 1:]).all()) and bool(top[:, :: top.shape[1]].isfinite().all())
        plain = plain and bool(top[:, -1].isfinite().all())
    if not plain:
        return None
    return (top, index) if top.shape[1] == k else (top[:, :k], index[:, :k])


def sqrt_softplus(logits: torch.Tensor) -> torch.Tensor:
    """``oracle.routing.sqrt_softplus`` in float32 by PyTorch's softplus, which is x itself from 20 on, as float32, and
    has lost bits where e^x is subnormal."""
    x = logits.float()  # (R, E)
    s = torch.nn.functional.softplus(x).sqrt_()
    if not x.numel() or not float(x.amin()) < FAR:  # nor with NaN, of which s tells
        return s
    return torch.where(x < FAR, (x / 2).exp_(), s).masked_fill_(x < NOTHING, 0.0)


def store(chosen: torch.Tensor, renormalize: bool, route_scale: float, out: torch.Tensor) -> None:
    """``oracle.routing.scaled`` of chosen (R, K) to out."""
    if renormalize:
        torch.div(chosen, chosen.sum(1, keepdim=True).add_(TINY), out=out)
    else:
        out.copy_(chosen)
    if route_scale != 1:
        out.mul_(route_scale)
