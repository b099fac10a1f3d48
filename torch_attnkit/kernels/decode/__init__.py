"""Attention of one query token per sequence over a cache, contiguous or in pages; on Metal of a few tokens."""

from torch_attnkit.core.family import Launcher

NVIDIA = Launcher(f"{__name__}.launch")
METAL = Launcher(f"{__name__}.metal", of_op=True)
