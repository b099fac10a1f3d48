"""Batched GEMM: each group of rows times a matrix of its own."""

from torch_attnkit.core.family import Launcher

NVIDIA = Launcher(f"{__name__}.launch")
NVIDIA_FEW = Launcher(f"{__name__}.few", "launcher")
