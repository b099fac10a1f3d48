"""What the kernels of several architectures have to know of the one that they are for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from .smem import SHARED


@dataclass(frozen=True)
class Limits:
    """Of the least GPU that runs what is compiled for an architecture."""

    shared: int = SHARED  # bytes of shared memory of a CTA; those of an SM have as much together, ``RESERVED`` included
    clusters: bool = True  # and TMA, mbarriers that count bytes
    pdl: bool = True  # programmatic dependent launch
    e4m3: bool = True  # conversions of E4M3


_SMALL = 99 * 1024
LIMITS = {
    "sm80": Limits(_SMALL, clusters=False, pdl=False, e4m3=False),  # RTX 30; an A100 has 163 KB
    "sm89": Limits(_SMALL, clusters=False, pdl=False),
    "sm90": Limits(),
    "sm100": Limits(),
    "sm120": Limits(_SMALL),
}
_traced: ContextVar[Limits] = ContextVar("attnkit_traced_limits", default=LIMITS["sm90"])


@contextmanager
def tracing(arch: str) -> Iterator[None]:
    """A block in which what is traced is for ``arch``."""
    token = _traced.set(LIMITS[arch])
    try:
        yield
    finally:
        _traced.reset(token)


def traced() -> Limits:
    """Of the architecture that the kernel at hand is traced for."""
    return _traced.get()
