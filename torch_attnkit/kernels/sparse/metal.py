"""Sparse attention on Metal, ``attnkit/sparse.h``: the host side.

``metal_plan.py`` says how heads and keys are cut into threadgroups; a token whose keys are split has a second launch,
which merges them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torch_attnkit.core.target import Target
from torch_attnkit.formats import kv_cache
from torch_attnkit.mps import launch as metal
from torch_attnkit.mps import library
from torch_attnkit.mps.cores import cores_of

from .metal_plan import plan
from .problem import Numbers, Operands, Problem

DTYPES = "bf16 f16 f32"
# Head sizes: multiples of the 128 columns that a simdgroup has.
DIMS = (128, 256, 512)
MOST = 1 << 30  # of windows and lists: sums of two stay in 32 bits
_SPAN = 128  # elements of a row that a simdgroup merges
_MERGE_SIMDGROUPS = 4


@dataclass(frozen=True)
class Cache:
    """Where the rows of a cache are, in elements; a page of 0 keys is none."""

    first: int  # from one request, or page, to the next
    key: int
    page: int = 0
    pages: int = 0
    table_row: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.first, self.key, self.page, self.pages, self.table_row


@dataclass(frozen=True)
class Layout:
    """The steps of a call's tensors, in elements."""

    q_token: int
    q_head: int
    near: Cache
    far: Cache
    list_row: int


def launcher(source: str, problem: Problem, layout: Layout, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` with the kernels of ``csrc/metal/<source>.metal``."""
    p = problem
    if p.tokens * p.heads == 0:
        return lambda operands: None
    fp = kv_cache.FORMATS.index(p.format)
    entries, capacity = (n if p.requests else 0 for n in (p.entries, p.capacity))
    rows, cores = p.tokens * p.heads, cores_of(target)

    def shape(splits: int) -> list[int]:
        return [
            p.heads, p.requests, max(1, p.tokens // max(1, p.requests)), capacity, min(p.window, MOST), entries,
            min(p.listed, MOST), layout.list_row, layout.q_token, layout.q_head, splits, int(p.has_length),
            int(p.has_requests), int(p.has_sink), int(p.normalize), *layout.near.shape, *layout.far.shape,
        ]  # fmt: skip

    def variant(width: int) -> metal.Launch:
        cut = plan(p, cores)
        while True:
            built = library.load(
                source, target, TYPE=p.dtype, OUT_TYPE=torch.float32 if cut.splits > 1 else p.dtype, DIM=p.dim,
                HEADS=cut.heads, SLICE=cut.slice, KEYS=cut.keys, WIDTH=width, LISTED=p.has_list,
                NEAR_PAGED=p.near_paged, FAR_PAGED=p.far_paged, FORMAT=fp, ROPE=p.rope_dim if fp else 0,
                DIVIDED=p.divided,
            )  # fmt: skip
            simds, splits = cut.simdgroups(p.dim), cut.splits
            limit = metal.most_simdgroups(built, "sparse_rows")
            if simds <= limit:
                break
            if cut.heads == 8:
                raise RuntimeError(f"{source}: the pipeline runs {limit} simdgroups, 8 heads need {simds}")
            cut = plan(p, cores, max(8, cut.heads // 2))
        attend = metal.launcher(built, "sparse_rows", (cut.groups, splits, p.tokens), simds * metal.SIMD)
        numbers = (shape(splits), p.factor)
        if splits == 1:

            def whole(args: metal.Arguments) -> None:
                inputs, sink, out, lse, row_sum = args
                attend((*inputs, out, lse, row_sum, *numbers))

            return whole
        simds = min(_MERGE_SIMDGROUPS, metal.most_simdgroups(built, "sparse_merge"))
        items = rows * -(-p.dim // _SPAN)
        merge = metal.launcher(built, "sparse_merge", (-(-items // simds), 1, 1), simds * metal.SIMD)
        merged = [splits, rows, p.heads, int(p.has_sink), int(p.normalize)]

        def split(args: metal.Arguments) -> None:
            inputs, sink, out, lse, row_sum = args
            parts = torch.empty(splits, rows, p.dim, dtype=torch.float32, device=out.device)
            peaks, sums = torch.empty(2, splits, rows, dtype=torch.float32, device=out.device)
            attend((*inputs, parts, peaks, sums, *numbers))
            merge((parts, peaks, sums, sink, out, lse, row_sum, merged))

        return split

    run = metal.by_alignment(variant, (layout.near.first, layout.near.key, layout.far.first, layout.far.key))

    def launch(o: Operands) -> None:
        results = o.results
        assert isinstance(results, Numbers)
        near = metal.bound(o.near, results.out.view(torch.uint8) if fp else o.q)
        far, sink = metal.bound(o.far, near), metal.bound(o.sink, results.lse)
        chosen, length, request, near_table, far_table = (
            metal.bound(t, o.end) for t in (o.chosen, o.length, o.request, o.near_table, o.far_table)
        )
        divisor, row_sum = metal.bound(o.global_scale, results.lse), metal.bound(results.row_sum, results.lse)
        inputs = (o.q, near, o.end, far, chosen, length, request, sink, near_table, far_table, divisor)
        run((near, far, results.out), (inputs, sink, results.out, results.lse, row_sum))

    return launch
