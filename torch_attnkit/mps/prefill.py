"""The launch of ``attnkit/prefill.h``: tiles for the sizes of a call. Knows sizes, not ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_attnkit.core.target import Target

from . import launch as metal
from . import library
from .scores import bounded, score_factors

_THREADGROUP_BYTES = 16384  # of the tiles of K and V, so that two threadgroups of 32 KB fit side by side
_MOST_SIMDGROUPS = 8


@dataclass(frozen=True)
class Sizes:
    """One call. ``steps`` are element strides as PrefillShape has them: q's, then k's, then v's."""

    dtype: torch.dtype
    batch: int
    queries: int  # of a sequence; all tokens where sequences are packed
    keys: int
    heads: int  # query heads of all KV heads
    kv_heads: int
    dim: int
    dim_v: int
    steps: tuple[int, ...]
    longest: int  # queries of the longest sequence
    varlen: bool = False
    in_cache: bool = False  # positions count from kv_len


def threadgroup_bytes(dim: int, dim_v: int, itemsize: int, keys: int) -> int:
    """Threadgroup memory of ``prefill_rows``: K and V of a tile, with 32 bytes more a row each."""
    return keys * ((dim + dim_v) * itemsize + 64)


def keys_of(dim: int, dim_v: int, itemsize: int) -> int:
    """Keys of a tile: a multiple of 8 up to 32 whose K and V leave room for a second threadgroup; 8 if none do."""
    fits = lambda n: threadgroup_bytes(dim, dim_v, itemsize, n) <= _THREADGROUP_BYTES
    return next((n for n in (32, 24, 16) if fits(n)), 8)


def launcher(
    op: str,
    target: Target,
    sizes: Sizes,
    arguments: Any,
    *,
    defines: dict[str, Any] | None = None,
    normalize: bool = True,
) -> Callable[[Sequence[Any], Sequence[torch.Tensor | None]], None]:
    """What runs one call on (q, k, v, sink, kv_len or cu_seqlens_q, kv_start or cu_seqlens_k) and (out, lse, row_sum).

    Absent tensors are None.
    """
    shared = sizes.heads // sizes.kv_heads
    rows = sizes.longest * shared  # of the longest sequence and one KV head
    tiles = 2 if max(sizes.dim, sizes.dim_v) <= 128 else 1
    keys = keys_of(sizes.dim, sizes.dim_v, sizes.dtype.itemsize)
    scale, cap = score_factors(sizes.dim, arguments.scale, arguments.softcap)
    given = [getattr(arguments, n, None) is not None for n in ("sink", "kv_len", "kv_start")]
    shape = [
        sizes.queries, sizes.keys, shared, sizes.batch, int(arguments.causal), bounded(arguments.window),
        bounded(arguments.sink_tokens), *map(int, given), int(normalize), *sizes.steps,
    ]  # fmt: skip

    def variant(width: int) -> metal.Launch:
        simds = max(1, min(_MOST_SIMDGROUPS, -(-rows // (8 * tiles))))
        while True:
            built = library.load(
                op, target, TYPE=sizes.dtype, DIM=sizes.dim, DIM_V=sizes.dim_v, TILES=tiles, SIMDS=simds, KEYS=keys,
                WIDTH=width, IN_CACHE=sizes.in_cache, **(defines or {}),
            )  # fmt: skip
            limit = metal.most_simdgroups(built, "prefill_rows")
            if simds <= limit:
                break
            simds = limit
        columns = max(1, -(-rows // (8 * tiles * simds)))
        grid = (columns, sizes.kv_heads, sizes.batch + sizes.varlen)
        return metal.launcher(built, "prefill_rows", grid, simds * metal.SIMD)

    run = metal.by_alignment(variant, sizes.steps)

    def launch(tensors: Sequence[Any], outs: Sequence[torch.Tensor | None]) -> None:
        (q, k, v, sink, first, second), (out, lse, row_sum) = tensors, outs
        inputs = (metal.bound(k, q), metal.bound(v, q), metal.bound(sink, lse))
        ints = (metal.bound(first, lse), metal.bound(second, lse))
        run((q, *inputs[:2], out), (q, *inputs, *ints, out, lse, metal.bound(row_sum, lse), shape, scale, cap))

    return launch
