"""What to compile for a decode step on Blackwell, over a contiguous cache or, where a page has keys, over pages.

Rows of the caches start at multiples of 16 bytes.
"""

from __future__ import annotations

from typing import Any

from torch_attnkit.cuda import fake

from ..arguments import arguments
from ..codes import CodesConfig
from ..config import MmaConfig
from ..elements import over_codes
from ..mma import decode_mma
from .config import Tcgen05Config
from .tcgen05 import DecodeTcgen05


def trace_mma(arch: str, *, dtype: str, **sizes: Any) -> tuple[Any, list[Any]]:
    """Hopper's kernel, for few query heads a KV head."""
    config = MmaConfig(fake.dtype(dtype), **sizes)
    return decode_mma(config), arguments(dtype, config, fake.dim32)


def trace_codes(arch: str, *, dtype: str, **sizes: Any) -> tuple[Any, list[Any]]:
    """The same for 16-bit queries over E4M3."""
    config = CodesConfig(fake.dtype(dtype), **sizes)
    return decode_mma(config), over_codes(dtype, config, fake.dim32)


def trace_tcgen05(arch: str, *, dtype: str, **sizes: Any) -> tuple[Any, list[Any]]:
    """Blackwell's, for many, and for E4M3."""
    config = Tcgen05Config(fake.dtype(dtype), **sizes)
    return DecodeTcgen05(config), arguments(dtype, config, fake.dim32, config.scales)
