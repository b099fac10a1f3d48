"""Shared memory as plans and kernels count it: a kernel states its own as a frozen dataclass of ``Region``.

One region may alias others whose contents are consumed by then; its comment says "over". Plans read this without
cutlass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SHARED = 227 * 1024  # bytes of shared memory that the CTAs of an SM have together
RESERVED = 1024  # of which the driver takes this much a CTA
CHUNK = 16  # bytes of a cp.async, and the unit that a swizzle permutes


@dataclass(frozen=True)
class Region:
    """Bytes of a CTA's shared memory."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def at(self, shared: Any) -> Any:
        """The address, where ``shared`` is that of the CTA's first byte."""
        return shared + self.offset if self.offset else shared


def itemsize(dtype: Any) -> int:
    """Bytes of an element of a CuTeDSL dtype."""
    return int(dtype.width) // 8


def fit(nbytes: int) -> int:
    """How many CTAs with so much shared memory an SM has at once."""
    return SHARED // (nbytes + RESERVED)
