"""Scores of cache entries by weighted, rectified products with the heads of an indexer."""

from torch_attnkit.core.family import Launcher

NVIDIA = Launcher(f"{__name__}.launch")
SELECT = Launcher(f"{__name__}.launch", "select_launcher")
