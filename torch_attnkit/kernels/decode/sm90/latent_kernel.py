"""What to compile for a decode step over latents on Hopper."""

from __future__ import annotations

from typing import Any

from torch_attnkit.cuda import fake

from ..arguments import arguments
from .latent import latent_kernel
from .latent_config import LatentConfig


def trace_latent(arch: str, *, dtype: str, **sizes: Any) -> tuple[Any, list[Any]]:
    """For up to 64 query heads a KV head."""
    config = LatentConfig(fake.dtype(dtype), **sizes)
    return latent_kernel(config), arguments(dtype, config, fake.dim)
