"""What to compile for blocks of queries over pages of E4M3 on Hopper."""

from __future__ import annotations

from typing import Any

from torch_attnkit.cuda import fake

from .multi_persistent import Persistent
from .multi_single import SingleTile
from .multi_types import split_workspace
from .paged_blocks import PackedSequences
from .paged_codes_types import Config
from .paged_multi_codes import PagedMultiCodes
from .paged_types import arguments


def trace_paged(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """Rows of q and of the pages start at multiples of 16 bytes, as vectors and TMA need."""
    config = Config(fake.dtype(dtype), **signature)
    kernel = SingleTile(config, PagedMultiCodes(config), PackedSequences(config))
    return kernel, arguments(dtype, config)


def trace_paged_persistent(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """The same for few queries of each sequence, whose lengths differ."""
    config = Config(fake.dtype(dtype), **signature)
    *rest, stream = arguments(dtype, config)
    return Persistent(config, PagedMultiCodes(config), PackedSequences(config)), [*rest, split_workspace(), stream]
