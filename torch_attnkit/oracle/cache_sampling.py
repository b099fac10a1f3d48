"""What the random signatures of decode ops share: a fact ``bits`` of 8 makes caches E4M3, whatever q is."""

from __future__ import annotations

import torch

from torch_attnkit.core.op import Kernel

from . import sampling


def bits(row: Kernel) -> sampling.Facts:
    """The fact for a row that takes E4M3 caches alone; without it they have the dtype of q."""
    return {axis: sizes[0] for axis, sizes in row.dims.items() if axis == "bits"}


def stored(facts: sampling.Facts) -> str:
    """The dtype of the caches."""
    return "f8e4m3" if facts.get("bits") == 8 else str(facts["dtype"])


def qkv(
    facts: sampling.Facts, gen: torch.Generator, queries: tuple[int, ...], keys: tuple[int, ...], seen: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """``sampling.qkv`` with caches of their own dtype."""
    found = sampling.qkv(facts | dict(dtype="f32"), gen, queries, keys, seen, ("k_cache", "v_cache"))
    dtypes = (facts["dtype"], stored(facts), stored(facts))
    return tuple(sampling.cast(t, dtype) for t, dtype in zip(found, dtypes, strict=True))
