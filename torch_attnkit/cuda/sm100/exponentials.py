"""Powers of two without the special functions' units, and how many of a tile's exponentials are worth it.

A multiprocessor of a B200 does 16 special functions a cycle, no more than its predecessors, beside tensor cores that
are twice as fast: FlashAttention-4 (Zadouri et al., 2026) therefore computes a part of the exponentials as polynomials.
Cycles of a multiprocessor for the 128 x 128 scores of a block, of which a part f are polynomials; modelled from
instruction counts, not measured:

    tensor cores  4 x 128 x 128 x (D + Dv) / 2 / 8192          512 with D 64, 1024 with D 128, 2048 with D 256
    exponentials  128 x 128 (1 - f) / 16, 8 for factors        1032 - 1024 f
    fma lanes     128 x 128 (2 + 9 f) / 128                    256 + 1152 f
    issue slots   128 x 128 (3.1 + 5.5 f) / 128                397 + 704 f

A score costs 2 operations of an fma lane anyway, its scaling and its place in the sum; as a polynomial 9 more: 3 to
split it, 5 of Horner's scheme, 1 to put both parts together. Packed instructions do two of these at a time, for half of
the issue slots. ``eighths`` takes the smallest f with which the slowest of the four is fastest, but no more than 1/4:
1/4 up to D 96, where a block then takes 776 cycles for 1032, 1/8 with D 128, where tensor cores and exponentials are
equally long, and 0 from D 192 on.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda.warp_ops import max_or_nan

# 2^f for f in [0, 1): the polynomial of degree 5 with 1 at 0 whose largest relative error is least (Remez exchange),
# 8.2e-8, and 1.4e-7 in float32 arithmetic, where ex2.approx has 2.4e-7. Degree 3, which is as good as P's 16 bits, has
# an error of 8.6e-5, which is also the sums': too much for the LSE.
COEFFICIENTS = (
    1.0, 0.6931513118046009, 0.24016445015509363, 0.05579991310372466, 0.009017030322458968, 0.0018671300698700148,
)  # fmt: skip
_MOST = 2  # eighths
_LEAST = -127.0  # below it 2^x is 0, and so it is here
# Added to x and rounded down, the sum's last 8 bits are floor(x) + 127, the exponent field of a float.
_SHIFT = float((3 << 22) + 127)


def eighths(dim: int, dim_v: int, bits: int = 16) -> int:
    """Of 8 scores, how many are to be polynomials, for operands of the products with that many bits."""
    tensor = 16384 * 2 * (dim + dim_v) / (8192 * 16 / bits)

    def slowest(n: int) -> float:
        return max(tensor, 1032 - 128 * n, 256 + 144 * n, 397 + 88 * n)

    return min(range(_MOST + 1), key=slowest)


def chosen(pair: int, n: int) -> bool:
    """Whether a row's ``pair`` of neighbouring scores are polynomials: of every 8 pairs ``n``, far apart."""
    at = pair % 8
    return (at + 1) * n // 8 > at * n // 8


def exp2_pair(x: tuple[Float32, Float32]) -> tuple[Float32, Float32]:
    """2^x of two numbers below 128 by fma, shifts and maxima; 0 below -127, NaN for NaN."""
    same = lambda value: (Float32(value), Float32(value))
    x = tuple(max_or_nan(v, Float32(_LEAST)) for v in x)
    shifted = cute.arch.add_packed_f32x2(x, same(_SHIFT), rnd="rm")
    whole = cute.arch.add_packed_f32x2(shifted, same(-_SHIFT))
    rest = cute.arch.sub_packed_f32x2(x, whole)
    value = same(COEFFICIENTS[-1])
    for coefficient in reversed(COEFFICIENTS[:-1]):
        value = cute.arch.fma_packed_f32x2(value, rest, same(coefficient))
    power = tuple((v.bitcast(Int32) << 23).bitcast(Float32) for v in shifted)
    return cute.arch.mul_packed_f32x2(value, power)
