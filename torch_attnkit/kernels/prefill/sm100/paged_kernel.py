"""What to compile for blocks of queries over pages on Blackwell: the kernel of packed sequences, with a loading warp of
its own."""

from __future__ import annotations

from typing import Any

from torch_attnkit.cuda import fake

from . import one_cta, two_cta
from .paged_copies import OneCtaPagedLoad, TwoCtaPagedLoad
from .paged_keys import Boxes, GatheredRows, StagedBoxes
from .paged_load import PagedLoad
from .paged_types import Paging, arguments
from .prefill import Prefill
from .types import OneCta, TwoCta
from .widen import WidenKV


def trace_paged(arch: str, *, dtype: str, dim: int, page: int, box: int, **signature: Any) -> tuple[Any, list[Any]]:
    """Rows of q and of the pages start at multiples of 16 bytes, as TMA needs. The output of a head of 512 takes two
    CTAs."""
    two = dim > 256
    types, parts, copies = (TwoCta, two_cta.parts, TwoCtaPagedLoad) if two else (OneCta, one_cta.parts, OneCtaPagedLoad)
    config = types(dtype=fake.dtype(dtype), dim=dim, varlen=True, ends_at_kv_len=True, **signature)
    kernel, paging = Prefill(config, parts), Paging(page, box)
    if config.fp8_kv:
        kernel.widen = WidenKV(config, kernel.scheduler)
    keys = (StagedBoxes if config.fp8_kv else Boxes if box else GatheredRows)(config, paging)
    kernel.load = PagedLoad(config, paging, kernel.scheduler, kernel.load, copies(config, keys))
    return kernel, arguments(dtype, config, paging)
