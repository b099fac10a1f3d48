"""Prefill on Metal, ``attnkit/prefill.h``: 8x8 matrix products and softmax in float, in tiles of up to 128 rows.

The query heads of a KV head share a tile, and so do K and V; threadgroups of packed sequences find theirs by the
offsets, and over pages their lanes look the pages of the next keys up for each other. E4M3 becomes half as it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch_attnkit.core import invariance
from torch_attnkit.core.target import Target
from torch_attnkit.mps import launch as metal
from torch_attnkit.mps import library
from torch_attnkit.mps.codes import as_bytes

from .problem import Layout, Operands, PagedOperands, PagedProblem, Problem

DTYPES, CODES = "bf16 f16 f32", "f8e4m3"
# Head dims: multiples of 16, the dims that a step of the scores takes.
DIMS, MOST_DIM_V = (32, 64, 80, 96, 128, 192, 256), 256
_THREADGROUP_BYTES = 16384  # of the tiles of K and V, so that two threadgroups of 32 KB fit side by side
_MOST_SIMDGROUPS = 8


def threadgroup_bytes(dim: int, dim_v: int, itemsize: int, keys: int) -> int:
    """Threadgroup memory of ``prefill_rows``: K and V of a tile, with 32 bytes more a row each."""
    return keys * ((dim + dim_v) * itemsize + 64)


def held_bytes(itemsize: int) -> int:
    """Of an element of K and V, of ``itemsize`` bytes, in threadgroup memory, where E4M3 is half."""
    return max(itemsize, 2)


def keys_of(dim: int, dim_v: int, itemsize: int) -> int:
    """Keys of a tile: a multiple of 8 up to 32 whose K and V leave room for a second threadgroup; 8 if none do."""
    fits = lambda n: threadgroup_bytes(dim, dim_v, itemsize, n) <= _THREADGROUP_BYTES
    return next((n for n in (32, 24, 16) if fits(n)), 8)


class Pages(NamedTuple):
    """Of a cache; all 0 where the keys of a sequence lie together."""

    page: int = 0  # keys of a page
    pages: int = 0
    table_row: int = 0  # elements from row to row of the block table


def launcher(
    source: str, problem: Problem, target: Target, *, defines: dict[str, Any] | None = None
) -> Callable[[Operands], None]:
    """What solves ``problem`` with the kernel of ``csrc/metal/<source>.metal``, specialised by ``defines``, too."""
    run = _kernel(source, problem, target, Pages(), defines or {})

    def launch(o: Operands) -> None:
        first, second = (o.cu_q, o.cu_k) if problem.packed else (o.kv_len, o.kv_start)
        run((o.q, o.k, o.v, o.sink, first, second, None, *o.scales, o.out, o.lse, o.row_sum))

    return launch


def paged_launcher(
    source: str, problem: PagedProblem, target: Target, *, table_row: int
) -> Callable[[PagedOperands], None]:
    """The same for blocks of queries over pages; the rows of the block table are ``table_row`` elements apart."""
    run = _kernel(source, problem.attention, target, Pages(problem.page, problem.pages, table_row), {})
    return lambda o: run((o.q, o.k, o.v, o.sink, o.cu_q, o.kv_len, o.table, *o.scales, o.out, o.lse, None))


def _kernel(
    source: str, problem: Problem, target: Target, pages: Pages, defines: dict[str, Any]
) -> Callable[[tuple[Any, ...]], None]:
    """What runs ``prefill_rows`` on its tensors, in the order in which it declares them; None for absent ones."""
    p, scores = problem, problem.scores
    if math.prod(p.q.shape[:-1]) * p.dim_v == 0:
        return lambda tensors: None
    capacity = 0 if pages.page and pages.pages == 0 else p.keys
    rows = p.longest * p.group  # of the longest sequence and one KV head
    tiles = 2 if max(p.dim, p.dim_v) <= 128 else 1
    codes = p.kv_itemsize == 1
    keys = keys_of(p.dim, p.dim_v, held_bytes(p.kv_itemsize))
    steps = (*_query_steps(p), *_key_steps(p.k, p), *_key_steps(p.v, p))
    shape = [
        p.queries, capacity, p.group, p.batch, int(p.causal), *scores.bounds, int(p.sink), int(p.kv_len),
        int(p.kv_start), int(p.normalize), *steps, *pages, *map(int, p.scales),
    ]  # fmt: skip

    def variant(width: int) -> metal.Launch:
        # Rows of a threadgroup go along the same tiles of keys, however long the other sequences are.
        enough = _MOST_SIMDGROUPS if invariance.is_on() else -(-rows // (8 * tiles))
        simds = max(1, min(_MOST_SIMDGROUPS, enough))
        while True:
            built = library.load(
                source, target, TYPE=p.dtype, OUT_TYPE=p.out_dtype, CODES=codes, DIM=p.dim, DIM_V=p.dim_v, TILES=tiles,
                SIMDS=simds, KEYS=keys, WIDTH=width, IN_CACHE=p.cached, **defines,
            )  # fmt: skip
            limit = metal.most_simdgroups(built, "prefill_rows")
            if simds <= limit:
                break
            simds = limit
        columns = max(1, -(-rows // (8 * tiles * simds)))
        grid = (columns, p.kv_heads, p.batch + p.packed)
        return metal.launcher(built, "prefill_rows", grid, simds * metal.SIMD)

    run = metal.by_alignment(variant, steps)

    def launch(tensors: tuple[Any, ...]) -> None:
        *qkv, sink, first, second, table, q_scale, k_scale, v_scale, out, lse, row_sum = tensors
        q, k, v = map(as_bytes, qkv)
        k, v, sink = metal.bound(k, q), metal.bound(v, q), metal.bound(sink, lse)
        ints = (metal.bound(t, lse) for t in (first, second, table))
        scales = (metal.bound(None if s is None else s.contiguous(), lse) for s in (q_scale, k_scale, v_scale))
        sums = metal.bound(row_sum, lse)
        run((q, k, v, out), (q, k, v, sink, *ints, *scales, out, lse, sums, shape, scores.slope, scores.softcap))

    return launch


def _query_steps(problem: Problem) -> tuple[int, int, int]:
    """Strides of q as PrefillShape has them: of sequence, token and head."""
    first, second, *third = problem.q.strides[:-1]
    return (first, second, *third) if third else (0, first, second)  # type: ignore[return-value]


def _key_steps(layout: Layout, problem: Problem) -> tuple[int, int, int]:
    """Strides of k or v: of sequence (or page), head and token."""
    if problem.packed and not problem.cached:
        token, head, _ = layout.strides
        return 0, head, token
    sequence, first, second, _ = layout.strides
    heads_first = problem.cached and not problem.packed
    return (sequence, first, second) if heads_first else (sequence, second, first)
