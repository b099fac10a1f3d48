"""What to compile for a decode step on Hopper, over a contiguous cache or, where a page has keys, over pages."""

from __future__ import annotations

from typing import Any

from .. import fake
from ..decode import Decode
from ..decode_types import Config, LatentConfig, WideConfig, arguments
from .decode_latent import Latent
from .decode_wide import Wide


def trace(arch: str, *, dtype: str, **sizes: Any) -> tuple[Any, list[Any]]:
    """For up to 8 query heads a KV head. Rows of the caches start at multiples of 16 bytes."""
    config = Config(fake.dtype(dtype), **sizes)
    return Decode(config), arguments(dtype, config, fake.dim)


def trace_wide(arch: str, *, dtype: str, **sizes: Any) -> tuple[Any, list[Any]]:
    """The same for more."""
    config = WideConfig(fake.dtype(dtype), **sizes)
    return Wide(config), arguments(dtype, config, fake.dim)


def trace_latent(arch: str, *, dtype: str, **sizes: Any) -> tuple[Any, list[Any]]:
    """The same for 512 columns where keys are values, too."""
    config = LatentConfig(fake.dtype(dtype), **sizes)
    return Latent(config), arguments(dtype, config, fake.dim)
