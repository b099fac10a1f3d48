"""sdpa_decode_paged on Blackwell, the device side: the two kernels of ``sdpa_decode`` over pages."""

from __future__ import annotations

from typing import Any

from torch_attnkit.cuda import fake
from torch_attnkit.cuda.decode import Decode
from torch_attnkit.cuda.decode_types import Config, arguments
from torch_attnkit.cuda.sm100.decode import Tall
from torch_attnkit.cuda.sm100.decode_types import TallConfig


def trace(arch: str, *, dtype: str, **sizes: int) -> tuple[Any, list[Any]]:
    """Hopper's kernel, for few query heads a KV head. Rows of the caches start at multiples of 16 bytes."""
    config = Config(fake.dtype(dtype), **sizes)
    return Decode(config), _arguments(dtype, config)


def trace_wide(arch: str, *, dtype: str, **sizes: int) -> tuple[Any, list[Any]]:
    """Blackwell's, for many."""
    config = TallConfig(fake.dtype(dtype), **sizes)
    return Tall(config), _arguments(dtype, config)


def _arguments(dtype: str, config: Config | TallConfig) -> list[Any]:
    batch, heads, pages = (fake.dim32() for _ in range(3))
    caches = [
        fake.tensor(dtype, (pages, config.page, heads, dim), (*(fake.dim(8) for _ in range(3)), 1))
        for dim in (config.dim, config.dim_v)
    ]
    table = fake.tensor("i32", (batch, None), align=4)
    return arguments(dtype, config, batch, (caches[0], caches[1]), table)
