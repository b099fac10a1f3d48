"""Batched GEMM of FP4 dequantised for ``mma.sync``."""
