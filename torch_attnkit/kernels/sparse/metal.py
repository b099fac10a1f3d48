"""Sparse attention on Metal, ``attnkit/sparse.h``: the host side.

``metal_plan.py`` says how heads and keys are cut into threadgroups; tokens whose keys are split have a second launch,
which merges them. ``Output`` says what is stored: dense results (``sparse_numbers.h``) or FP4 (``sparse_codes.h``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torch_attnkit.core.target import Target
from torch_attnkit.formats import kv_cache
from torch_attnkit.formats.scale_layout import padded_shape
from torch_attnkit.kernels.fp4.problem import BLOCK
from torch_attnkit.mps import launch as metal
from torch_attnkit.mps import library
from torch_attnkit.mps.cores import cores_of

from .metal_plan import Cut, plan
from .problem import DenseResults, Fp4Results, Operands, Problem

DTYPES = "bf16 f16 f32"
# Head sizes: multiples of the 128 columns that a simdgroup has.
DIMS = (128, 256, 512)
MOST = 1 << 30  # of windows and lists: sums of two stay in 32 bits
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


def launcher(
    source: str, problem: Problem, layout: Layout, output: Output, target: Target
) -> Callable[[Operands], None]:
    """What solves ``problem`` with the kernels of ``csrc/metal/<source>.metal``."""
    p = problem
    if p.tokens * p.heads == 0:
        return lambda operands: None
    fp, cores = kv_cache.FORMATS.index(p.format), cores_of(target)
    stand_in = torch.empty(16, dtype=torch.uint8, device=p.device)  # for tensors that a call does not have
    no_number, no_float = stand_in.view(p.dtype), stand_in.view(torch.float32)
    no_parts = no_number, no_float, no_float

    def variant(width: int) -> metal.Launch:
        cut = plan(p, cores)
        while True:
            built = library.load(
                source, target, TYPE=p.dtype, DIM=p.dim, HEADS=cut.heads, SLICE=cut.slice, KEYS=cut.keys, WIDTH=width,
                LISTED=p.has_list, NEAR_PAGED=p.near_paged, FAR_PAGED=p.far_paged, FORMAT=fp,
                ROPE=p.rope_dim if fp else 0, DIVIDED=p.divided, **output.defines(),
            )  # fmt: skip
            simds, limit = cut.simdgroups(p.dim), metal.most_simdgroups(built, "sparse_rows")
            if simds <= limit:
                break
            if cut.heads == 8:
                raise RuntimeError(f"{source}: the pipeline runs {limit} simdgroups, 8 heads need {simds}")
            cut = plan(p, cores, max(8, cut.heads // 2))
        rest = p.tokens - cut.whole
        grid = cut.groups, cut.whole + rest * cut.splits, 1
        attend = metal.launcher(built, "sparse_rows", grid, simds * metal.SIMD)
        scalars = _shape(p, layout, cut), p.factor
        if rest == 0:

            def whole(args: metal.Arguments) -> None:
                inputs, _, out = args
                attend((*inputs, *scalars, *no_parts, *out))

            return whole
        rows, d = rest * p.heads, p.dim
        simds = min(_MERGE_SIMDGROUPS, metal.most_simdgroups(built, "sparse_merge"))
        items = rows * -(-d // output.span)
        merge = metal.launcher(built, "sparse_merge", (-(-items // simds), 1, 1), simds * metal.SIMD)
        merged = [cut.splits, rows, cut.whole * p.heads, p.heads, int(p.has_sink), int(p.normalize)]

        def split(args: metal.Arguments) -> None:
            inputs, sink, out = args
            parts = torch.empty(cut.splits, rows, d, dtype=p.dtype, device=p.device)
            peaks, sums = torch.empty(2, cut.splits, rows, dtype=torch.float32, device=p.device)
            attend((*inputs, *scalars, parts, peaks, sums, *out))
            merge((parts, peaks, sums, sink, merged, *out))

        return split

    run = metal.by_alignment(variant, (layout.near.first, layout.near.key, layout.far.first, layout.far.key))

    def launch(o: Operands) -> None:
        out = output.bound(o.results)
        near = metal.bound(o.near, stand_in if fp else no_number)
        far, sink = metal.bound(o.far, near), metal.bound(o.sink, no_float)
        divisor = metal.bound(o.global_scale, no_float)
        indices, length, request, near_table, far_table = (
            metal.bound(t, o.end) for t in (o.indices, o.length, o.request, o.near_table, o.far_table)
        )
        inputs = (o.q, near, o.end, far, indices, length, request, sink, near_table, far_table, divisor)
        run((near, far), (inputs, sink, out))

    return launch


def _shape(p: Problem, layout: Layout, cut: Cut) -> list[int]:
    """SparseShape of the kernels."""
    entries, capacity = (n if p.requests else 0 for n in (p.entries, p.capacity))
    return [
        p.heads, p.requests, max(1, p.tokens // max(1, p.requests)), capacity, min(p.window, MOST), entries,
        min(p.listed, MOST), layout.list_row, layout.q_token, layout.q_head, cut.whole, p.tokens - cut.whole,
        cut.splits, int(p.has_length), int(p.has_requests), int(p.has_sink), int(p.normalize), *layout.near.shape,
        *layout.far.shape,
    ]  # fmt: skip


class Output(Protocol):
    """One kind of results."""

    span: int  # elements of a row that a simdgroup merges

    def defines(self) -> dict[str, Any]:
        """What the kernels are compiled with for them."""
        ...

    def bound(self, tensors: DenseResults | Fp4Results) -> metal.Arguments:
        """The last arguments of both kernels."""
        ...


class DenseOutput:
    """``attnkit/sparse_numbers.h``."""

    span = 128

    def defines(self) -> dict[str, Any]:
        return {}

    def bound(self, tensors: DenseResults | Fp4Results) -> metal.Arguments:
        assert isinstance(tensors, DenseResults)
        return tensors.out, tensors.lse, metal.bound(tensors.row_sum, tensors.lse)


@dataclass(frozen=True)
class Fp4Output:
    """``attnkit/sparse_codes.h``. ``cos`` and ``sin`` are steps from token to token, in elements; the scales of a
    ``groups``-th of the heads belong together."""

    problem: Problem
    cos: int
    sin: int
    groups: int

    span = 256

    def defines(self) -> dict[str, Any]:
        fp4 = self.problem.fp4
        assert fp4 is not None
        return dict(
            BLOCK=BLOCK[fp4.format], PAIRS=fp4.pairs, ANGLE_TYPE=fp4.angle_dtype, SWIZZLED=fp4.swizzled, WORDS=True
        )  # fmt: skip

    def bound(self, tensors: DenseResults | Fp4Results) -> metal.Arguments:
        p, fp4 = self.problem, self.problem.fp4
        assert fp4 is not None and isinstance(tensors, Fp4Results)
        heads = p.heads // self.groups
        padded = padded_shape(p.tokens, heads * p.dim // BLOCK[fp4.format])
        # Heads that are not rotated have no angles.
        cos, sin = (t if t.numel() else t.new_empty(1) for t in (tensors.cos, tensors.sin))
        factor = 1.0 if tensors.global_scale is None else tensors.global_scale
        shape = [p.tokens, p.heads, heads, *padded, self.cos, self.sin]
        return tensors.codes, tensors.scale, cos, sin, factor, shape
