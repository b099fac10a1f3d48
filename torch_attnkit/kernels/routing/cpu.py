"""What routers do on the CPU: the largest entries of rows, by PyTorch's own selection where it leaves no choice."""

from __future__ import annotations

import torch

from torch_attnkit.oracle.topk import largest


def largest_of(x: torch.Tensor, k: int) -> torch.Tensor:
    """What ``oracle.topk.largest`` gives of x (R, E), int64 (R, k); of rows with NaN the definition's answer, too.

    ``topk`` takes any of equal entries, in any order: where two neighbours of its result are equal, or the last one and
    the first that was left out, all are sorted instead. NaN is not larger than anything.
    """
    top, index = x.topk(min(k + 1, x.shape[1]))  # (R, k + 1)
    if bool((top[:, :-1] > top[:, 1:]).all()):
        return index[:, :k]
    return largest(x, k)
