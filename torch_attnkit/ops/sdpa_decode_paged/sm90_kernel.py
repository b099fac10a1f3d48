"""sdpa_decode_paged on Hopper, the device side: the streaming kernel of ``cuda/sm90/decode.py`` over pages."""

from __future__ import annotations

from typing import Any

from torch_attnkit.cuda import fake
from torch_attnkit.cuda.sm90.decode import Decode
from torch_attnkit.cuda.sm90.decode_types import Config, arguments


def trace(arch: str, *, dtype: str, **sizes: int) -> tuple[Any, list[Any]]:
    """What to compile. Rows of the caches start at multiples of 16 bytes, as cp.async needs."""
    config = Config(fake.dtype(dtype), **sizes)
    B, Hkv, Np = fake.dim(), fake.dim(), fake.dim()

    def cache(dim: int) -> Any:
        return fake.tensor(dtype, (Np, config.page, Hkv, dim), (*(fake.dim(8) for _ in range(3)), 1))

    return Decode(config), arguments(
        dtype, config, B, (cache(config.dim), cache(config.dim_v)), fake.tensor("i32", (B, None), align=4)
    )
