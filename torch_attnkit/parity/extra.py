"""What extra cases put into ordinary inputs: NaN in one tensor, or infinities."""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_attnkit.core.op import Op

_ROWS = 4  # rows of a tensor that get a NaN, evenly spread: some of those that count, and some that are masked


def target(extra: str) -> tuple[str, float]:
    """The tensor and the value that an extra names: ``nan:q``, ``sink:-inf``."""
    first, _, second = extra.partition(":")
    return (second, math.nan) if first == "nan" else (first, float(second))


def touches(op: Op, extra: str, features: tuple[str, ...]) -> bool:
    """Whether a call with these features has the tensor; one that is a feature by its name comes with it alone."""
    name, _ = target(extra)
    return name not in op.features or name in features


def spoiled(op: Op, extra: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with the extra's value in a few rows of its tensor; of one axis, in every other element."""
    name, value = target(extra)
    at = op.argnames.index(name)
    changed = args[at].clone()
    rows = changed.view(-1, 1 if changed.dim() == 1 else changed.shape[-1])  # (rows, columns)
    count = -(-len(rows) // 2) if changed.dim() == 1 else _ROWS
    row = torch.linspace(0, len(rows) - 1, count).long()
    held = torch.tensor(value).to(changed.dtype).view(torch.uint8 if changed.itemsize == 1 else changed.dtype)
    rows.view(held.dtype)[row, row % rows.shape[1]] = held
    return (*args[:at], changed, *args[at + 1 :])
