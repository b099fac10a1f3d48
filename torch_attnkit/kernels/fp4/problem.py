"""What is quantised or read back, in sizes and strides, and the tensors of one launch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torch_attnkit.formats import mxfp4, nvfp4

BLOCK = {"nvfp4": nvfp4.BLOCK, "mxfp4": mxfp4.BLOCK}  # elements under one scale


@dataclass(frozen=True)
class Quantize:
    """Rows of K elements to codes and scales."""

    format: str
    device: torch.device
    dtype: torch.dtype
    k: int
    batch: tuple[int, ...]  # sizes of the axes before K
    x: tuple[int, ...]  # element strides of these axes
    swizzled: bool
    global_scale: bool = False
    floor: bool = False  # MXFP4: round the scale down

    @property
    def rows(self) -> int:
        return math.prod(self.batch)


@dataclass(frozen=True)
class Dequantize:
    """Rows of K codes and their scales to elements."""

    format: str
    device: torch.device
    dtype: torch.dtype  # of the elements
    k: int
    batch: tuple[int, ...]
    codes: tuple[int, ...]  # strides in bytes of the batch axes
    scale: tuple[int, ...]  # the same; in the 128x4 layout that of its rows
    swizzled: bool
    global_scale: bool = False

    @property
    def rows(self) -> int:
        return math.prod(self.batch)


@dataclass(frozen=True)
class Rotate:
    """Heads of D elements, of which the last R2 pairs are rotated back, to codes and scales."""

    format: str
    device: torch.device
    dtype: torch.dtype
    angle_dtype: torch.dtype
    tokens: int
    heads: int
    k: int  # D
    pairs: int  # R2
    o: tuple[int, ...]  # element strides of its axes before D, 0 for an axis of one
    angles: tuple[int, ...]  # the same of cos and of sin
    groups: int  # of heads, each with a matrix of scales in the 128x4 layout
    swizzled: bool
    global_scale: bool = False


class Rotated(NamedTuple):
    """The tensors of one launch of ``Rotate``."""

    o: torch.Tensor  # (Tq, Hq, D)
    cos: torch.Tensor  # (Tq, R2)
    sin: torch.Tensor  # (Tq, R2)
    global_scale: torch.Tensor | None  # ()
    codes: torch.Tensor  # (Tq, Hq, D/2), contiguous
    scale: torch.Tensor  # (Tq, Hq, D/block) or (groups, Tq padded to 128, columns padded to 4), contiguous


class Quantized(NamedTuple):
    """The tensors of one launch of ``Quantize``."""

    x: torch.Tensor  # (..., K)
    global_scale: torch.Tensor | None  # ()
    codes: torch.Tensor  # (..., K/2), contiguous
    scale: torch.Tensor  # (..., K/block) or (rows padded to 128, K/block padded to 4), contiguous


class Dequantized(NamedTuple):
    """The tensors of one launch of ``Dequantize``."""

    codes: torch.Tensor  # (..., K/2)
    scale: torch.Tensor  # (..., K/block) or (rows padded to 128, K/block padded to 4)
    global_scale: torch.Tensor | None  # ()
    x: torch.Tensor  # (..., K), contiguous
