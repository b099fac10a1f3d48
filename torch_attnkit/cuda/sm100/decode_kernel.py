"""What to compile for a decode step on Blackwell, over a contiguous cache or, where a page has keys, over pages."""

from __future__ import annotations

from typing import Any

from .. import fake
from ..decode import Decode
from ..decode_types import Config, arguments
from .decode import Tall
from .decode_types import TallConfig


def trace(arch: str, *, dtype: str, **sizes: Any) -> tuple[Any, list[Any]]:
    """Hopper's kernel, for few query heads a KV head. Rows of the caches start at multiples of 16 bytes."""
    config = Config(fake.dtype(dtype), **sizes)
    return Decode(config), arguments(dtype, config, fake.dim32)


def trace_wide(arch: str, *, dtype: str, **sizes: Any) -> tuple[Any, list[Any]]:
    """Blackwell's, for many, and for E4M3."""
    config = TallConfig(fake.dtype(dtype), **sizes)
    return Tall(config), arguments(dtype, config, fake.dim32, config.scales)
