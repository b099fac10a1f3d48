"""The gated delta rule: a matrix of state for each head, which every token decays, corrects and reads."""

from torch_attnkit.core.family import Launcher

NVIDIA_STEP = Launcher(f"{__name__}.launch", "step")
NVIDIA_RULE = Launcher(f"{__name__}.sm80.launch", "rule")
METAL_STEP = Launcher(f"{__name__}.metal", "step", of_op=True)
METAL_RULE = Launcher(f"{__name__}.rule_metal", "rule", of_op=True)
NVIDIA_CONV = Launcher(f"{__name__}.conv_launch", "conv")
METAL_CONV = Launcher(f"{__name__}.conv_metal", "conv", of_op=True)
