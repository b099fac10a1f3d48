"""Attention of many queries per sequence: dense batches, packed sequences, and blocks at the end of a cache."""

from torch_attnkit.core.family import Launcher

NVIDIA = Launcher(f"{__name__}.launch")
CACHED = Launcher(f"{__name__}.cached")
PAGED = Launcher(f"{__name__}.paged")
HOPPER = Launcher(f"{__name__}.sm90.launch")
WIDE = Launcher(f"{__name__}.wide")
CODES = Launcher(f"{__name__}.sm90.codes_launch", narrow_sums=True)
CACHED_CODES = Launcher(f"{__name__}.sm90.codes_cached", narrow_sums=True)
PAGED_CODES = Launcher(f"{__name__}.sm90.paged_codes", narrow_sums=True)
METAL = Launcher(f"{__name__}.metal", of_op=True)
