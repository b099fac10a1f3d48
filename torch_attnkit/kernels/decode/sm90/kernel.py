"""What to compile for a decode step on Hopper, over a contiguous cache or, where a page has keys, over pages.

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
from .config import MlaConfig, WgmmaConfig
from .mla import DecodeMla
from .wgmma import decode_wgmma


def trace_mma(arch: str, *, dtype: str, **sizes: Any) -> tuple[Any, list[Any]]:
    """For up to 8 query heads a KV head."""
    config = MmaConfig(fake.dtype(dtype), **sizes)
    return decode_mma(config), arguments(dtype, config, fake.dim)


def trace_codes(arch: str, *, dtype: str, **sizes: Any) -> tuple[Any, list[Any]]:
    """For caches of E4M3."""
    config = CodesConfig(fake.dtype(dtype), **sizes)
    return decode_mma(config), over_codes(dtype, config, fake.dim)


def trace_wgmma(arch: str, *, dtype: str, **sizes: Any) -> tuple[Any, list[Any]]:
    """For up to 64."""
    config = WgmmaConfig(fake.dtype(dtype), **sizes)
    return decode_wgmma(config), arguments(dtype, config, fake.dim)


def trace_mla(arch: str, *, dtype: str, **sizes: Any) -> tuple[Any, list[Any]]:
    """For 512 columns where keys are values, too."""
    config = MlaConfig(fake.dtype(dtype), **sizes)
    return DecodeMla(config), arguments(dtype, config, fake.dim)
