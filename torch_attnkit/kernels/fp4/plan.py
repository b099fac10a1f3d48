"""How blocks are spread over threads.

Both directions are bound by device memory. A quantising thread has whole blocks in registers: no thread waits for
another, and scale and reciprocal are computed once a block. A dequantising thread has eight codes, 16 bytes of 16-bit
elements, so that a warp's stores are contiguous.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CODES = 8  # of a dequantising thread
_WARP = 32
TILE = 512  # scales of a (128, 4) tile
_BYTES = 64  # of a thread's loads on their way, with 1024 threads as much as a multiprocessor's share of the latency
_SMALL = 1 << 20  # elements of a call below which more threads help more than more loads in flight per thread


@dataclass(frozen=True)
class Config:
    """``width`` elements (of codes: bytes) are loaded at once; a thread has ``units`` blocks or groups of codes.

    ``flat``: units lie one after the other in memory, whatever row they are of.
    """

    width: int
    threads: int
    units: int
    flat: bool


@dataclass(frozen=True)
class Rotation:
    """As ``Config``, for heads of which some blocks are rotated: these are the last of a ``section`` of heads, and
    ``angles`` cosines or sines are loaded at once."""

    width: int
    threads: int
    units: int
    flat: bool
    angles: int
    section: int


def reciprocal(divisor: int) -> tuple[int, int]:
    """m and s with n // divisor == n * m >> s for all n below 2^30 (Granlund and Montgomery, 1994); m is below 2^31."""
    shift = 30 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift


def quantize(block: int, itemsize: int, width: int, elements: int, flat: bool) -> Config:
    units = 1 if elements < _SMALL else max(1, _BYTES // (block * itemsize))
    return Config(width, 128 if elements < _SMALL else 256, units, flat)


def dequantize(width: int, elements: int, flat: bool) -> Config:
    small = elements < _SMALL
    return Config(width, 128 if small else 256, 1 if small else 4, flat)


def rotation(block: int, kb: int, pairs: int, c: Config, angles: int) -> Rotation:
    """``c`` is what these heads would have without rotation, ``angles`` what their strides allow."""
    rotated = -(-2 * pairs // block)
    # As few heads as have whole warps of rotated blocks, and of the others.
    section = max(_WARP // math.gcd(_WARP, n) for n in (rotated, kb - rotated))
    still = rotated * block // 2 - pairs  # pairs before the rotated ones of the first rotated block
    return Rotation(c.width, c.threads, c.units, c.flat, math.gcd(angles, block // 2, still), section)
