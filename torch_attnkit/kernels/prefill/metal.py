"""Prefill on Metal, ``attnkit/prefill.h``: 8x8 matrix products and softmax in float, in tiles of up to 128 rows.

The query heads of a KV head share a tile, and so do K and V; threadgroups of packed sequences find theirs by the
offsets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch_attnkit.core.target import Target
from torch_attnkit.mps import launch as metal
from torch_attnkit.mps import library

from .problem import Layout, Operands, Problem

DTYPES = "bf16 f16 f32"
# Head dims: multiples of 16, the dims that a step of the scores takes.
DIMS, MOST_DIM_V = (32, 64, 80, 96, 128, 192, 256), 256
_THREADGROUP_BYTES = 16384  # of the tiles of K and V, so that two threadgroups of 32 KB fit side by side
_MOST_SIMDGROUPS = 8


def threadgroup_bytes(dim: int, dim_v: int, itemsize: int, keys: int) -> int:
    """Threadgroup memory of ``prefill_rows``: K and V of a tile, with 32 bytes more a row each."""
    return keys * ((dim + dim_v) * itemsize + 64)


def keys_of(dim: int, dim_v: int, itemsize: int) -> int:
    """Keys of a tile: a multiple of 8 up to 32 whose K and V leave room for a second threadgroup; 8 if none do."""
    fits = lambda n: threadgroup_bytes(dim, dim_v, itemsize, n) <= _THREADGROUP_BYTES
    return next((n for n in (32, 24, 16) if fits(n)), 8)


def launcher(
    source: str, problem: Problem, target: Target, *, defines: dict[str, Any] | None = None
) -> Callable[[Operands], None]:
    """What solves ``problem`` with the kernel of ``csrc/metal/<source>.metal``, specialised by ``defines``, too."""
    p, scores = problem, problem.scores
    if math.prod(p.q.shape[:-1]) * p.dim_v == 0:
        return lambda operands: None
    rows = p.longest * p.group  # of the longest sequence and one KV head
    tiles = 2 if max(p.dim, p.dim_v) <= 128 else 1
    keys = keys_of(p.dim, p.dim_v, p.dtype.itemsize)
    steps = (*_steps(p.q, p), *_steps(p.k, p, p.cached), *_steps(p.v, p, p.cached))
    shape = [
        p.queries, p.keys, p.group, p.batch, int(p.causal), *scores.bounds, int(p.sink), int(p.kv_len), int(p.kv_start),
        int(p.normalize), *steps,
    ]  # fmt: skip

    def variant(width: int) -> metal.Launch:
        simds = max(1, min(_MOST_SIMDGROUPS, -(-rows // (8 * tiles))))
        while True:
            built = library.load(
                source, target, TYPE=p.dtype, DIM=p.dim, DIM_V=p.dim_v, TILES=tiles, SIMDS=simds, KEYS=keys,
                WIDTH=width, IN_CACHE=p.cached, **(defines or {}),
            )  # fmt: skip
            limit = metal.most_simdgroups(built, "prefill_rows")
            if simds <= limit:
                break
            simds = limit
        columns = max(1, -(-rows // (8 * tiles * simds)))
        grid = (columns, p.kv_heads, p.batch + p.packed)
        return metal.launcher(built, "prefill_rows", grid, simds * metal.SIMD)

    run = metal.by_alignment(variant, steps)

    def launch(o: Operands) -> None:
        first, second = (o.cu_q, o.cu_k) if p.packed else (o.kv_len, o.kv_start)
        k, v, sink = metal.bound(o.k, o.q), metal.bound(o.v, o.q), metal.bound(o.sink, o.lse)
        ints = (metal.bound(first, o.lse), metal.bound(second, o.lse))
        sums = metal.bound(o.row_sum, o.lse)
        run((o.q, k, v, o.out), (o.q, k, v, sink, *ints, o.out, o.lse, sums, shape, scores.slope, scores.softcap))

    return launch


def _steps(layout: Layout, problem: Problem, cache: bool = False) -> tuple[int, int, int]:
    """Strides as PrefillShape has them: q's of sequence, token and head, k's and v's of sequence, head and token."""
    if problem.packed:
        token, head, _ = layout.strides
        return (0, token, head) if layout is problem.q else (0, head, token)
    sequence, first, second, _ = layout.strides
    return (sequence, first, second) if layout is problem.q or cache else (sequence, second, first)
