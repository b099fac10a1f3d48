"""Operands as tensor cores take them: of 16 bits, whatever is multiplied."""

from __future__ import annotations

import torch

from .attention import _narrow as narrow


def narrow_operands(dtype: torch.dtype) -> bool:
    """Whether a reference in ``dtype`` is to round what it multiplies: inside ``narrow_products``, with 16 bits. That
    is the reference in the tensors' own dtype where a result in float32 comes out of products of 16 bits."""
    return narrow.get() and dtype.itemsize == 2
