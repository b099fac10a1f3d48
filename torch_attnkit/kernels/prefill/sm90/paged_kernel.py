"""What to compile for blocks of queries over pages on Hopper. Imports cutlass."""

from __future__ import annotations

from typing import Any

from torch_attnkit.cuda import fake

from .paged_multi import PagedMulti
from .paged_types import Config, arguments


def trace_paged(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """Rows of q and of the pages start at multiples of 16 bytes, as vectors and TMA need."""
    config = Config(fake.dtype(dtype), **signature)
    return PagedMulti(config), arguments(dtype, config)
