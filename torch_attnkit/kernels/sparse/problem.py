"""What a launch of sparse attention solves, in sizes and strides, and its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torch_attnkit.core.spec import short

from ..fp4.problem import Rotate


@dataclass(frozen=True)
class Fp4:
    """Results in FP4: rounded to the call's dtype, the last ``pairs`` of a head's pairs rotated back and rounded again,
    and quantised in blocks along the head."""

    format: str  # nvfp4 or mxfp4
    pairs: int
    angle_dtype: torch.dtype
    swizzled: bool  # scales in the 128x4 layout
    divided: bool  # whether there is a global scale


@dataclass(frozen=True)
class Problem:
    """Attention of tokens over keys that are values, too: the last ``window`` before each token's end, and entries."""

    dtype: torch.dtype
    device: torch.device
    tokens: int
    heads: int
    dim: int
    requests: int
    capacity: int  # window keys of a request
    window: int
    entries: int  # of a request
    listed: int  # entries that a token's list has room for
    has_list: bool
    has_length: bool
    has_requests: bool
    has_sink: bool
    factor: float  # of a product of q and a key
    normalize: bool
    near_paged: bool = False
    far_paged: bool = False
    format: str = "none"  # of rows, as formats/kv_cache.py has them
    rope_dim: int = 0  # channels of an encoded row in bfloat16
    align: int = 16  # bytes, at whose multiples the rows of the caches start
    divided: bool = False  # whether numbers are divided by a global scale
    fp4: Fp4 | None = None  # results in FP4; they are normalised

    @property
    def keys(self) -> int:
        """Keys that a token has at most."""
        return min(self.window, self.capacity) + (min(self.listed, self.entries) if self.has_list else self.entries)

    @property
    def fp4_signature(self) -> tuple[Any, ...] | None:
        """``fp4`` as kernels are compiled with it."""
        r = self.fp4
        return None if r is None else (r.format, r.pairs, short(r.angle_dtype), r.swizzled, r.divided)


@dataclass(frozen=True)
class QuantisedProblem:
    """Attention with FP4 results; ``rotated``: the second launch's problem, if quantised apart."""

    attended: Problem
    rotated: Rotate


class DenseResults(NamedTuple):
    """Result tensors in the call's dtype."""

    out: torch.Tensor  # (T, H, D)
    lse: torch.Tensor  # (T, H)
    row_sum: torch.Tensor  # (T, H), empty where the result is normalised


class Fp4Results(NamedTuple):
    """Result tensors in FP4."""

    codes: torch.Tensor  # (T, H, D/2), contiguous
    scale: torch.Tensor  # (T, H, D/block) or (groups, T padded to 128, columns), contiguous
    cos: torch.Tensor  # (T, pairs)
    sin: torch.Tensor  # (T, pairs)
    global_scale: torch.Tensor | None  # ()


class Operands(NamedTuple):
    """The tensors of one launch; None for those that a call does not have."""

    q: torch.Tensor  # (T, H, D)
    near: torch.Tensor  # (R, S, Rb), or in pages (N, P, Rb): the keys of windows
    end: torch.Tensor  # (T): where a token's window ends
    far: torch.Tensor | None  # (R, C, Rb), or in pages (N, P, Rb): the entries
    indices: torch.Tensor | None  # (T, K): a token's entries, -1 for none
    length: torch.Tensor | None  # (T): entries from this one on do not count
    request: torch.Tensor | None  # (T)
    sink: torch.Tensor | None  # (H)
    near_table: torch.Tensor | None  # (R, M): the pages of a request's keys
    far_table: torch.Tensor | None  # (R, M)
    global_scale: torch.Tensor | None  # (), of encoded rows
    results: DenseResults | Fp4Results
