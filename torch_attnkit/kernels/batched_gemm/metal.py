"""Products of groups on Metal, ``attnkit/group_product.h``: how rows and tokens are cut into threadgroups."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torch_attnkit.core.target import Target
from torch_attnkit.formats import scale_layout
from torch_attnkit.mps import launch as metal
from torch_attnkit.mps import library

from .problem import Fp4Problem, Operands, Problem

KERNEL = "group_products"
_FORMATS = ("none", "nvfp4", "mxfp4")
# In which all elements of a format are exact: under E4M3 scales they are 2^-10 to 2688 with 6 bits, MXFP4 has the
# exponents of bfloat.
_PRODUCTS = {"nvfp4": torch.float16, "mxfp4": torch.bfloat16}
_BLOCK = {"nvfp4": 16, "mxfp4": 32}
_CHUNK = 128  # CHUNK of the kernel
_SIMDGROUPS = 4
_MOST_COLUMNS = 4  # blocks of 8 tokens
_MANY = 128  # tokens from which on there are threadgroups enough with 32 rows of a simdgroup


@dataclass(frozen=True)
class Cut:
    """Blocks of 8 rows of a simdgroup, and of 8 tokens of a threadgroup."""

    rows: int
    columns: int


@dataclass(frozen=True)
class Scales:
    """Steps of the scales, in bytes: of x by token and group, of the weights by group and row."""

    x: tuple[int, int] = (0, 0)
    weight: tuple[int, int] = (0, 0)


def cut_of(tokens: int) -> Cut:
    columns = min(_MOST_COLUMNS, 1 << max(0, -(-tokens // 8) - 1).bit_length())
    if columns == 1:
        return Cut(1, 1)  # bound by memory: threadgroups that wait for it
    return Cut(4 if tokens >= _MANY else 2, columns)


def threadgroup_bytes(cut: Cut) -> int:
    """Threadgroup memory of ``group_products``: two chunks of all tokens in 16 bits."""
    return 2 * 8 * cut.columns * _CHUNK * 2


def launcher(source: str, problem: Problem | Fp4Problem, scales: Scales, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` with the kernel of ``csrc/metal/<source>.metal``."""
    p = problem
    coded = isinstance(p, Fp4Problem)
    format = p.format if isinstance(p, Fp4Problem) else "none"
    if math.prod((p.tokens, p.groups, p.n)) == 0:
        return lambda operands: None
    if p.k == 0:
        return _nothing
    swizzled = isinstance(p, Fp4Problem) and p.scale_layout == "128x4"
    divided = p.divisors if isinstance(p, Fp4Problem) else (False, False)
    stored = _PRODUCTS[format] if not isinstance(p, Problem) else p.dtype
    cut = cut_of(p.tokens)
    if swizzled:
        # Of a group, whole tiles one after another.
        sizes = (math.prod(scale_layout.padded_shape(m, p.k // _BLOCK[format])) for m in (p.tokens, p.n))
        x_size, weight_size = sizes
        scales = Scales((0, x_size), (weight_size, 0))
    shape = [p.tokens, p.groups, p.k, p.n, *p.x, *p.weight, *scales.x, *scales.weight]
    one = torch.ones(1, dtype=torch.float32, device=p.device)  # in the slot of a divisor that a call does not have

    def variant(width: int) -> metal.Launch:
        simds = _SIMDGROUPS
        while True:
            built = library.load(
                source, target, FORMAT=_FORMATS.index(format), TYPE=stored, OUT_TYPE=p.out_dtype, ROWS=cut.rows,
                COLUMNS=cut.columns, SIMDS=simds, WIDTH=width, SWIZZLED=swizzled, X_DIVIDED=divided[0],
                W_DIVIDED=divided[1],
            )  # fmt: skip
            limit = metal.most_simdgroups(built, KERNEL)
            if simds <= limit:
                break
            simds = limit
        grid = (-(-p.n // (simds * 8 * cut.rows)), p.groups, -(-p.tokens // (8 * cut.columns)))
        run = metal.launcher(built, KERNEL, grid, simds * metal.SIMD)
        return lambda args: run((*args, shape))

    run = metal.by_alignment(variant, (p.k, *p.x, *p.weight))

    def launch(o: Operands) -> None:
        unused = o.out.view(torch.uint8)  # in the slots of what a call does not have
        x_scale, weight_scale = (_scale(t, swizzled) if coded else unused for t in (o.x_scale, o.weight_scale))
        divisors = [one if t is None else t for t in (o.x_global, o.weight_global)]
        run((o.x, o.weight), (o.x, o.weight, x_scale, weight_scale, *divisors, o.out))

    return launch


def _scale(t: torch.Tensor | None, swizzled: bool) -> torch.Tensor:
    """Scales as bytes; in the 128x4 layout without gaps between groups or rows."""
    assert t is not None
    t = t.view(torch.uint8)
    return t.contiguous() if swizzled else t


def _nothing(operands: Operands) -> None:
    """The sums of no products."""
    operands.out.zero_()
