"""Cache rows on Metal: a simdgroup has a row, a lane cells of eight channels. Bound by memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core.target import Target
from torch_attnkit.formats import kv_cache
from torch_attnkit.mps import launch as metal
from torch_attnkit.mps import library
from torch_attnkit.mps.cells import CELL, WORD, even, launch_of_threads

from .problem import Operands, Problem


def writer(source: str, problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What writes the rows of ``problem`` to their slots with ``csrc/metal/<source>.metal``. Numbers that share memory
    with the cache are copied first, so that no row is overwritten before it is read."""
    p = problem
    if p.rows * p.row.head_dim * p.slots == 0:
        return lambda operands: None
    run = _launcher(source, p, target, "write_rows")

    def launch(o: Operands) -> None:
        run(o._replace(numbers=o.numbers.clone()) if _share(o.numbers, o.cache) else o)

    return launch


def gatherer(source: str, problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What gathers the rows of ``problem`` from their slots with ``csrc/metal/<source>.metal``."""
    p = problem
    if p.rows * p.row.head_dim == 0:
        return lambda operands: None
    if p.slots == 0:
        return lambda operands: _zero(operands.numbers)
    return _launcher(source, p, target, "gather_rows")


def _zero(numbers: torch.Tensor) -> None:
    numbers.zero_()


def _launcher(source: str, p: Problem, target: Target, kernel: str) -> Callable[[Operands], None]:
    row = p.row
    defines: dict[str, Any] = dict(
        TYPE=p.dtype, WIDE_SLOTS=p.slot_dtype == torch.int64, FORMAT=kv_cache.FORMATS.index(row.format),
        GLOBAL=p.global_scale, DIM=row.head_dim,
    )  # fmt: skip
    if row.plain:
        defines |= dict(CACHE_TYPE=p.cache_dtype)
    else:
        parts = dict(zip(("ROPE_AT", "SCALES_AT", "END", "SIZE"), row.layout, strict=True))
        defines |= dict(NOPE=row.nope_dim, BLOCK=row.block) | parts

    @functools.cache
    def variant(width: int, words: bool) -> metal.Launch:
        built = library.load(source, target, **defines, WIDTH=width, WORDS=words)
        return launch_of_threads(built, kernel, p.rows * metal.SIMD)

    steps = (p.step, p.cache_step) if row.plain else (p.step,)
    variant(CELL if all(step % CELL == 0 for step in steps) else 1, not row.plain and p.cache_step % WORD == 0)

    def launch(o: Operands) -> None:
        step = o.numbers.stride(0) if p.rows > 1 else 0  # of a copy not the problem's
        wide = even(o.numbers, (step,), CELL) and (not row.plain or even(o.cache, (p.cache_step,), CELL))
        run = variant(CELL if wide else 1, not row.plain and even(o.cache, (p.cache_step,), WORD))
        scale = 1.0 if o.global_scale is None else o.global_scale
        shape = [p.rows, p.slots, step, p.cache_step]
        run((o.numbers, o.cache, o.slot, scale, shape))

    return launch


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have bytes of one storage in common, or may have: it looks at the spans they lie in."""
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    (a0, a1), (b0, b1) = _span(a), _span(b)
    return a0 < b1 and b0 < a1


def _span(t: torch.Tensor) -> tuple[int, int]:
    """First and past-the-end byte of a tensor in its storage."""
    last = sum(int((size - 1) * step) for size, step in zip(t.shape, t.stride(), strict=True))
    first = int(t.storage_offset())
    return first * t.itemsize, (first + last + 1) * t.itemsize
