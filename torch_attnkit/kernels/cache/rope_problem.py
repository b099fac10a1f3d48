"""What is normed, rotated and written by one launch, and its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .problem import Problem

VECTOR = 8  # neighbouring channels, all of them rotated or none
MOST_CHANNELS = 1024  # of a head, which stays in the registers of a warp


@dataclass(frozen=True)
class RopeProblem:
    """Heads of q, normed and rotated, and rows of keys, rotated and written to a cache."""

    keys: Problem  # rows of numbers to rows of a cache, one a token
    heads: int
    pairs: int  # of the last channels of heads and keys, rotated
    angle_dtype: torch.dtype
    q: tuple[int, ...]  # elements from one token and head to the next, 0 if there is none
    angles: tuple[int, ...]  # the same of the tokens of cos and sin


class RopeOperands(NamedTuple):
    """The tensors of one launch, and the one number."""

    q: torch.Tensor  # (T, H, D)
    kv: torch.Tensor  # (T, D)
    cache: torch.Tensor  # (Nc, Rb)
    slot: torch.Tensor  # (T,)
    cos: torch.Tensor  # (T, R2)
    sin: torch.Tensor  # (T, R2)
    global_scale: torch.Tensor | None  # ()
    out: torch.Tensor  # (T, H, D), contiguous
    eps: float
