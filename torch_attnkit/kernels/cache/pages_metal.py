"""Keys and values to slots of pages on Metal: a simdgroup has a token, a lane cells of eight channels."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from torch_attnkit.core.target import Target
from torch_attnkit.mps import launch as metal
from torch_attnkit.mps import library
from torch_attnkit.mps.cells import CELL, even, launch_of_threads

from . import pages
from .pages import Operands, Problem


def writer(source: str, problem: Problem, target: Target) -> Callable[[Operands], None]:
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

    def launch(operands: Operands) -> None:
        o = pages.apart(operands)
        wide = aligned and all(even(t, (), CELL) for t in (o.key, o.value, o.k_cache, o.v_cache))
        kept = [o.k_cache, o.v_cache]
        if codes:
            kept = [t.view(torch.uint8) for t in kept]
        steps = shape if o.key is operands.key and o.value is operands.value else _steps_of(o, shape)
        scales = [o.slot if scale is None else scale for scale in (o.k_scale, o.v_scale)]
        variant(CELL if wide else 1)((o.key, o.value, *kept, o.slot, *scales, steps))

    return launch


def _steps_of(o: Operands, shape: list[int]) -> list[int]:
    """``shape`` for tokens that were copied."""
    return [*shape[:3], *o.key.stride()[:2], *o.value.stride()[:2], *shape[7:]]
