"""What to compile for blocks of queries over pages on Hopper."""

from __future__ import annotations

from typing import Any

from torch_attnkit.cuda import fake

from .dynamic import Dynamic
from .dynamic_types import draws
from .multi_persistent import Persistent
from .multi_single import SingleTile
from .multi_types import split_workspace
from .paged_blocks import PackedSequences
from .paged_dynamic import PagedBatch
from .paged_multi import PagedMulti
from .paged_types import Config, arguments


def trace_paged(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """Rows of q and of the pages start at multiples of 16 bytes, as vectors and TMA need."""
    config = Config(fake.dtype(dtype), **signature)
    return SingleTile(config, PagedMulti(config), PackedSequences(config)), arguments(dtype, config)


def trace_paged_persistent(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """The same for few queries of each sequence, whose lengths differ."""
    config = Config(fake.dtype(dtype), **signature)
    *rest, stream = arguments(dtype, config)
    return Persistent(config, PagedMulti(config), PackedSequences(config)), [*rest, split_workspace(), stream]


def trace_paged_dynamic(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """The same for many queries, whose work tiles persistent CTAs draw."""
    config = Config(fake.dtype(dtype), **signature)
    *rest, stream = arguments(dtype, config)
    return Dynamic(config, PagedBatch(config)), [*rest, draws(), stream]
