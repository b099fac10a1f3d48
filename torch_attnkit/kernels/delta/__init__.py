"""The gated delta rule: a matrix of state for each head, which every token decays, corrects and reads; and the
convolution ahead of it."""

from torch_attnkit.core.family import Launcher

NVIDIA_STEP, NVIDIA_RULE, NVIDIA_CONV = (Launcher(f"{__name__}.launch", name) for name in ("step", "rule", "conv"))
METAL_STEP, METAL_RULE, METAL_CONV = (
    Launcher(f"{__name__}.metal", name, of_op=True) for name in ("step", "rule", "conv")
)
