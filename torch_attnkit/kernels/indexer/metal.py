"""The indexer on Metal, ``attnkit/indexer.h``: scores, and selection by ``kernels/topk`` behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torch_attnkit.core.target import Target
from torch_attnkit.kernels.topk import metal as topk
from torch_attnkit.kernels.topk import problem as rows
from torch_attnkit.mps import launch as metal
from torch_attnkit.mps import library

from .problem import Operands, Problem, Selection, SelectOperands

# Stored elements of a head by format: 64 or 128, of MXFP4 two in a byte.
DIMS = {"none": (64, 128), "fp8": (64, 128), "mxfp4": (64,)}
KERNEL = "index_scores"
_FORMATS = ("none", "fp8", "mxfp4")
# Type that represents every value of a format exactly: E4M3 has 4 bits and 2^-9 to 448, MXFP4 the exponents of bfloat.
_PRODUCTS = {"fp8": torch.float16, "mxfp4": torch.bfloat16}
_REGISTER_ELEMENTS = 2048  # of a simdgroup's keys, which lanes have in 32 registers each
_SIMDGROUPS = 8
_HEADS = 32  # HEADS of the kernel
_ENOUGH = 512  # threadgroups that keep the largest chips busy: 80 cores with a few each
_MOST_TOKENS = 256  # of a threadgroup, for which it has read its keys once


@dataclass(frozen=True)
class Steps:
    """Strides but the last, in elements; k's are of requests, or pages, and keys."""

    q: tuple[int, ...]
    q_scale: tuple[int, ...]
    weights: int
    k: tuple[int, ...]
    k_scale: tuple[int, ...]
    pages: int
    table_row: int


def blocks_of(dim: int) -> int:
    """Blocks of 8 keys of a simdgroup."""
    return _REGISTER_ELEMENTS // (8 * dim)


def threadgroup_bytes(dim: int) -> int:
    """Threadgroup memory of ``index_scores``: two tiles of queries in 16 bits, weights and scales in float."""
    return 2 * _HEADS * (dim * 2 + 2 * 4)


def share_of(tokens: int, groups: int) -> int:
    """Tokens of a threadgroup, if ``groups`` threadgroups have the keys of all requests."""
    shares = max(-(-tokens // _MOST_TOKENS), min(tokens, _ENOUGH // max(1, groups)), 1)
    return max(1, -(-tokens // shares))


def launcher(
    source: str, problem: Problem, steps: Steps, target: Target, *, defines: dict[str, Any] | None = None
) -> Callable[[Operands], None]:
    """What solves ``problem`` with the kernel of ``csrc/metal/<source>.metal``, specialised by ``defines``, too."""
    p = problem
    if p.tokens * p.entries == 0:
        return lambda operands: None
    each = p.tokens // p.requests
    listed = p.tokens if p.ids else each  # tokens through which a request looks

    def variant(width: int) -> metal.Launch:
        simds = _SIMDGROUPS
        while True:
            built = library.load(
                source, target, FORMAT=_FORMATS.index(p.format), TYPE=_PRODUCTS.get(p.format, p.dtype),
                W_TYPE=p.weights, DIM=p.dim, BLOCKS=blocks_of(p.dim), SIMDS=simds, WIDTH=width, PAGED=p.paged,
                NAMED=p.ids, Q_SCALED=p.format == "fp8" and p.q_scale, **(defines or {}),
            )  # fmt: skip
            limit = metal.most_simdgroups(built, KERNEL)
            if simds <= limit:
                break
            simds = limit
        blocks = -(-p.entries // (simds * 8 * blocks_of(p.dim)))
        share = share_of(listed, blocks * p.requests)
        shape = [
            p.tokens, p.requests, p.entries, p.heads, each, share, *steps.q, *steps.q_scale, steps.weights, *steps.k,
            *steps.k_scale, p.page, steps.pages, steps.table_row,
        ]  # fmt: skip
        grid = (blocks, p.requests, -(-listed // share))
        run = metal.launcher(built, KERNEL, grid, simds * metal.SIMD)
        return lambda args: run((*args, shape))

    run = metal.by_alignment(variant, (*steps.q, *steps.k))

    def launch(o: Operands) -> None:
        q, k = _bytes(o.q), metal.bound(_bytes(o.k), _bytes(o.q))
        scale = o.k_scale if o.q_scale is None else o.q_scale
        given = o.scores if scale is None else scale
        ids, table = metal.bound(o.ids, o.k_len), metal.bound(o.table, o.k_len)
        q_scale, k_scale = metal.bound(o.q_scale, given), metal.bound(o.k_scale, given)
        run((q, k), (q, k, o.weights, o.k_len, ids, table, q_scale, k_scale, o.scores))

    return launch


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """E4M3 as bytes, which every torch can pass on."""
    return t if t.dtype.itemsize > 1 else t.view(torch.uint8)


def select_launcher(source: str, problem: Selection, steps: Steps, target: Target) -> Callable[[SelectOperands], None]:
    """What solves ``problem`` with the kernels of ``csrc/metal/<source>.metal``."""
    p = problem.scores
    score = launcher(source, p, steps, target, defines=dict(CHOOSES=False))
    row = rows.Problem(p.device, torch.float32, p.tokens, p.entries, problem.topk, p.entries, ragged=True)
    choose = topk.launcher(source, row, target, defines=dict(CHOOSES=True))

    def launch(o: SelectOperands) -> None:
        made = torch.empty(p.tokens, p.entries, dtype=torch.float32, device=o.indices.device)  # (T, S)
        score(o.given._replace(scores=made))
        choose(rows.Operands(made, o.given.k_len, o.indices))

    return launch
