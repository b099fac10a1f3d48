"""merge_partials on Metal: a simdgroup for every 128 elements of an output row. Bound by memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch_attnkit.core.op import Call
from torch_attnkit.core.target import Target
from torch_attnkit.mps import launch as metal
from torch_attnkit.mps import library

_SPAN = 128  # elements of a simdgroup, MERGE_SPAN of the kernel
_SIMDGROUPS = 4
_COLUMNS = 1 << 24  # threadgroups along x: with 128 threads each half of what a grid can count


def _nothing(*args: Any) -> None:
    *_, out, lse = args
    out.zero_()
    lse.fill_(-math.inf)


def build(call: Call, target: Target) -> Callable[..., None]:
    parts, lses, sums = call.arg.out_partial, call.arg.lse_partial, call.arg.row_sum
    P, R, H, Dv = (call.dim[a] for a in ("P", "R", "H", "Dv"))
    spans = max(-(-Dv // _SPAN), 1)
    if R * H == 0:
        return lambda *args: None
    if P == 0:
        return _nothing
    shape = [
        P, R, H, Dv, spans, *parts.stride()[:3], *lses.stride()[:2],
        *((-1, 0) if sums is None else sums.stride()[:2]), int(call.arg.sink is not None),
    ]  # fmt: skip
    items = R * H * spans

    def variant(width: int) -> metal.Launch:
        dtype = call.arg.dtype or call.dtype
        built = library.load(call.op, target, IN_TYPE=call.dtype, OUT_TYPE=dtype, WIDTH=width)
        simds = min(_SIMDGROUPS, metal.most_simdgroups(built, call.op))
        groups = -(-items // simds)
        columns = min(groups, _COLUMNS)
        return metal.launcher(built, call.op, (columns, -(-groups // columns), 1), simds * metal.SIMD)

    run = metal.by_alignment(variant, (Dv, *parts.stride()[:3]))

    def launch(parts: Any, lses: Any, sink: Any, sums: Any, dtype: Any, out: Any, lse: Any) -> None:
        run((parts, out), (parts, lses, metal.bound(sink, lse), metal.bound(sums, lse), out, lse, shape))

    return launch
