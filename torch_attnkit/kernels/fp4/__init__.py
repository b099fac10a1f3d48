"""Block-scaled FP4: quantise and dequantise."""

from torch_attnkit.core.family import Launcher

NVIDIA_QUANTIZE = Launcher(f"{__name__}.launch", "quantizer")
NVIDIA_DEQUANTIZE = Launcher(f"{__name__}.launch", "dequantizer")
NVIDIA_ROPE = Launcher(f"{__name__}.launch", "rope_quantizer")
METAL_QUANTIZE = Launcher(f"{__name__}.metal", "quantizer", of_op=True)
METAL_DEQUANTIZE = Launcher(f"{__name__}.metal", "dequantizer", of_op=True)
METAL_ROPE = Launcher(f"{__name__}.metal", "rope_quantizer", of_op=True)
