"""Tensors of one byte an element, as kernels are given them."""

from __future__ import annotations

import torch


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    """``t``, or where it is E4M3 its bytes, uint8, which every torch can pass on."""
    return t if t.dtype.itemsize > 1 else t.view(torch.uint8)
