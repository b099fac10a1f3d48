"""Attention of many queries per sequence: dense batches, packed sequences, and blocks at the end of a cache."""

from torch_attnkit.core.family import Launcher

_SM80 = f"{__name__}.sm80.launch"
_SM90, _SM100 = f"{__name__}.sm90.launch", f"{__name__}.sm100"
AMPERE = Launcher(_SM80)
AMPERE_CACHE = Launcher(_SM80, "of_cache")
AMPERE_PAGES = Launcher(_SM80, "of_pages")
HOPPER = Launcher(_SM90)
HOPPER_HDIM512 = Launcher(_SM90, "hdim512")
HOPPER_FP8 = Launcher(_SM90, "fp8", narrow_sums=True)
HOPPER_CACHE = Launcher(_SM90, "of_cache")
HOPPER_CACHE_FP8 = Launcher(_SM90, "of_cache_fp8", narrow_sums=True)
HOPPER_PAGES = Launcher(_SM90, "of_pages")
HOPPER_PAGES_FP8 = Launcher(_SM90, "of_pages", narrow_sums=True)
BLACKWELL = Launcher(f"{__name__}.launch")
BLACKWELL_CACHE = Launcher(f"{_SM100}.cached")
BLACKWELL_PAGES = Launcher(f"{_SM100}.paged")
METAL = Launcher(f"{__name__}.metal", of_op=True)
