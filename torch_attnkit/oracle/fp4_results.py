"""When FP4 codes of computed numbers count as right.

Codes are exact for the numbers they stand for, but a kernel's numbers differ from the reference's in their last bits,
as ``compare.py`` allows, and some lie at the border of two codes or of two scales. So nothing is compared with the
reference's codes. Each number may be anything within the tolerance of what it is in float64. Quantising is monotone:
amax of a block then lies between two numbers, its scale between theirs, and under the scale that was found each code
between those of the least and the largest number that it may stand for. What lies outside is wrong. A number that may
be zero may have either sign, as wherever numbers are compared: that of a sum of zeros depends on its order.
"""

from __future__ import annotations

import torch

from torch_attnkit.formats import e2m1, fp8, mxfp4, nvfp4

from .fp4 import BLOCK


def tolerance(exact: torch.Tensor, ref: torch.Tensor, of: torch.Tensor) -> float:
    """What ``compare.check`` allows numbers that are ``of`` in float64: by the reference's error on ``exact``."""
    error = (ref.double() - exact).nan_to_num(0, 0, 0).abs()
    size = of.nan_to_num(0, 0, 0).abs()
    most = (float(t.max()) if t.numel() else 0.0 for t in (error, size))
    return 2 * next(most) + 4 * torch.finfo(ref.dtype).eps * next(most)


def check(
    name: str,
    codes: torch.Tensor,  # (..., K/2)
    scale: torch.Tensor,  # (..., K/block), linear
    exact: torch.Tensor,  # (..., K), float64
    ref: torch.Tensor,  # the same in the call's dtype: infinities and NaN stand where it has them
    bound: float,
    format: str,
    global_scale: torch.Tensor | None,
) -> float:
    """Raise AssertionError with the first place where a scale or a code is not one that it may be. Returns 0."""
    exact = torch.where(ref.isfinite(), exact, ref.double())
    size = exact.abs().nan_to_num(0.0, torch.inf).unflatten(-1, (-1, BLOCK[format])).amax(-1)  # (..., K/block)
    least, most = (_scale((size + by).clamp(min=0), format, global_scale) for by in (-bound, bound))
    _between(f"{name} o_scale", scale.int(), least.int(), most.int())
    r = _factor(scale, format, global_scale).repeat_interleave(BLOCK[format], -1)  # (..., K)
    low, high = (_order(e2m1.encode((exact + by).float() * r)) for by in (-bound, bound))
    zero = exact.abs() <= bound
    low, high = torch.where(zero, low.clamp(max=-1), low), torch.where(zero, high.clamp(min=0), high)
    found = e2m1.unpack(codes)
    nan = exact.isnan()
    if bool((found[nan] != 7).any()):
        raise AssertionError(f"{name} codes: nan whose code is not +6")
    _between(f"{name} codes", _order(found).masked_fill(nan, 0), *(t.masked_fill(nan, 0) for t in (low, high)))
    return 0.0


def _scale(top: torch.Tensor, format: str, global_scale: torch.Tensor | None) -> torch.Tensor:
    """The scale bytes of blocks whose largest magnitudes are ``top`` (...)."""
    block = torch.nn.functional.pad(top.float()[..., None], (0, BLOCK[format] - 1))  # (..., block)
    _, scale = nvfp4.quantize(block, global_scale) if format == "nvfp4" else mxfp4.quantize(block)
    return scale[..., 0]


def _factor(scale: torch.Tensor, format: str, global_scale: torch.Tensor | None) -> torch.Tensor:
    """What numbers under a scale byte are multiplied by before they are rounded, in float32."""
    if format == "mxfp4":
        return fp8.ue8m0_reciprocal(scale)
    decoded = fp8.e4m3_decode(scale)
    one = torch.ones(()) if global_scale is None else global_scale.float()
    return torch.where(decoded == 0, 0.0, one / decoded)


def _order(codes: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the numbers of E2M1 codes, -0 before +0."""
    codes = codes.int()
    return torch.where(codes < 8, codes, 7 - codes)


def _between(name: str, got: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
    if got.shape != low.shape:
        raise AssertionError(f"{name}: {tuple(got.shape)}, expected {tuple(low.shape)}")
    wrong = (got < low) | (got > high)
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}{list(at)}: got {int(got[at])} in order, may be {int(low[at])} to {int(high[at])}"
            f" ({int(wrong.sum())} of {got.numel()} are outside)"
        )
