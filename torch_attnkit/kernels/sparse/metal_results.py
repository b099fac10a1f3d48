"""What sparse attention on Metal stores, numbers or codes of FP4: how its kernels are told, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch_attnkit.formats.scale_layout import padded_shape
from torch_attnkit.kernels.fp4.problem import BLOCK
from torch_attnkit.mps import launch as metal

from . import problem as given
from .problem import Problem


class Results(Protocol):
    """One kind of results."""

    span: int  # elements of a row that a simdgroup merges

    def defines(self) -> dict[str, Any]:
        """What the kernels are compiled with for them."""
        ...

    def bound(self, tensors: given.Numbers | given.Codes) -> metal.Arguments:
        """The last arguments of both kernels."""
        ...


class Numbers:
    """``attnkit/sparse_numbers.h``."""

    span = 128

    def defines(self) -> dict[str, Any]:
        return {}

    def bound(self, tensors: given.Numbers | given.Codes) -> metal.Arguments:
        assert isinstance(tensors, given.Numbers)
        return tensors.out, tensors.lse, metal.bound(tensors.row_sum, tensors.lse)


@dataclass(frozen=True)
class Codes:
    """``attnkit/sparse_codes.h``. ``cos`` and ``sin`` are steps from token to token, in elements; the scales of a
    ``groups``-th of the heads belong together."""

    problem: Problem
    cos: int
    sin: int
    groups: int

    span = 256

    def defines(self) -> dict[str, Any]:
        fp4 = self.problem.fp4
        assert fp4 is not None
        return dict(
            BLOCK=BLOCK[fp4.format], PAIRS=fp4.pairs, ANGLE_TYPE=fp4.angle_dtype, SWIZZLED=fp4.swizzled, WORDS=True
        )  # fmt: skip

    def bound(self, tensors: given.Numbers | given.Codes) -> metal.Arguments:
        p, fp4 = self.problem, self.problem.fp4
        assert fp4 is not None and isinstance(tensors, given.Codes)
        heads = p.heads // self.groups
        padded = padded_shape(p.tokens, heads * p.dim // BLOCK[fp4.format])
        # Heads that are not rotated have no angles.
        cos, sin = (t if t.numel() else t.new_empty(1) for t in (tensors.cos, tensors.sin))
        factor = 1.0 if tensors.global_scale is None else tensors.global_scale
        shape = [p.tokens, p.heads, heads, *padded, self.cos, self.sin]
        return tensors.codes, tensors.scale, cos, sin, factor, shape
