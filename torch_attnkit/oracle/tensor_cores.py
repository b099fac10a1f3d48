"""How Hopper's tensor cores add up products of E4M3 numbers, in plain torch."""

from __future__ import annotations

import torch

from .attention import _narrow as narrow

_STEP = 32  # products that one instruction adds to a sum (PTX ISA, wgmma: k32 of 8-bit numbers)
_FRACTION = 13  # bits of a term below the leading bit of the largest one
_TERMS = 1 << 27  # products in memory at a time


def narrow_e4m3() -> bool:
    """Whether references are to add up products of E4M3 numbers as tensor cores do: inside ``narrow_products``."""
    return narrow.get()


def products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (..., M, D) times b (N, D) transposed, E4M3 both: (..., M, N) float32, with the sums of Hopper's tensor cores.

    They align the 32 products of a step to the largest, keep 14 bits of each, drop those below, and add what is left;
    the sum that they keep from step to step has 14 bits, too (arXiv 2412.19437, 3.3.2 and 3.5.2, seen on an H800;
    arXiv 2411.10958 found 13 fraction bits of the sum there, and that the others are zeros). What the papers leave open
    is taken as follows, and each choice is within one such bit of its alternatives: the largest is the largest number,
    not the largest sum of exponents, and the sum so far is among the terms; bits are dropped towards zero. The products
    themselves have 8 bits and are exact. An H200 has the same bits in 95, 94 and 94 % of sums of 32, 64 and 128 normal
    numbers, and its largest error is the model's; bits dropped towards minus infinity would make that 86, 69 and 56 %,
    14 bits of fraction 80, 69 and 62 %. This is a model of how large the errors are and how they are spread, for a
    tolerance; not of the bits of a result.
    """
    rows = a.reshape(-1, a.shape[-1])
    sums = torch.empty(len(rows), len(b), device=a.device)  # (M, N)
    each = max(1, _TERMS // max(1, len(b) * _STEP))
    wide = b.float()
    for first in range(0, len(rows), each):
        sums[first : first + each] = _of_rows(rows[first : first + each].float(), wide)
    return sums.view(*a.shape[:-1], len(b))


def _of_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(len(a), len(b), device=a.device)
    for x, y in zip(a.split(_STEP, -1), b.split(_STEP, -1), strict=True):
        terms = x[:, None] * y  # (M, N, 32), which few passes go over: a bench has 10^12 of them
        unit = _unit(torch.maximum(torch.linalg.vector_norm(terms, torch.inf, -1), total.abs()))
        total = (terms.div_(unit[..., None], rounding_mode="trunc").sum(-1) + (total / unit).trunc_()) * unit
        unit = _unit(total.abs())
        total = (total / unit).trunc_() * unit
    return total


def _unit(largest: torch.Tensor) -> torch.Tensor:
    """What the last bit of a term counts, a power of two."""
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1 - _FRACTION)
