"""Inputs of nvfp4_quantize for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.formats.nvfp4 import BLOCK
from torch_attnkit.oracle import fp4, fp4_rows, sampling

PARITY, DEGENERATE, BENCH = fp4_rows.parity(BLOCK, odd=1), fp4_rows.degenerate(BLOCK), fp4_rows.BENCH


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = fp4_rows.values(dims, dtype, gen)
    global_scale = fp4.global_scales(gen) if "global_scale" in features else None
    return (x, global_scale), dict(scale_layout=fp4_rows.scale_layout(features))


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read x, write half a byte an element and a scale per block."""
    return fp4_rows.bytes(dims, dtype, BLOCK)


def flops(dims: dict[str, int]) -> int:
    """A maximum and a product an element."""
    return 2 * fp4_rows.elements(dims)


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    return fp4_rows.sample_values(d, row, BLOCK)


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (fp4_rows.generate_values(f, gen), fp4_rows.global_of(f)), dict(scale_layout=fp4_rows.layout_of(f))
