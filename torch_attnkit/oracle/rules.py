"""Rules and features that the attention ops share, as dicts for the ``where`` and ``features`` fields of their tables.

They look at sizes and scalars only; what depends on the contents of tensors is checked by the references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch_attnkit.core.family import Launcher
from torch_attnkit.core.op import Call, Kernel, of_dtypes
from torch_attnkit.core.spec import DTYPES, short

HEADS = {
    "Hq must be a multiple of Hkv": lambda c: c.dim["Hkv"] > 0 and c.dim["Hq"] % c.dim["Hkv"] == 0,
    "D must be at least 1": lambda c: c.dim["D"] > 0,
}
SCORES = {
    "window must be -1 (off) or at least 0": lambda c: c.arg.window >= -1,
    "sink_tokens must be at least 0": lambda c: c.arg.sink_tokens >= 0,
    "softcap must be 0 (off) or positive": lambda c: c.arg.softcap >= 0,
}
# Numerators of several partials share one denominator, so the sink may join only after they are merged.
PARTIAL = {
    "sink is accepted with normalize=True only; give it to merge_partials": lambda c: (
        c.arg.normalize or c.arg.sink is None
    ),
}


def wide(spec: str) -> Callable[[Call], str | None]:
    """An entry of ``layouts`` for an output: bf16 where T is E4M3, whose 4 bits are too few for a mean of values."""
    return lambda c: f"{spec}:bf16" if c.dtype == DTYPES["f8e4m3"] else None


def _one_dtype(c: Call) -> bool:
    """Raises TypeError, as the table does for a dtype of no tensor."""
    k, v = c.arg.k_cache.dtype, c.arg.v_cache.dtype
    if k != v:
        raise TypeError(f"{c.op}: v_cache is {short(v)}, accepted: {short(k)}, the dtype of k_cache")
    return True


CACHES = {"k_cache and v_cache must have one dtype": _one_dtype}


def value_dim(most: int) -> dict[str, Callable[[Any], bool]]:
    """What a kernel needs whose values are cut into runs of 16 elements."""
    return {f"Dv must be a multiple of 16 up to {most}": lambda c: 0 < c.dim["Dv"] <= most and c.dim["Dv"] % 16 == 0}


# cp.async and TMA read 16 bytes at a time, and nobody wants a copy of a cache.
CACHE_ROWS = {
    "every row of the caches must start at a multiple of 16 bytes": lambda c: all(
        stride * cache.dtype.itemsize % 16 == 0
        for cache in (c.arg.k_cache, c.arg.v_cache)
        for stride in cache.stride()[:-1]
    ),
}
# Of kernels whose caches have q's dtype.
SAME_DTYPE = {"the caches must have the dtype of q": of_dtypes(lambda c: c.arg.k_cache.dtype == c.dtype)}
SAME_DIM = {"Dv must equal D": lambda c: c.dim["Dv"] == c.dim["D"]}
GQA = {"gqa": lambda c: c.dim["Hq"] != c.dim["Hkv"]}
SINK = {"sink": lambda c: c.arg.sink is not None}
KV_START = {"kv_start": lambda c: c.arg.kv_start is not None}
WINDOW = {
    "window": lambda c: c.arg.window >= 0,
    "sink_tokens": lambda c: c.arg.window >= 0 and c.arg.sink_tokens > 0,
    "softcap": lambda c: c.arg.softcap > 0,
}
CAUSAL = {"causal": lambda c: c.arg.causal}
UNNORMALIZED = {"unnormalized": lambda c: not c.arg.normalize}
SCALES = {"scales": lambda c: any(s is not None for s in (c.arg.q_scale, c.arg.k_scale, c.arg.v_scale))}
# Bits of an element of the caches, which E4M3 may have beside any query.
BITS = {"bits": lambda c: 8 * c.arg.k_cache.dtype.itemsize}
EIGHT_BITS: dict[str, tuple[int, ...]] = {"bits": (8,)}
SINK_OR_PARTIAL = (("sink", "unnormalized"),)  # exclusive, see PARTIAL


def by_head(
    on: str, dtypes: str, heads: Iterable[tuple[int, int]], features: str, needs: dict[str, Any] | None = None,
    *, launcher: Launcher,
) -> tuple[Kernel, ...]:  # fmt: skip
    """A row for each (D, Dv) that a kernel family has."""
    return tuple(
        Kernel(on, dtypes, {"D": (d,), "Dv": (dv,)}, features, needs or {}, launcher=launcher) for d, dv in heads
    )


def of_codes(
    on: str, dtypes: str, heads: Iterable[tuple[int, int]], features: str, needs: dict[str, Any] | None = None,
    sizes: dict[str, tuple[int, ...]] | None = None, *, launcher: Launcher,
) -> tuple[Kernel, ...]:  # fmt: skip
    """The rows for E4M3, which differ in nothing but their head sizes: one for those with D = Dv. ``sizes`` are more of
    what all of them accept."""
    same, needs, sizes = tuple(d for d, dv in heads if d == dv), needs or {}, sizes or {}
    other = tuple(pair for pair in heads if pair[0] != pair[1])
    return (
        Kernel(on, dtypes, {"D": same} | sizes, features, needs | SAME_DIM, launcher=launcher),
        *(Kernel(on, dtypes, {"D": (d,), "Dv": (dv,)} | sizes, features, needs, launcher=launcher) for d, dv in other),
    )
