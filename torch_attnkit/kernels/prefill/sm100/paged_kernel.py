"""What to compile for blocks of queries over pages on Blackwell: the kernel of packed sequences, with a loading warp of
its own. Imports cutlass."""

from __future__ import annotations

from typing import Any

from torch_attnkit.cuda import fake

from . import one_cta
from .paged_load import PagedLoad
from .paged_types import PagedCta, arguments
from .prefill import Prefill


def trace_paged(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """Rows of q and of the pages start at multiples of 16 bytes, as TMA needs."""
    config = PagedCta(dtype=fake.dtype(dtype), varlen=True, ends_at_kv_len=True, **signature)
    kernel = Prefill(config, one_cta.parts)
    kernel.load = PagedLoad(config, kernel.scheduler, kernel.load)
    return kernel, arguments(dtype, config)
