"""Cache rows and pages on Metal: a simdgroup has a row, a head or a token; a lane cells of 8 channels. Memory-bound."""

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

from .problem import Operands, PagedOperands, PagedProblem, Problem, RopeOperands, RopeProblem, without_overlap


def writer(source: str, problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What writes the rows of ``problem`` to their slots with ``csrc/metal/<source>.metal``. Rows that overlap the
    cache are copied first, so that none is overwritten before it is read."""
    p = problem
    if p.rows * p.row.head_dim * p.slots == 0:
        return lambda operands: None
    run = _launcher(source, p, target, "write_rows")

    def launch(o: Operands) -> None:
        run(o._replace(dense=o.dense.clone()) if _share(o.dense, o.cache) else o)

    return launch


def gatherer(source: str, problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What gathers the rows of ``problem`` from their slots with ``csrc/metal/<source>.metal``."""
    p = problem
    if p.rows * p.row.head_dim == 0:
        return lambda operands: None
    if p.slots == 0:
        return lambda operands: _zero(operands.dense)
    return _launcher(source, p, target, "gather_rows")


def _zero(dense: torch.Tensor) -> None:
    dense.zero_()


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
        step = o.dense.stride(0) if p.rows > 1 else 0  # of a copy not the problem's
        wide = even(o.dense, (step,), CELL) and (not row.plain or even(o.cache, (p.cache_step,), CELL))
        run = variant(CELL if wide else 1, not row.plain and even(o.cache, (p.cache_step,), WORD))
        scale = 1.0 if o.global_scale is None else o.global_scale
        shape = [p.rows, p.slots, step, p.cache_step]
        run((o.dense, o.cache, o.slot, scale, shape))

    return launch


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may overlap: whether the spans that they lie in do."""
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    (a0, a1), (b0, b1) = _span(a), _span(b)
    return a0 < b1 and b0 < a1


def _span(t: torch.Tensor) -> tuple[int, int]:
    """First and past-the-end byte of a tensor in its storage."""
    last = sum(int((size - 1) * step) for size, step in zip(t.shape, t.stride(), strict=True))
    first = int(t.storage_offset())
    return first * t.itemsize, (first + last + 1) * t.itemsize


def paged_writer(source: str, problem: PagedProblem, target: Target) -> Callable[[PagedOperands], None]:
    """What writes the tokens of ``problem`` to their slots with ``csrc/metal/<source>.metal``."""
    p = problem
    if p.empty:
        return lambda operands: None
    k, v = p.sides
    codes = p.cache_dtype == torch.float8_e4m3fn
    aligned = all(n % CELL == 0 for side in p.sides for n in (side.dim, *side.steps, *side.cache_steps))

    @functools.cache
    def variant(width: int) -> metal.Launch:
        built = library.load(
            source, target, TYPE=p.dtype, CODES=codes, WIDE_SLOTS=p.slot_dtype == torch.int64, HEADS=p.heads,
            DIM=k.dim, DIM_V=v.dim, SCALE_K=k.scaled, SCALE_V=v.scaled, WIDTH=width,
        )  # fmt: skip
        return launch_of_threads(built, "write_pages", p.tokens * metal.SIMD)

    variant(CELL if aligned else 1)
    shape = [p.tokens, p.pages * p.page, p.page, *k.steps, *v.steps, *k.cache_steps, *v.cache_steps]

    def launch(operands: PagedOperands) -> None:
        o = without_overlap(operands)
        wide = aligned and all(even(t, (), CELL) for t in (o.key, o.value, o.k_cache, o.v_cache))
        kept = [o.k_cache, o.v_cache]
        if codes:
            kept = [t.view(torch.uint8) for t in kept]
        steps = shape if o.key is operands.key and o.value is operands.value else _steps_of(o, shape)
        scales = [o.slot if scale is None else scale for scale in (o.k_scale, o.v_scale)]
        variant(CELL if wide else 1)((o.key, o.value, *kept, o.slot, *scales, steps))

    return launch


def _steps_of(o: PagedOperands, shape: list[int]) -> list[int]:
    """``shape`` with the strides of copied tokens."""
    return [*shape[:3], *o.key.stride()[:2], *o.value.stride()[:2], *shape[7:]]


def rope_launcher(source: str, problem: RopeProblem, target: Target) -> Callable[[RopeOperands], None]:
    """What solves ``problem`` with ``csrc/metal/<source>.metal``. Heads and keys that overlap the cache are copied
    first."""
    p, k, row = problem, problem.keys, problem.keys.row
    if k.rows == 0 or (p.heads == 0 and k.slots == 0):
        return lambda operands: None
    defines: dict[str, Any] = dict(
        TYPE=k.dtype, ANGLE_TYPE=p.angle_dtype if p.pairs else k.dtype, PAIRS=p.pairs, DIM=row.head_dim,
        WIDE_SLOTS=k.slot_dtype == torch.int64, FORMAT=kv_cache.FORMATS.index(row.format), GLOBAL=k.global_scale,
    )  # fmt: skip
    if row.plain:
        defines |= dict(CACHE_TYPE=k.cache_dtype)
    else:
        parts = dict(zip(("ROPE_AT", "SCALES_AT", "END", "SIZE"), row.layout, strict=True))
        defines |= dict(NOPE=row.nope_dim, BLOCK=row.block) | parts

    @functools.cache
    def variant(width: int, words: bool) -> metal.Launch:
        built = library.load(source, target, **defines, WIDTH=width, WORDS=words)
        return launch_of_threads(built, "rope_and_write", k.rows * (p.heads + 1) * metal.SIMD)

    steps = (*p.q, k.step, *((k.cache_step,) if row.plain else ()))
    variant(CELL if all(step % CELL == 0 for step in steps) else 1, not row.plain and k.cache_step % WORD == 0)

    def launch(o: RopeOperands) -> None:
        q, kv = (t.clone() if t.numel() and _share(t, o.cache) else t for t in (o.q, o.kv))
        q_steps = [step if size > 1 else 0 for size, step in zip(q.shape[:2], q.stride()[:2], strict=True)]
        step = kv.stride(0) if k.rows > 1 else 0  # of a copy not the problem's
        wide = even(q, q_steps, CELL) and even(kv, (step,), CELL)
        wide = wide and (not row.plain or even(o.cache, (k.cache_step,), CELL))
        run = variant(CELL if wide else 1, not row.plain and even(o.cache, (k.cache_step,), WORD))
        scale = 1.0 if o.global_scale is None else o.global_scale
        # Tensors without memory are not looked at, but every slot is bound.
        cos, sin, q, out, cache = (metal.bound(t, kv) for t in (o.cos, o.sin, q, o.out, o.cache))
        shape, heads = [k.rows, k.slots, step, k.cache_step], [p.heads, *q_steps, *p.angles]
        run((q, kv, cache, o.slot, cos, sin, scale, out, o.eps, shape, heads))

    return launch
