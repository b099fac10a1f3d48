"""sdpa_decode_paged on Hopper, the device side: the streaming kernel of ``cuda/decode.py`` over pages."""

from __future__ import annotations

from typing import Any

from torch_attnkit.cuda import fake
from torch_attnkit.cuda.decode import Decode
from torch_attnkit.cuda.decode_types import Config, LatentConfig, WideConfig, arguments
from torch_attnkit.cuda.sm90.decode_latent import Latent
from torch_attnkit.cuda.sm90.decode_wide import Wide


def trace(arch: str, *, dtype: str, **sizes: int) -> tuple[Any, list[Any]]:
    """What to compile for up to 8 query heads a KV head. Rows of the caches start at multiples of 16 bytes."""
    config = Config(fake.dtype(dtype), **sizes)
    return Decode(config), _arguments(dtype, config)


def trace_wide(arch: str, *, dtype: str, **sizes: int) -> tuple[Any, list[Any]]:
    """The same for more."""
    config = WideConfig(fake.dtype(dtype), **sizes)
    return Wide(config), _arguments(dtype, config)


def trace_latent(arch: str, *, dtype: str, **sizes: int) -> tuple[Any, list[Any]]:
    """The same for 512 columns where keys are values, too."""
    config = LatentConfig(fake.dtype(dtype), **sizes)
    return Latent(config), _arguments(dtype, config)


def _arguments(dtype: str, config: Config | WideConfig) -> list[Any]:
    B, Hkv, Np = fake.dim(), fake.dim(), fake.dim()

    def cache(dim: int) -> Any:
        return fake.tensor(dtype, (Np, config.page, Hkv, dim), (*(fake.dim(8) for _ in range(3)), 1))

    table = fake.tensor("i32", (B, None), align=4)
    return arguments(dtype, config, B, (cache(config.dim), cache(config.dim_v)), table)
