"""Inputs of mxfp4_dequantize for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.formats.mxfp4 import BLOCK
from torch_attnkit.oracle import fp4_rows, sampling

PARITY, DEGENERATE, BENCH = fp4_rows.parity(BLOCK, f8=1), fp4_rows.degenerate(BLOCK), fp4_rows.BENCH


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Every code under scales of ordinary size; ``dtype`` is that of the result."""
    layout = fp4_rows.scale_layout(features)
    codes, scale = fp4_rows.coded(dims, "mxfp4", layout, gen)
    return (codes, scale), dict(scale_layout=layout, dtype=dtype)


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read half a byte an element and a scale per block, write the numbers."""
    return fp4_rows.bytes(dims, dtype, BLOCK)


def flops(dims: dict[str, int]) -> int:
    """One product an element."""
    return fp4_rows.elements(dims)


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    return fp4_rows.sample_codes(d, row, BLOCK)


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs = dict(scale_layout=fp4_rows.layout_of(f), dtype=DTYPES[f["dtype"]])
    return fp4_rows.generate_codes(f, gen, "mxfp4"), kwargs
