"""Decode on Metal, ``attnkit/decode.h``: how rows and keys are cut into threadgroups.

A threadgroup serves all query heads of a KV head for a share of its keys; over pages its lanes look the pages of the
next keys up for each other. E4M3 becomes half as it is read; of E4M3 queries out is bf16. Bound by memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core import invariance
from torch_attnkit.core.target import Target
from torch_attnkit.mps import launch as metal
from torch_attnkit.mps import library
from torch_attnkit.mps.codes import as_bytes

from .problem import Operands, Problem

DTYPES, FP8_KV_DTYPES = "bf16 f16 f32", "bf16 f16 f32 f8e4m3"  # of q, over caches of the same dtype and of E4M3
# Head dims: multiples of 16, the dims that a step of the scores takes.
DIMS, MOST_DIM_V = (32, 64, 80, 96, 128, 192, 256, 512), 512
_SIMDGROUPS = 4  # of a threadgroup; each takes 16 keys a step
_LEAST_KEYS = 256  # of a split, so that its partial result is a small part of what it reads
_ENOUGH = 512  # threadgroups that keep the largest chips busy: 80 cores with a few each
_MOST_SPLITS = 128
_SPAN = 128  # elements of a row that a simdgroup merges, MERGE_SPAN of the kernel
_MOST_BYTES = 32768  # of threadgroup memory, on every Apple GPU
_MOST_SIMDGROUPS = 8  # MOST_SIMDGROUPS of the kernel, by which its arrays are declared


def splits_of(keys: int, groups: int) -> int:
    """How many threadgroups share the keys of one tile of rows, where ``groups`` tiles run side by side."""
    if invariance.is_on():
        return 1
    return max(1, min(-(-keys // _LEAST_KEYS), -(-_ENOUGH // max(groups, 1)), _MOST_SPLITS))


def threadgroup_bytes(dim: int, dim_v: int, tiles: int) -> int:
    """Threadgroup memory of ``decode_rows``: Q' or O of its rows in float, and a maximum and a sum a simdgroup."""
    return 8 * tiles * (max(dim, dim_v) + 2 * _MOST_SIMDGROUPS) * 4


def tiles_of(rows: int, dim: int, dim_v: int) -> int:
    """Tiles of 8 rows that a threadgroup takes: two if there are so many rows, and registers and memory for them."""
    fit = dim_v <= 128 and threadgroup_bytes(dim, dim_v, 2) <= _MOST_BYTES
    return 2 if rows > 8 and fit else 1


def launcher(
    source: str, problem: Problem, target: Target, *, defines: dict[str, Any] | None = None
) -> Callable[[Operands], None]:
    """What solves ``problem`` with the kernels of ``csrc/metal/<source>.metal``, specialised by ``defines``, too."""
    p, scores = problem, problem.scores
    if p.batch * p.queries * p.heads * p.dim_v == 0:
        return lambda operands: None
    capacity = 0 if p.page and p.pages == 0 else p.capacity
    rows = p.queries * p.group  # of a KV head
    tiles = tiles_of(rows, p.dim, p.dim_v)
    columns = -(-rows // (8 * tiles))
    most = scores.most_keys(capacity, p.queries, both_sides=not p.causal)
    splits = splits_of(most, columns * p.batch * p.kv_heads)
    steps = (*p.q, p.k.sequence, p.k.head, p.k.token, p.v.sequence, p.v.head, p.v.token)
    shape = [
        p.batch, p.queries, p.group, p.kv_heads, capacity, splits, int(p.causal), *scores.bounds,
        int(p.sink and splits == 1), int(p.kv_start), *steps, p.page, p.pages, p.table_row,
        *map(int, p.scales),
    ]  # fmt: skip
    scalars = (shape, scores.slope, scores.softcap)
    merged = p.batch * p.queries * p.heads
    merge_shape = [splits, merged, p.heads, int(p.sink)]
    result = p.dtype if p.dtype.itemsize > 1 else torch.bfloat16
    stored = torch.float32 if splits > 1 else result

    def variant(width: int) -> metal.Launch:
        built = library.load(
            source, target, TYPE=p.dtype, OUT_TYPE=stored, MERGED_TYPE=result, DIM=p.dim, DIM_V=p.dim_v, TILES=tiles,
            WIDTH=width, CODES=p.fp8_kv, **(defines or {}),
        )  # fmt: skip
        simds = min(_SIMDGROUPS, metal.most_simdgroups(built, "decode_rows"))
        grid = (columns, splits, p.batch * p.kv_heads)
        attend = metal.launcher(built, "decode_rows", grid, simds * metal.SIMD)
        if splits == 1:

            def whole(args: metal.Arguments) -> None:
                inputs, _, out, lse = args
                attend((*inputs, out, lse, *scalars))

            return whole
        simds = min(_SIMDGROUPS, metal.most_simdgroups(built, "decode_merge"))
        items = merged * -(-p.dim_v // _SPAN)
        merge = metal.launcher(built, "decode_merge", (-(-items // simds), 1, 1), simds * metal.SIMD)

        def split(args: metal.Arguments) -> None:
            inputs, sink, out, lse = args
            parts = torch.empty(splits, merged, p.dim_v, dtype=torch.float32, device=out.device)
            lses = torch.empty(splits, merged, dtype=torch.float32, device=out.device)
            attend((*inputs, parts, lses, *scalars))
            merge((parts, lses, sink, out, lse, merge_shape))

        return split

    run = metal.by_alignment(variant, steps)

    def launch(o: Operands) -> None:
        q = as_bytes(o.q)
        k, v, sink = metal.bound(as_bytes(o.k), q), metal.bound(as_bytes(o.v), q), metal.bound(o.sink, o.lse)
        table, start = metal.bound(o.table, o.kv_len), metal.bound(o.kv_start, o.kv_len)
        scales = (metal.bound(None if s is None else s.contiguous(), o.lse) for s in o.scales)
        inputs = (q, k, v, table, o.kv_len, sink, start, *scales)  # as decode_rows declares them
        run((q, k, v), (inputs, sink, o.out, o.lse))

    return launch
