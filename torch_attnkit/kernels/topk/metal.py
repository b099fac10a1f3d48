"""Top-k on Metal, ``attnkit/topk.h``: how rows are cut into threadgroups.

A row that the registers of a threadgroup hold is read once. A longer one is cut into parts that they hold: a launch
leaves the K best of each, another one chooses among these, in parts again if there are many. Where the K best would be
most of a part, one threadgroup reads the row anew for every pass.
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
_HELD = metal.SIMD * _MOST_SIMDGROUPS * KEPT  # scores that the registers of a threadgroup hold
_LEAST_PART = 2048  # scores, a simdgroup or more: less than that is not worth a launch
_ENOUGH = 128  # threadgroups that keep the largest chips busy: 80 cores with one or two each
_SHRINKS = 8  # of so many entries of a row one is left on a list, or fewer
_STREAMING = 32  # simdgroups of a row that is read anew for every pass


def simdgroups(entries: int, most: int) -> int:
    """Of a threadgroup whose registers shall hold so many scores, if they can; a power of two."""
    wanted = -(-entries // (metal.SIMD * KEPT))
    return min(max(_LEAST_SIMDGROUPS, 1 << max(0, wanted - 1).bit_length()), most)


def part_of(entries: int, rows: int, topk: int) -> int:
    """Entries of a threadgroup: all, unless parts that registers hold leave much fewer to choose among."""
    shrinks = lambda part: -(-entries // part) * topk * _SHRINKS <= entries
    part = _HELD
    while part > _LEAST_PART and rows * -(-entries // part) < _ENOUGH and shrinks(part // 2):
        part //= 2
    return part if entries > _HELD and shrinks(part) else entries


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

    entries = p.entries
    stages: list[tuple[metal.Launch, list[int], int]] = []
    while (part := part_of(entries, p.rows, p.topk)) < entries:
        stages.append(stage(entries, part, listed=bool(stages)))
        entries = stages[-1][2] * p.topk
    stages.append(stage(entries, entries, listed=bool(stages)))

    def launch(o: Operands) -> None:
        length, found = metal.bound(o.length, o.indices), o.indices
        for i, (choose, shape, parts) in enumerate(stages):
            out = o.indices
            if i < len(stages) - 1:
                out = torch.empty(p.rows, parts * p.topk, dtype=torch.int32, device=out.device)  # (T, parts * K)
            choose((o.scores, length, found, out, shape))
            found = out

    return launch
