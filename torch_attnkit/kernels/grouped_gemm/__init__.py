"""Products of FP4 weights with the tokens that were routed to them."""

from torch_attnkit.core.family import Launcher

NVIDIA = Launcher(f"{__name__}.launch")
METAL = Launcher(f"{__name__}.metal", of_op=True)
