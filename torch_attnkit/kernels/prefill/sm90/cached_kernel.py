"""What to compile for queries at the end of a cache on Hopper. Imports cutlass."""

from __future__ import annotations

from typing import Any

from torch_attnkit.cuda import fake

from .multi import Multi
from .multi_types import Config, arguments


def trace_cached(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """Rows of q and of the caches start at multiples of 16 bytes, as vectors and TMA need."""
    config = Config(fake.dtype(dtype), **signature)
    return Multi(config), arguments(dtype, config)
