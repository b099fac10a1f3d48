"""What to compile for blocks of queries over pages on Blackwell: the kernel of packed sequences, with a loading warp of
its own. Imports cutlass."""

from __future__ import annotations

from typing import Any

from torch_attnkit.cuda import fake

from . import one_cta
from .paged_keys import Boxes, Rows
from .paged_load import OneCtaCopies, PagedLoad
from .paged_types import Paging, arguments
from .prefill import Prefill
from .types import OneCta


def trace_paged(arch: str, *, dtype: str, page: int, box: int, **signature: Any) -> tuple[Any, list[Any]]:
    """Rows of q and of the pages start at multiples of 16 bytes, as TMA needs."""
    config, paging = OneCta(dtype=fake.dtype(dtype), varlen=True, ends_at_kv_len=True, **signature), Paging(page, box)
    kernel = Prefill(config, one_cta.parts)
    keys = Boxes(config, paging) if box else Rows(config, paging)
    kernel.load = PagedLoad(config, paging, kernel.scheduler, kernel.load, OneCtaCopies(config, keys))
    return kernel, arguments(dtype, config, paging)
