"""Heads normed and rotated, and keys rotated into cache rows, on Metal: a simdgroup has a head or a row of keys."""

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

from .metal import _share
from .rope_problem import RopeOperands, RopeProblem


def launcher(source: str, problem: RopeProblem, target: Target) -> Callable[[RopeOperands], None]:
    """What solves ``problem`` with ``csrc/metal/<source>.metal``. Heads and keys that share memory with the cache are
    copied first, so that no row is overwritten before it is read."""
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
