"""The launches of ``attnkit/decode.h``: how rows and keys are cut into threadgroups, for sizes and not for ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_attnkit.core.target import Target

from . import launch as metal
from . import library
from .scores import bounded, score_factors

_SIMDGROUPS = 4  # of a threadgroup; each takes 16 keys a step
_LEAST_KEYS = 256  # of a split, so that its partial result is a small part of what it reads
_ENOUGH = 512  # threadgroups that keep the largest chips busy: 80 cores with a few each
_MOST_SPLITS = 128
_SPAN = 128  # elements of a row that a simdgroup merges, MERGE_SPAN of the kernel
_MOST_BYTES = 32768  # of threadgroup memory, on every Apple GPU
_MOST_SIMDGROUPS = 8  # MOST_SIMDGROUPS of the kernel, by which its arrays are declared


@dataclass(frozen=True)
class Sizes:
    """One decode call. ``steps`` are element strides as DecodeShape has them: q's, then k's, then v's."""

    dtype: torch.dtype
    batch: int
    queries: int
    heads: int  # query heads of all KV heads
    kv_heads: int
    dim: int
    dim_v: int
    capacity: int
    steps: tuple[int, ...]
    page: int = 0  # keys of a page; 0: the cache has none
    pages: int = 0
    table_row: int = 0


def splits_of(keys: int, groups: int) -> int:
    """How many threadgroups share the keys of one tile of rows, where ``groups`` tiles run side by side."""
    return max(1, min(-(-keys // _LEAST_KEYS), -(-_ENOUGH // max(groups, 1)), _MOST_SPLITS))


def threadgroup_bytes(dim: int, dim_v: int, tiles: int) -> int:
    """Threadgroup memory of ``decode_rows``: Q' or O of its rows in float, and a maximum and a sum a simdgroup."""
    return 8 * tiles * (max(dim, dim_v) + 2 * _MOST_SIMDGROUPS) * 4


def tiles_of(rows: int, dim: int, dim_v: int) -> int:
    """Tiles of 8 rows that a threadgroup takes: two if there are so many rows, and registers and memory for them."""
    fit = dim_v <= 128 and threadgroup_bytes(dim, dim_v, 2) <= _MOST_BYTES
    return 2 if rows > 8 and fit else 1


def launcher(
    op: str, target: Target, sizes: Sizes, arguments: Any, *, defines: dict[str, Any] | None = None, causal: bool = True
) -> Callable[[Sequence[Any], torch.Tensor, torch.Tensor], None]:
    """What runs one call on (q, k, v, table, kv_len, sink, kv_start), out and lse; absent tensors are None."""
    rows = sizes.queries * sizes.heads // sizes.kv_heads  # of a KV head
    tiles = tiles_of(rows, sizes.dim, sizes.dim_v)
    columns = -(-rows // (8 * tiles))
    window, sinks = bounded(arguments.window), bounded(arguments.sink_tokens)
    most = min(sizes.capacity, (2 - causal) * window + sizes.queries + sinks) if window >= 0 else sizes.capacity
    groups = columns * sizes.batch * sizes.kv_heads
    splits = splits_of(most, groups)
    has_sink, has_start = arguments.sink is not None, arguments.kv_start is not None
    shape = [
        sizes.batch, sizes.queries, sizes.heads // sizes.kv_heads, sizes.kv_heads, sizes.capacity, splits,
        int(causal), window, sinks, int(has_sink and splits == 1), int(has_start),
        *sizes.steps, sizes.page, sizes.pages, sizes.table_row,
    ]  # fmt: skip
    merged = sizes.batch * sizes.queries * sizes.heads
    merge_shape = [splits, merged, sizes.heads, int(has_sink)]
    scale, cap = score_factors(sizes.dim, arguments.scale, arguments.softcap)

    stored = torch.float32 if splits > 1 else sizes.dtype

    def variant(width: int) -> metal.Launch:
        built = library.load(
            op, target, TYPE=sizes.dtype, OUT_TYPE=stored, MERGED_TYPE=sizes.dtype,
            DIM=sizes.dim, DIM_V=sizes.dim_v, TILES=tiles, WIDTH=width, **(defines or {}),
        )  # fmt: skip
        simds = min(_SIMDGROUPS, metal.most_simdgroups(built, "decode_rows"))
        grid = (columns, splits, sizes.batch * sizes.kv_heads)
        attend = metal.launcher(built, "decode_rows", grid, simds * metal.SIMD)
        if splits == 1:
            return lambda args: attend((*args[:-3], *args[-2:], shape, scale, cap))
        simds = min(_SIMDGROUPS, metal.most_simdgroups(built, "decode_merge"))
        items = merged * -(-sizes.dim_v // _SPAN)
        merge = metal.launcher(built, "decode_merge", (-(-items // simds), 1, 1), simds * metal.SIMD)

        def launch(args: metal.Arguments) -> None:
            *inputs, sink, out, lse = args
            parts = torch.empty(splits, merged, sizes.dim_v, dtype=torch.float32, device=out.device)
            lses = torch.empty(splits, merged, dtype=torch.float32, device=out.device)
            attend((*inputs, parts, lses, shape, scale, cap))
            merge((parts, lses, sink, out, lse, merge_shape))

        return launch

    run = metal.by_alignment(variant, sizes.steps)

    def launch(tensors: Sequence[Any], out: torch.Tensor, lse: torch.Tensor) -> None:
        q, k, v, table, kv_len, sink, kv_start = tensors
        table, start, sink = (metal.bound(table, kv_len), metal.bound(kv_start, kv_len), metal.bound(sink, lse))
        caches = (metal.bound(k, q), metal.bound(v, q))
        run((q, *caches), (q, *caches, table, kv_len, sink, start, sink, out, lse))

    return launch
