"""What to compile for queries at the end of a cache on Hopper."""

from __future__ import annotations

from typing import Any

from torch_attnkit.cuda import fake

from .multi import Multi
from .multi_blocks import DenseSequences
from .multi_persistent import Persistent
from .multi_single import SingleTile
from .multi_types import Config, arguments, split_workspace


def trace_cached(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """Rows of q and of the caches start at multiples of 16 bytes, as vectors and TMA need."""
    config = Config(fake.dtype(dtype), **signature)
    return SingleTile(config, Multi(config), DenseSequences(config)), arguments(dtype, config)


def trace_cached_persistent(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """The same for batches whose lengths differ."""
    config = Config(fake.dtype(dtype), **signature)
    *rest, stream = arguments(dtype, config)
    return Persistent(config, Multi(config), DenseSequences(config)), [*rest, split_workspace(), stream]
