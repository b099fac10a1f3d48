"""FP4 on Metal: a thread has a cell of eight elements, the lanes of a block agree on its scale. Bound by memory."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch_attnkit.core.target import Target
from torch_attnkit.formats.scale_layout import padded_shape
from torch_attnkit.kernels.norm.problem import merged_axes
from torch_attnkit.mps import launch as metal
from torch_attnkit.mps import library
from torch_attnkit.mps.cells import CELL, WORD, even, launch_of_threads

from .problem import BLOCK, Dequantize, Dequantized, Quantize, Quantized, Rotate, Rotated


def quantizer(source: str, problem: Quantize, target: Target) -> Callable[[Quantized], None]:
    """What solves ``problem`` with ``csrc/metal/<source>.metal``."""
    p, block = problem, BLOCK[problem.format]
    if p.rows * p.k == 0:
        return lambda operands: None
    axes = merged_axes(p.batch, p.x)
    flat = not p.swizzled and _dense(axes, p.k)
    rows, row_cells = p.rows, p.k // CELL
    if p.swizzled:
        rows, columns = padded_shape(p.rows, p.k // block)
        row_cells = columns * block // CELL
    cells = rows * row_cells
    shape = [cells, p.rows, row_cells, p.k // block, *(n for size, step in axes for n in (size, step, 0))]

    @functools.cache
    def variant(width: int) -> metal.Launch:
        built = library.load(
            source, target, TYPE=p.dtype, BLOCK=block, DOWN=p.floor, SWIZZLED=p.swizzled, FLAT=flat, RANK=len(axes),
            WIDTH=width, WORDS=True,
        )  # fmt: skip
        return launch_of_threads(built, "quantize_rows", cells)

    steps = [step for _, step in axes]
    variant(CELL if all(step % CELL == 0 for step in steps) else 1)

    def launch(o: Quantized) -> None:
        run = variant(CELL if even(o.x, steps, CELL) else 1)
        run((o.x, 1.0 if o.global_scale is None else o.global_scale, o.codes, o.scale, shape))

    return launch


def dequantizer(source: str, problem: Dequantize, target: Target) -> Callable[[Dequantized], None]:
    """What solves ``problem`` with ``csrc/metal/<source>.metal``."""
    p, block = problem, BLOCK[problem.format]
    if p.rows * p.k == 0:
        return lambda operands: None
    axes = merged_axes(p.batch, p.codes, (0,) * len(p.batch) if p.swizzled else p.scale)
    flat = not p.swizzled and _dense(axes, p.k // 2, p.k // block)
    columns = padded_shape(p.rows, p.k // block)[1]
    cells, pitch = p.rows * p.k // CELL, p.scale[0] if p.swizzled else 0
    shape = [cells, p.k // CELL, columns, pitch, *(n for axis in axes for n in axis)]

    @functools.cache
    def variant(width: int, words: bool) -> metal.Launch:
        built = library.load(
            source, target, TYPE=p.dtype, BLOCK=block, GLOBAL=p.global_scale, SWIZZLED=p.swizzled,
            PITCHED=pitch != columns, FLAT=flat, RANK=len(axes), WIDTH=width, WORDS=words,
        )  # fmt: skip
        return launch_of_threads(built, "dequantize_rows", cells)

    steps = [step for _, step, _ in axes]
    variant(CELL, all(step % WORD == 0 for step in steps))

    def launch(o: Dequantized) -> None:
        run = variant(CELL if even(o.x, (), CELL) else 1, even(o.codes, steps, WORD))
        run((o.codes, o.scale, 1.0 if o.global_scale is None else o.global_scale, o.x, shape))

    return launch


def rope_quantizer(source: str, problem: Rotate, target: Target) -> Callable[[Rotated], None]:
    """What solves ``problem`` with ``csrc/metal/<source>.metal``."""
    p, block = problem, BLOCK[problem.format]
    if p.tokens * p.heads * p.k == 0:
        return lambda operands: None
    rows, columns = padded_shape(p.tokens, p.heads // p.groups * p.k // block)
    cells = (p.groups * rows * columns * block if p.swizzled else p.tokens * p.heads * p.k) // CELL
    shape = [cells, p.tokens, p.heads, p.heads // p.groups, rows, columns, *p.o, *p.angles]

    angles = p.angle_dtype if p.pairs else p.dtype  # heads that are not rotated have none, and o takes their place

    @functools.cache
    def variant(width: int) -> metal.Launch:
        built = library.load(
            source, target, TYPE=p.dtype, ANGLE_TYPE=angles, BLOCK=block, DIM=p.k, PAIRS=p.pairs,
            SWIZZLED=p.swizzled, WIDTH=width, WORDS=True,
        )  # fmt: skip
        return launch_of_threads(built, "quantize_heads", cells)

    variant(CELL if all(step % CELL == 0 for step in p.o) else 1)

    def launch(o: Rotated) -> None:
        run = variant(CELL if even(o.o, p.o, CELL) else 1)
        cos, sin = metal.bound(o.cos, o.o), metal.bound(o.sin, o.o)
        run((o.o, cos, sin, 1.0 if o.global_scale is None else o.global_scale, o.codes, o.scale, shape))

    return launch


def _dense(axes: list[tuple[int, ...]], *sizes: int) -> bool:
    """Whether rows of these sizes lie one after the other."""
    return len(axes) == 1 and (axes[0][0] == 1 or axes[0][1:] == sizes)
