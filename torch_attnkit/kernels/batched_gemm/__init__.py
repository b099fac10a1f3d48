"""Batched GEMM: each group of rows times a matrix of its own."""

from torch_attnkit.core.family import Launcher

NVIDIA = Launcher(f"{__name__}.launch")
MOST_FEW = 16  # tokens of a product whose K is cut inside of a CTA
NVIDIA_FEW = Launcher(f"{__name__}.few", "launcher")
