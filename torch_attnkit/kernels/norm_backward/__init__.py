"""Gradients of RMS norms of rows."""

from torch_attnkit.core.family import Launcher

NVIDIA = Launcher(f"{__name__}.launch")
METAL = Launcher(f"{__name__}.metal", of_op=True)
