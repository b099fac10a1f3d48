"""What to compile for a decode step over latents on Hopper. Imports cutlass."""

from __future__ import annotations

from typing import Any

from torch_attnkit.cuda import fake

from ..arguments import arguments
from ..config import MmaConfig
from ..mma import decode_mma
from ..schedule import Persistent
from .latent import ScoreWarpgroup, ValueWarpgroup
from .latent_config import LatentConfig
from .mla import DecodeMla, Mainloop


def trace_mma(arch: str, *, dtype: str, **sizes: Any) -> tuple[Any, list[Any]]:
    """For keys and values of two tensors: a group's query heads are cut into eights."""
    config = MmaConfig(fake.dtype(dtype), **sizes)
    return decode_mma(config), arguments(dtype, config, fake.dim)


def trace_latent(arch: str, *, dtype: str, **sizes: Any) -> tuple[Any, list[Any]]:
    """For one: the kernel of ``mla.py`` with other roles."""
    config = LatentConfig(fake.dtype(dtype), **sizes)
    kernel = DecodeMla(config)
    kernel.scores = Persistent(config, Mainloop(config, ScoreWarpgroup(config)), kernel.epilogue)
    kernel.values = Persistent(config, Mainloop(config, ValueWarpgroup(config)), kernel.epilogue)
    return kernel, arguments(dtype, config, fake.dim)
