"""Host side of blocks of queries over a cache in pages, which every architecture solves in its own way. Imports no
cutlass."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torch_attnkit.core.target import Target

from . import problem


@dataclass(frozen=True)
class Problem:
    """Packed queries over ``pages`` pages of ``page`` keys each.

    Of ``attention``, k and v are the pages (Np, Ps, Hkv, D) and ``keys`` what a row of the block table has room for.
    """

    attention: problem.Problem
    page: int
    pages: int
    longest_keys: int  # that a sequence has at most


class Operands(NamedTuple):
    """The tensors of one launch."""

    q: torch.Tensor  # (Tq, Hq, D)
    k: torch.Tensor  # (Np, Ps, Hkv, D)
    v: torch.Tensor  # (Np, Ps, Hkv, Dv)
    cu_q: torch.Tensor  # (B + 1)
    table: torch.Tensor  # (B, Mp)
    kv_len: torch.Tensor  # (B)
    sink: torch.Tensor | None  # (Hq)
    out: torch.Tensor  # (Tq, Hq, Dv)
    lse: torch.Tensor  # (Tq, Hq)
    scales: tuple[torch.Tensor | None, ...]  # of q, k and v, (B, Hkv) each


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``."""
    module = importlib.import_module(f"torch_attnkit.kernels.prefill.{target.arch}.paged")
    run: Callable[[Operands], None] = module.launcher(problem, target)
    return run
