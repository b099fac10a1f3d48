"""Routing on Metal: a simdgroup has a token, or of a table as many lanes as name its experts. One launch a call."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_attnkit.core.target import Target
from torch_attnkit.mps import launch as metal
from torch_attnkit.mps import library
from torch_attnkit.mps.cells import launch_of_threads

from .problem import Operands, Problem, TableOperands, TableProblem

_MOST_KEPT = 32  # keys of a lane that stay in registers: 1024 experts


def launcher(source: str, problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` with ``csrc/metal/<source>.metal``."""
    p = problem
    if p.rows == 0:
        return lambda operands: None
    kept = -(-p.experts // metal.SIMD)
    built = library.load(
        source, target, TYPE=p.dtype, TOPK=p.topk, KEPT=kept if kept <= _MOST_KEPT else 0,
        SOFTMAX=p.scoring == "softmax", BIAS=p.bias, OVER_ALL=p.over_all, RENORMALIZE=p.renormalize,
    )  # fmt: skip
    run = launch_of_threads(built, "route_rows", p.rows * metal.SIMD)
    shape = [p.rows, p.experts, p.step]

    def launch(o: Operands) -> None:
        run((o.logits, metal.bound(o.bias, o.weights), o.weights, o.indices, shape, o.scale))

    return launch


def table_launcher(source: str, problem: TableProblem, target: Target) -> Callable[[TableOperands], None]:
    """What solves ``problem`` with ``csrc/metal/<source>.metal``."""
    p = problem
    if p.rows == 0:
        return lambda operands: None
    lanes = min(metal.SIMD, 1 << (p.topk - 1).bit_length())
    built = library.load(
        source, target, TYPE=p.dtype, WIDE_IDS=p.id_dtype == torch.int64, WIDE_TABLE=p.table_dtype == torch.int64,
        TOPK=p.topk, LANES=lanes, RENORMALIZE=p.renormalize,
    )  # fmt: skip
    run = launch_of_threads(built, "route_table", p.rows * lanes)

    def launch(o: TableOperands) -> None:
        if o.logits.numel() == 0 or o.table.numel() == 0:  # no expert exists, and what has no memory cannot be bound
            o.weights.zero_()
            o.indices.zero_()
            return
        shape = [p.rows, o.logits.shape[1], len(o.table), o.logits.stride(0), o.table.stride(0)]
        run((o.logits, o.token_ids, o.table, o.weights, o.indices, shape, o.scale))

    return launch
