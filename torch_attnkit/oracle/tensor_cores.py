"""How Hopper's tensor cores add up products of E4M3 numbers, in plain torch."""

from __future__ import annotations

import torch

from .attention import _narrow as narrow

_STEP = 32  # products that one instruction adds to a sum (PTX ISA, wgmma: k32 of 8-bit numbers)
_FRACTION = 13  # bits that are kept of a term, below the place of the largest one
_LEAST = 2.0**-6  # of E4M3's normal numbers, whose exponent smaller ones have, too
_TERMS = 1 << 27  # products in memory at a time


def narrow_e4m3() -> bool:
    """Whether references are to add up products of E4M3 numbers as tensor cores do: inside ``narrow_products``."""
    return narrow.get()


def products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (..., M, D) times b (N, D) transposed, E4M3 both: (..., M, N) float32, with the sums of Hopper's tensor cores.

    A step adds 32 products to a sum. The place of a term is the sum of its operands' exponents, that of the sum so far
    its own exponent; all terms are cut towards zero 13 bits below the highest place, added, and the sum is cut to 13
    bits below its own (arXiv 2412.19437, 3.3.2, saw 14 bits on an H800; arXiv 2511.10909 says the rest, bit by bit, and
    calls it T-FDPA with F = 13 and RZ-E8M13). The products themselves have 8 bits and are exact. With the same sums the
    simulator gives every bit of the scores that an H200 gave (``tests/sim/ptx/test_vectors.py``).

    Operands in float32 are E4M3 numbers times a scale. Their places are those of what they are then, so that sums are
    cut about as finely, not at the same bits; and none has a least exponent.
    """
    rows, columns = (t.reshape(-1, t.shape[-1]) for t in (a, b))
    sums = torch.empty(len(rows), len(columns), device=a.device)  # (M, N)
    each = max(1, _TERMS // max(1, len(columns) * _STEP))
    wide, places = columns.float(), _places(columns)
    for first in range(0, len(rows), each):
        some = rows[first : first + each]
        sums[first : first + each] = _of_rows(some.float(), wide, _places(some), places)
    return sums.view(*a.shape[:-1], len(columns))


def _places(numbers: torch.Tensor) -> torch.Tensor:
    """2 to the exponent of each number as float32, 0 for 0."""
    found = _powers(numbers.float())
    return found.clamp(min=_LEAST).where(found > 0, 0.0) if numbers.dtype == torch.float8_e4m3fn else found


def _powers(numbers: torch.Tensor) -> torch.Tensor:
    """The largest power of two in each number of float32, 0 for 0: its bits without sign and fraction."""
    return (numbers.view(torch.int32) & 0x7F800000).view(torch.float32)


def _of_rows(a: torch.Tensor, b: torch.Tensor, a_places: torch.Tensor, b_places: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(len(a), len(b), device=a.device)
    steps = (t.split(_STEP, -1) for t in (a, b, a_places, b_places))
    for x, y, x_places, y_places in zip(*steps, strict=True):
        highest = (x_places[:, None] * y_places).amax(-1)  # (M, N)
        unit = _unit(torch.maximum(highest, _powers(total)))
        terms = x[:, None] * y  # (M, N, 32), which few passes go over: a bench has 10^12 of them
        total = (terms.div_(unit[..., None], rounding_mode="trunc").sum(-1) + (total / unit).trunc_()) * unit
        unit = _unit(_powers(total))
        total = (total / unit).trunc_() * unit
    return total


def _unit(place: torch.Tensor) -> torch.Tensor:
    """What the last bit counts that is kept below a place, 1 where there is nothing to keep."""
    return (place * 2.0**-_FRACTION).where(place > 0, 1.0)
