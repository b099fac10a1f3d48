"""Host side of the quantisers for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile
from torch_attnkit.formats.scale_layout import TILE_K, padded_shape
from torch_attnkit.kernels.norm.problem import merged_axes

from . import plan
from .problem import BLOCK, Dequantize, Dequantized, Quantize, Quantized, Rotate, Rotated


def _width(most: int, *steps: int) -> int:
    """The largest power of two up to ``most`` that all steps are multiples of."""
    return next(v for v in (8, 4, 2, 1) if v <= most and all(s % v == 0 for s in steps))


def quantizer(problem: Quantize, target: Target) -> Callable[[Quantized], None]:
    """What solves ``problem`` on ``target``."""
    p, block = problem, BLOCK[problem.format]
    blocks, kb = p.rows * p.k // block, p.k // block
    if blocks == 0:
        return lambda operands: None
    sizes, steps = zip(*merged_axes(p.batch, p.x), strict=True)
    flat = not p.swizzled and sizes[1:] == () and (steps[0] == p.k or sizes[0] == 1)
    padded = padded_shape(p.rows, kb)
    units = padded[0] * padded[1] if p.swizzled else blocks
    reciprocal = plan.reciprocal(padded[1] // TILE_K if p.swizzled else kb)

    def compiled(width: int) -> Callable[..., None]:
        config = plan.quantize(block, p.dtype.itemsize, width, p.rows * p.k, flat)
        return compile.launcher(
            target,
            p.device,
            trace_quantize,
            format=p.format,
            dtype=short(p.dtype),
            rank=len(p.batch) + 1,
            groups=len(sizes),
            swizzled=p.swizzled,
            global_scale=p.global_scale,
            floor=p.floor,
            config=astuple(config),
        )

    widest = _width(16 // p.dtype.itemsize, *steps)
    wide, odd = compiled(widest), widest * p.dtype.itemsize - 1
    narrow: list[Callable[..., None]] = []

    def launch(operands: Quantized) -> None:
        run = wide
        if operands.x.data_ptr() & odd:
            if not narrow:
                narrow.append(compiled(1))
            run = narrow[0]
        run(*operands, units, p.rows, kb, reciprocal, sizes, steps)

    return launch


def dequantizer(problem: Dequantize, target: Target) -> Callable[[Dequantized], None]:
    """What solves ``problem`` on ``target``."""
    p = problem
    units = p.rows * p.k // plan.CODES
    if units == 0:
        return lambda operands: None
    per_row, scale_row = p.k // plan.CODES, p.k // BLOCK[p.format]
    scale_steps = (0,) * len(p.batch) if p.swizzled else p.scale
    sizes, steps, scale_steps = zip(*merged_axes(p.batch, p.codes, scale_steps), strict=True)
    one = sizes[1:] == () and (sizes[0] == 1 or (steps[0], scale_steps[0]) == (p.k // 2, scale_row))
    flat = one and not p.swizzled
    columns = padded_shape(p.rows, scale_row)[1]
    pitch = p.scale[0] if p.swizzled else 0  # bytes between rows of the matrix that 128x4 scales are given as

    where = (per_row, plan.reciprocal(per_row), sizes, steps, scale_steps, columns, pitch)

    def compiled(width: int) -> Callable[..., None]:
        return compile.launcher(
            target,
            p.device,
            trace_dequantize,
            format=p.format,
            dtype=short(p.dtype),
            rank=len(p.batch) + 1,
            groups=len(sizes),
            swizzled=p.swizzled,
            dense=pitch == columns,
            global_scale=p.global_scale,
            config=astuple(plan.dequantize(width, p.rows * p.k, flat)),
        )

    widest = _width(4, *steps)
    wide = compiled(widest)
    narrow: list[Callable[..., None]] = []

    def launch(operands: Dequantized) -> None:
        run = wide
        if operands.codes.data_ptr() & (widest - 1):
            if not narrow:
                narrow.append(compiled(1))
            run = narrow[0]
        codes, scale, global_scale, x = operands
        run(codes, scale, global_scale, x, units, where)

    return launch


def rope_quantizer(problem: Rotate, target: Target) -> Callable[[Rotated], None]:
    """What solves ``problem`` on ``target``."""
    p, block, kb = problem, BLOCK[problem.format], problem.k // BLOCK[problem.format]
    if p.tokens * p.heads * kb == 0:
        return lambda operands: None
    padded = padded_shape(p.tokens, p.heads // p.groups * kb)
    dense = (p.heads * p.k, p.k)
    flat = not any(size > 1 and a != b for size, a, b in zip((p.tokens, p.heads), p.o, dense, strict=True))

    def compiled(width: int, angles: int) -> tuple[Callable[..., None], plan.Rotation]:
        spread = plan.quantize(block, p.dtype.itemsize, width, p.tokens * p.heads * p.k, flat)
        rotation = plan.rotation(block, kb, p.pairs, spread, angles)
        run = compile.launcher(
            target,
            p.device,
            trace_rope,
            format=p.format,
            dtypes=(short(p.dtype), short(p.angle_dtype)),
            sizes=(p.k, p.pairs),
            swizzled=p.swizzled,
            global_scale=p.global_scale,
            rotation=astuple(rotation),
        )
        return run, rotation

    widest = _width(16 // p.dtype.itemsize, *p.o), _width(16 // p.angle_dtype.itemsize, *p.angles)
    wide, rotation = compiled(*widest)
    odd, angle_odd = (w * d.itemsize - 1 for w, d in zip(widest, (p.dtype, p.angle_dtype), strict=True))
    scales = padded[0] * padded[1]  # of a group in the 128x4 layout
    sections = -(-p.tokens * p.heads // rotation.section)
    units = p.groups * scales if p.swizzled else sections * rotation.section * kb
    by = (padded[1] // TILE_K, scales // plan.TILE) if p.swizzled else (p.heads,)
    divisors = tuple(plan.reciprocal(n) for n in by)
    narrow: list[Callable[..., None]] = []

    def launch(operands: Rotated) -> None:
        run, angles = wide, operands.cos.data_ptr() | operands.sin.data_ptr()
        if operands.o.data_ptr() & odd | angles & angle_odd:
            if not narrow:
                narrow.append(compiled(1, 1)[0])
            run = narrow[0]
        run(*operands, units, divisors)

    return launch


def trace_quantize(arch: str, **signature: Any) -> compile.Traced:
    """``quantize_kernel.py``."""
    from . import quantize_kernel

    return quantize_kernel.trace(arch, **signature)


def trace_dequantize(arch: str, **signature: Any) -> compile.Traced:
    """``dequantize_kernel.py``."""
    from . import dequantize_kernel

    return dequantize_kernel.trace(arch, **signature)


def trace_rope(arch: str, **signature: Any) -> compile.Traced:
    """``rope_kernel.py``."""
    from . import rope_kernel

    return rope_kernel.trace(arch, **signature)
