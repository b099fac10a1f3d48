"""Attention of tokens that each have keys of their own: a window, and entries that a list names."""

from torch_attnkit.core.family import Launcher

NVIDIA = Launcher(f"{__name__}.launch")
QUANTISED = Launcher(f"{__name__}.launch", "quantised_launcher")
