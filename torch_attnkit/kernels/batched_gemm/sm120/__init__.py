"""Batched GEMM of FP4 by block-scaled ``mma.sync``."""
