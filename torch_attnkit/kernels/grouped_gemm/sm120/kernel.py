"""What to compile for the routed experts in 99 KB of shared memory. Imports cutlass."""

from __future__ import annotations

from typing import Any

from ..sm90 import kernel_mma
from ..sm90.config import SHARED_SMALL


def trace(arch: str, **signature: Any) -> tuple[Any, list[Any]]:
    """``sm90/kernel_mma.py``, with one box of weights in a consumer's stage for two."""
    return kernel_mma.trace(arch, shared=SHARED_SMALL, **signature)
