"""A problem of sparse attention with what Blackwell asks of its caches besides."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from ..problem import Operands, Problem

_MOST = 1 << 30  # rows of a cache, and keys of a request: numbers of rows have 32 bits


@dataclass(frozen=True)
class Located(Problem):
    """``even``: all rows of a cache have one distance, so that TMA finds them by their numbers."""

    even: bool = False


def located(problem: Problem, near: torch.Tensor, far: torch.Tensor | None) -> Located:
    """With caches of numbers or of bytes. One without rows is not looked at: the other stands in for it."""
    caches = [rows for rows in (near, far) if rows is not None and rows.numel()]
    few = problem.capacity < _MOST and problem.entries < _MOST
    found = problem.format == "none" and bool(caches) and few and all(map(_even, caches))
    return Located(**{f.name: getattr(problem, f.name) for f in fields(problem)}, even=found)


def standing_in(operands: Operands) -> Operands:
    """With a cache that has rows for one that has none: there is no matrix without rows."""
    near, far = operands.near, operands.far
    some = near if far is None or near.numel() else far
    return operands._replace(near=some, far=far if far is not None and far.numel() else some)


def _even(rows: torch.Tensor) -> bool:
    """Whether a cache (R, S, D), or (N, P, D) in pages, lies among the rows of one matrix."""
    first, size, dim = rows.shape
    apart, pitch, _ = rows.stride()
    return first > 0 and size > 1 and dim <= pitch and (first == 1 or apart % pitch == 0) and _rows(rows) < _MOST


def _rows(rows: torch.Tensor) -> int:
    """Of that matrix."""
    first, size, _ = rows.shape
    apart, pitch, _ = rows.stride()
    return (first - 1) * (apart // pitch) + size
