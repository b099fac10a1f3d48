"""Host side of the top-k kernel for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.cuda.limits import LIMITS

from .plan import configure, part_of
from .problem import Operands, Problem

_VECTOR = 16  # bytes of the widest loads
_INDEX = 4  # bytes


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``."""
    p = problem
    if p.rows == 0:
        return lambda operands: None
    part = part_of(p.entries, p.rows, p.topk, driver.sm_count(p.device))
    if part:
        return _by_parts(p, part, target)
    return _rows(p, 0, target)


def _by_parts(p: Problem, part: int, target: Target) -> Callable[[Operands], None]:
    """What is chosen of parts of the rows, into memory of the call's own, and a launch behind that chooses of these."""
    parts = -(-p.entries // part)
    listed = parts * p.topk
    of_parts, sms = _rows(p, part, target), driver.sm_count(p.device)
    config = configure(listed, p.rows, _widest(_INDEX, listed, listed), sms, LIMITS[target.arch].clusters)
    run, ahead = _compiled(p, config, target, ragged=False, listed=True)

    def launch(operands: Operands) -> None:
        scores, _, indices = operands
        chosen = torch.empty(p.rows * parts, p.topk, dtype=torch.int32, device=indices.device)
        of_parts(operands._replace(indices=chosen))
        run(scores, None, chosen.view(p.rows, listed), indices, ahead)

    return launch


def _rows(p: Problem, part: int, target: Target) -> Callable[[Operands], None]:
    """The rows, or their parts, with results of their own."""
    entries, rows = (part, p.rows * -(-p.entries // part)) if part else (p.entries, p.rows)
    sms = driver.sm_count(p.device)

    def compiled(width: int) -> tuple[Callable[..., None], int]:
        config = configure(entries, rows, width, sms, LIMITS[target.arch].clusters)
        return _compiled(p, config, target, ragged=p.ragged, part=part)

    widest = _widest(p.dtype.itemsize, p.entries, p.step)
    wide = compiled(widest)
    odd = widest * p.dtype.itemsize - 1  # the bits of no vector's address
    narrow: list[tuple[Callable[..., None], int]] = []

    def launch(operands: Operands) -> None:
        scores, length, indices = operands
        aligned = not scores.data_ptr() & odd
        if not aligned and not narrow:
            narrow.append(compiled(1))
        run, ahead = wide if aligned else narrow[0]
        run(scores, length, None, indices, ahead)

    return launch


def _widest(itemsize: int, entries: int, step: int) -> int:
    """Elements of the widest loads of rows of ``entries`` that are ``step`` apart."""
    return next(w for w in (8, 4, 2, 1) if w <= _VECTOR // itemsize and entries % w == 0 and step % w == 0)


def _compiled(p: Problem, config: Any, target: Target, **signature: Any) -> tuple[Callable[..., None], int]:
    """The kernel, and how many rows a GPU works on at a time."""
    run = compile.launcher(
        target,
        p.device,
        trace,
        dtype=short(p.dtype),
        config=astuple(config),
        **signature,
    )
    return run, max(1, driver.sm_count(p.device) * config.blocks // config.cluster)


def trace(arch: str, **signature: Any) -> compile.Traced:
    """``kernel.py``."""
    from . import kernel

    return kernel.trace(arch, **signature)
