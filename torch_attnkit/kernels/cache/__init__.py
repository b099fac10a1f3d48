"""Rows of a key-value cache: written into slots, and gathered from them."""

from torch_attnkit.core.family import Launcher

NVIDIA_WRITE = Launcher(f"{__name__}.launch", "writer")
NVIDIA_GATHER = Launcher(f"{__name__}.launch", "gatherer")
NVIDIA_ROPE = Launcher(f"{__name__}.launch", "rope_launcher")
NVIDIA_PAGES = Launcher(f"{__name__}.launch", "paged_writer")
NVIDIA_APPEND = Launcher(f"{__name__}.append", "appender")
METAL_WRITE = Launcher(f"{__name__}.metal", "writer", of_op=True)
METAL_GATHER = Launcher(f"{__name__}.metal", "gatherer", of_op=True)
METAL_ROPE = Launcher(f"{__name__}.metal", "rope_launcher", of_op=True)
METAL_PAGES = Launcher(f"{__name__}.metal", "paged_writer", of_op=True)
