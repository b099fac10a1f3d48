"""The experts of tokens, and their weights."""

from torch_attnkit.core.family import Launcher

NVIDIA = Launcher(f"{__name__}.launch")
NVIDIA_TABLE = Launcher(f"{__name__}.launch", "table_launcher")
METAL = Launcher(f"{__name__}.metal", of_op=True)
METAL_TABLE = Launcher(f"{__name__}.metal", "table_launcher", of_op=True)
