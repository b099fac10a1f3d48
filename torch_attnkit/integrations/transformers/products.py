"""Products of few tokens with a weight, as a compiled graph has them: a sum along rows instead of a call of a library.

What a compiler hands to a library is a launch for the bias, one for the product and, where that is cut along K, one for
the sums of its parts. A sum of elementwise products is one kernel of the compiler's, with the bias in it and whatever
elementwise comes next. It reads the weight once for each token: more than one pays where the weight is small.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

DEVICE = ""  # where it is done: nowhere, until "cuda" is seen faster: python -m bench.models --compile --sums
SMALL = 2**18  # numbers of a weight that stays in L2 however many tokens read it; GPT-OSS' router has 92,160
MOST_TOKENS = 16  # with a small weight; with any other, one


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, computed: bool = False
) -> torch.Tensor:
    """``F.linear`` of x (..., K), weight (N, K) and bias (N): (..., N). ``computed``: elementwise arithmetic, such as a
    norm's, makes ``x`` for this product alone."""
    if torch.compiler.is_compiling() and x.device.type == DEVICE and x.dtype == weight.dtype and x.dtype.itemsize == 2:
        if x.shape[:-1].numel() <= (MOST_TOKENS if weight.numel() <= SMALL else 1):
            return summed(x, weight, bias, computed)
    return F.linear(x, weight, bias)


def summed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, computed: bool = False) -> torch.Tensor:
    """The same, products and sums in float32 and rounded once."""
    wide = x.float()
    if computed:  # else the norm would be computed anew for each row of the weight
        wide = _written(wide)
    out = (wide.unsqueeze(-2) * weight.float()).sum(-1)  # (..., N)
    return _written((out if bias is None else out + bias.float()).to(x.dtype))  # else the bias is added by who reads it


def _written(x: torch.Tensor) -> torch.Tensor:
    """``x``, a new tensor; if it is of one token, Inductor writes what a strided view is taken of to memory.

    Of several its memory may be in another order than the strides say.
    """
    return x.as_strided(x.shape, x.stride()) if x.numel() == x.shape[-1] and x.is_contiguous() else x
