"""Top-k on Metal, ``attnkit/topk.h``: how rows are cut into threadgroups.

A row that the registers of a threadgroup hold is read once. A longer one is cut into parts that they hold: a first
launch leaves the K best of each, a second one chooses among these. Where the K best are most of a part, or a part would
be most of the row, one threadgroup reads the row anew for every pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core.target import Target
from torch_attnkit.mps import launch as metal
from torch_attnkit.mps import library

from .problem import Operands, Problem

DTYPES = "bf16 f16 f32"
KERNEL = "topk_rows"
KEPT = 16  # scores of a thread that its registers hold beside what it computes with
_LEAST_SIMDGROUPS, _MOST_SIMDGROUPS = 4, 32  # powers of two: threads that share 2048 counters evenly
_SHRINKS = 4  # a list of the best of all parts is at most this part of the row
_STREAMING = 32  # simdgroups of a row that is read anew for every pass


def simdgroups(entries: int, most: int) -> int:
    """Of a threadgroup whose registers shall hold so many scores, if they can; a power of two."""
    wanted = -(-entries // (metal.SIMD * KEPT))
    return min(max(_LEAST_SIMDGROUPS, 1 << max(0, wanted - 1).bit_length()), most)


def power_below(n: int) -> int:
    """The largest power of two up to n, which is at least 1."""
    return 1 << (n.bit_length() - 1)


def _nothing(operands: Operands) -> None:
    operands.indices.fill_(-1)


def launcher(
    source: str, problem: Problem, target: Target, *, defines: dict[str, Any] | None = None
) -> Callable[[Operands], None]:
    """What solves ``problem`` with the kernel of ``csrc/metal/<source>.metal``, specialised by ``defines``, too."""
    p = problem
    if p.rows == 0:
        return lambda operands: None
    if p.entries == 0:
        return _nothing

    def stage(entries: int, part: int, listed: bool) -> tuple[metal.Launch, list[int], int]:
        """A launch over ``entries`` of each row in parts of ``part``, its sizes, and the number of parts."""
        most = _MOST_SIMDGROUPS
        while True:
            simds = simdgroups(part, most)
            kept = -(-part // (metal.SIMD * simds))
            kept = 0 if kept > KEPT else max(kept, 1)
            simds = simds if kept else min(_STREAMING, most)
            built = library.load(
                source, target, TYPE=p.dtype, SIMDS=simds, KEPT=kept, LISTED=listed, RAGGED=p.ragged,
                **(defines or {}),
            )  # fmt: skip
            limit = power_below(metal.most_simdgroups(built, KERNEL))
            if simds <= limit:
                break
            most = limit
        parts = max(1, -(-entries // max(part, 1)))
        shape = [entries, p.topk, part, p.step, p.entries]
        return metal.launcher(built, KERNEL, (p.rows, parts, 1), simds * metal.SIMD), shape, parts

    part = metal.SIMD * KEPT * _MOST_SIMDGROUPS
    parts = -(-p.entries // part)
    if parts * p.topk * _SHRINKS > p.entries:
        part = max(p.entries, 1)  # one part: the row
    first, shape, parts = stage(p.entries, part, listed=False)
    if parts == 1:

        def whole(o: Operands) -> None:
            length = metal.bound(o.length, o.indices)
            first((o.scores, length, o.indices, o.indices, shape))

        return whole
    listed = parts * p.topk
    second, second_shape, _ = stage(listed, listed, listed=True)

    def launch(o: Operands) -> None:
        length = metal.bound(o.length, o.indices)
        best = torch.empty(p.rows, listed, dtype=torch.int32, device=o.indices.device)  # (T, parts * K)
        first((o.scores, length, o.indices, best, shape))
        second((o.scores, length, best, o.indices, second_shape))

    return launch
