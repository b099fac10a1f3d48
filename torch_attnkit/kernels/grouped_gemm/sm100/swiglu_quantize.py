"""SwiGLU two features at a time by packed float32x2, and block quantization of what it gives."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda import fp4
from torch_attnkit.cuda.asm import asm
from torch_attnkit.cuda.sm100.e2m1 import amax, e2m1_pairs
from torch_attnkit.cuda.warp_ops import LN_2, LOG2_E, exp2, pack_e4m3

from ..arguments import Scalars
from .config import TOKEN_BLOCK

_LOG2_E_REST = 1.92596299e-08  # of log2(e), beyond the float32 next to it
_FLAT = 200.0  # from here on the sigmoid is 0 or 1 in float32
Pair = tuple[Any, Any]


@dsl_user_op
def _least(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The smaller one, NaN if one is."""
    return asm(Float32, [Float32(a), Float32(b)], "min.NaN.f32 $0, $1, $2;", loc=loc, ip=ip)


@dsl_user_op
def _most(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The larger one, NaN if one is."""
    return asm(Float32, [Float32(a), Float32(b)], "max.NaN.f32 $0, $1, $2;", loc=loc, ip=ip)


@dsl_user_op
def _bounded(x: Float32, most: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """x, and where it is larger ``most`` with its sign; NaN is either."""
    return asm(Float32, [Float32(x), Float32(most)], "min.xorsign.abs.f32 $0, $1, $2;", loc=loc, ip=ip)


def twice(x: float | Float32) -> Pair:
    return Float32(x), Float32(x)


def plain(scalars: Scalars) -> Any:
    """Whether h is gate * sigmoid(gate) * up and nothing is clamped."""
    return (scalars.gptoss == 0) & (scalars.limit == Float32.inf)


def swiglu(scalars: Scalars, gate: Pair, up: Pair, simple: bool) -> Pair:
    """``simple``: it is known to be ``plain``."""
    if not simple:
        limit = scalars.limit
        gate = tuple(_least(x, limit) for x in gate)
        up = tuple(_most(_least(x, limit), -limit) for x in up)
    x = gate
    if not simple:
        is_gptoss = scalars.gptoss != 0
        x = cute.arch.mul_packed_f32x2(gate, twice(_select(is_gptoss, scalars.alpha, 1.0)))
        up = cute.arch.add_packed_f32x2(up, twice(_select(is_gptoss, 1.0, 0.0)))
    s = sigmoid(x)
    return cute.arch.mul_packed_f32x2(cute.arch.mul_packed_f32x2(gate, s), up)


def _select(condition: Any, a: Any, b: Any) -> Float32:
    return cutlass.select_(condition, Float32(a), Float32(b))


def sigmoid(x: Pair) -> Pair:
    """1 / (1 + e^-x), to a few roundings for every x: of -x * log2(e), which e^-x would show x times as large, what its
    rounding and that of log2(e) left out is added to the power afterwards."""
    x = tuple(_bounded(v, Float32(_FLAT)) for v in x)
    fma = cute.arch.fma_packed_f32x2
    power = cute.arch.mul_packed_f32x2(x, twice(-LOG2_E))
    left = fma(x, twice(_LOG2_E_REST), fma(x, twice(LOG2_E), power))  # too much by so much
    more = fma(left, twice(-LN_2), twice(1.0))
    grown = fma(tuple(exp2(p) for p in power), more, twice(1.0))
    return tuple(cute.arch.rcp_approx(g) for g in grown)


class Quantized(NamedTuple):
    packed: list[Int32]  # eight a word, or four
    scales: list[Int32]  # a byte each


def quantize(format: str, values: list[Any], global_scale: Float32) -> Quantized:
    """Whole blocks of a row."""
    block, packed, scales = TOKEN_BLOCK[format], [], []
    for first in range(0, len(values), block):
        some = values[first : first + block]
        top = amax(some)
        if format == "nvfp4":
            byte, scale = fp4.nvfp4_scale(top, global_scale)
            factor = fp4.nvfp4_factor(scale, global_scale)
        else:
            byte, _ = fp4.mxfp8_scale(top) if format == "mxfp8" else fp4.mxfp4_scale(top)
            factor = fp4.ue8m0_reciprocal(byte)
        scaled: list[Any] = []
        for i in range(0, block, 2):
            scaled += cute.arch.mul_packed_f32x2((some[i], some[i + 1]), (factor, factor))
        if format == "mxfp8":
            packed += [pack_e4m3(scaled[i : i + 4]) for i in range(0, block, 4)]
        else:
            packed += [e2m1_pairs(scaled[i : i + 8]) for i in range(0, block, 8)]
        scales.append(byte)
    return Quantized(packed, scales)
