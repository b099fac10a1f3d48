"""Grouped products on Metal: which kernels take a call, their tiles, the workspace, the launches.

Few tokens: up, down, combine (``attnkit/few_tokens.h``); every threadgroup finds an expert's slots by itself.
Many tokens: sort, x rounded if it is to be, up, down, combine (``attnkit/many_tokens.h``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torch_attnkit.core import invariance, memory
from torch_attnkit.core.target import Target
from torch_attnkit.mps import launch as metal
from torch_attnkit.mps import library

from .problem import BLOCK, Operands, Problem, Weights

DTYPES = "bf16 f16 f32"
_ACTIVATIONS = {"none": 0, "nvfp4": 1, "mxfp4": 2, "mxfp8": 3}
_LINEAR, _CONTIGUOUS, _PADDED = range(3)  # SCALES of the kernels

# Few tokens. Passes of 8 simdgroups over a tile, up and down: tiles of 64 features and 96 rows for one token, which is
# then 3 to 4 percent of the bytes that a tile reads of weights, and GPT-OSS has 45 x 4 and 30 x 4 threadgroups for 40
# cores; more tokens meet more experts, and tiles are 96 features and 160 rows. Counted, bytes / least possible of
# GPT-OSS-20B with 4 tokens: 1.060 with the smaller tiles.
_FEW_TOKENS = 16
_FEWEST = 4  # tokens that few_tokens.h takes whatever they share
_FEW_SLOTS = 512  # MOST_SLOTS of the kernels
_PASSES, _PASSES_SHARED = (4, 3), (6, 5)
_SIMDGROUPS = (8, 4)
_ROWS = 4  # of a simdgroup at a time
_STEP = 1024  # numbers of a row that a simdgroup takes in a step
_STAGE_BYTES = 24576  # of tokens in threadgroup memory; 32 KB are a threadgroup's, and sums and slots take up to 4
_COMBINE = 256  # threads of experts_combine and experts_round
# Many tokens: tiles of 32, or of 16 where experts have fewer than 32 on average.
_TILE_ROWS, _TILE_FEATURES = 128, 64
_MANY_SIMDGROUPS = 4


def launcher(source: str, problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` with ``csrc/metal/<source>.metal``."""
    p = problem
    if p.tokens == 0 or p.hidden == 0:
        return lambda operands: None
    if p.slots == 0 or p.experts == 0:
        return lambda operands: _nothing(operands)
    solve = (_few if few(p) else _many)(source, p, target)

    def launch(o: Operands) -> None:
        solve(o, _shape(p, o), _alignment(p, o))

    return launch


def few(p: Problem) -> bool:
    """Whether weights are read once for up to four tokens of an expert, not once for a tile of them."""
    if invariance.is_on():
        return False
    return p.slots <= _FEW_SLOTS and (p.tokens <= _FEWEST or p.tokens <= _FEW_TOKENS and p.slots <= 8 * p.experts)


def _nothing(operands: Operands) -> None:
    """The result where no token has a choice."""
    operands.out.zero_()


def _defines(p: Problem, codes: int) -> dict[str, Any]:
    """What all kernels of a problem share; ``codes``: alignment of rows of codes in bytes."""
    padded = any(w.scale_row != w.scale_columns for w in (p.up, p.down))
    scales = _LINEAR if p.scale_layout == "linear" else _PADDED if padded else _CONTIGUOUS
    return dict(
        TYPE=p.dtype, SEEN=seen(p), INDEX_BYTES=p.index_dtype.itemsize, BLOCK=BLOCK[p.format],
        ACT=_ACTIVATIONS[p.activations], GPTOSS=p.swiglu == "gptoss", INTERLEAVED=p.interleaved, SCALES=scales,
        CODES=codes,
    )  # fmt: skip


def seen(p: Problem) -> torch.dtype:
    """What products see of tokens. A rounded activation has at most six significant bits."""
    return p.dtype if p.activations == "none" else torch.bfloat16


def _alignment(p: Problem, o: Operands) -> int:
    """Bytes at whose multiples all rows of codes begin and end, as far as the kernels care: 16, 8 or 1."""
    steps = [n for w in (p.up, p.down) for n in (w.expert, w.row, w.columns // 2)]
    shared = math.gcd(16, *steps, o.w13.storage_offset(), o.w2.storage_offset())
    return shared if shared in (8, 16) else 1


def _shape(p: Problem, o: Operands) -> list[int]:
    """ExpertShape of the kernels."""
    return [
        p.tokens, p.top_k, p.experts, p.hidden, p.intermediate, o.x.stride(0), o.weights.stride(0), *o.indices.stride(),
        *_weights(p.up, o.bias13, o.w13_global, o.x_global), *_weights(p.down, o.bias2, o.w2_global, o.h_global),
    ]  # fmt: skip


def _weights(
    w: Weights, bias: torch.Tensor | None, divisor: torch.Tensor | None, activation: torch.Tensor | None
) -> tuple[int, ...]:
    """ExpertWeights of the kernels."""
    step = -1 if bias is None else bias.stride(0)
    flags = int(divisor is not None), int(activation is not None)
    return w.expert, w.row, w.scale_expert, w.scale_row, w.scale_columns, step, *flags


class _Given(NamedTuple):
    """Arguments that follow each other: codes, scales, their global number, biases, the global numbers of tokens."""

    up: tuple[torch.Tensor, ...]
    down: tuple[torch.Tensor, ...]


def _given(o: Operands) -> _Given:
    h_global = _one(o, o.h_global)
    up = _matrices(o, o.w13, o.w13_scale, o.w13_global, o.bias13)
    down = _matrices(o, o.w2, o.w2_scale, o.w2_global, o.bias2)
    return _Given((*up, _one(o, o.x_global), h_global), (*down, h_global))


def _matrices(
    o: Operands, codes: torch.Tensor, scale: torch.Tensor, divisor: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """``weights`` and ``x`` stand in for what is missing: a kernel never looks there."""
    scale_bytes = scale if scale.dtype is torch.uint8 else scale.view(torch.uint8)
    floats = metal.bound(divisor, o.weights)
    return metal.bound(codes, o.weights), metal.bound(scale_bytes, o.weights), floats, metal.bound(bias, o.x)


def _one(o: Operands, number: torch.Tensor | None) -> torch.Tensor:
    """A number in a tensor of one axis: without axes it would be bound as its value."""
    return o.weights if number is None else number.view(1)


Solve = Callable[[Operands, list[int], int], None]


def _combiner(built: library.Library, p: Problem) -> metal.Launch:
    return metal.launcher(built, "experts_combine", (-(-p.hidden // _COMBINE), p.tokens, 1), _COMBINE)


def few_stage(p: Problem, tokens: int) -> int:
    """Numbers of a token that a threadgroup holds, of ``tokens`` tokens at once."""
    steps = _STAGE_BYTES // (tokens * seen(p).itemsize * _STEP)
    return max(1, min(steps, -(-max(p.hidden, p.intermediate) // _STEP))) * _STEP


def _few(source: str, p: Problem, target: Target) -> Solve:
    tokens = 1 if p.tokens == 1 else 2 if p.tokens == 2 else 4
    kernels = ("experts_few_up", "experts_few_down")

    def build(codes: int) -> tuple[metal.Launch, ...]:
        for simds in _SIMDGROUPS:
            up, down = (n * _SIMDGROUPS[0] // simds for n in (_PASSES if tokens == 1 else _PASSES_SHARED))
            built = library.load(
                source, target, **_defines(p, codes), MANY=0, TOKENS=tokens, STAGE=few_stage(p, tokens),
                SIMDS=simds, UP_PASSES=up, DOWN_PASSES=down, MOST_SLOTS=_FEW_SLOTS,
            )  # fmt: skip
            if simds <= min(metal.most_simdgroups(built, kernel) for kernel in kernels):
                break
        features, rows = up * simds * _ROWS // 2, down * simds * _ROWS
        tiles = -(-p.intermediate // features), -(-p.hidden // rows)
        grids = ((n, p.slots, 1) for n in tiles)
        products = (metal.launcher(built, k, g, simds * metal.SIMD) for k, g in zip(kernels, grids, strict=True))
        return *products, _combiner(built, p)

    variants: dict[int, tuple[metal.Launch, ...]] = {}

    def solve(o: Operands, shape: list[int], codes: int) -> None:
        if codes not in variants:
            variants[codes] = build(codes)
        up, down, combine = variants[codes]
        given = _given(o)
        h = memory.empty((p.slots, max(p.intermediate, 1)), dtype=seen(p), device=o.x.device)
        parts = memory.empty((p.slots, p.hidden), dtype=torch.float32, device=o.x.device)
        up((o.x, o.indices, *given.up, h, shape, *_scalars(p)))
        down((h, o.weights, o.indices, *given.down, parts, shape))
        combine((o.indices, parts, o.out, shape))

    return solve


def tile_tokens(p: Problem) -> int:
    return 32 if p.slots >= 32 * p.experts and not invariance.is_on() else 16


def _many(source: str, p: Problem, target: Target) -> Solve:
    tokens = tile_tokens(p)
    tiles = p.slots // tokens + p.experts
    rounds = p.activations != "none"

    def build(codes: int, width: int) -> tuple[metal.Launch, ...]:
        built = library.load(
            source, target, **_defines(p, codes), MANY=1, TILE_TOKENS=tokens, WIDTH=width,
        )  # fmt: skip
        threads = _MANY_SIMDGROUPS * metal.SIMD
        grids = {
            "experts_sort": (-(-p.experts // _MANY_SIMDGROUPS), 1, 1),
            "experts_many_up": (-(-p.intermediate // _TILE_FEATURES), tiles, 1),
            "experts_many_down": (-(-p.hidden // _TILE_ROWS), tiles, 1),
        }
        sort, up, down = (metal.launcher(built, kernel, grid, threads) for kernel, grid in grids.items())
        rounder = metal.launcher(built, "experts_round", (-(-p.hidden // _COMBINE), p.tokens, 1), _COMBINE)
        return sort, rounder, up, down, _combiner(built, p)

    variants: dict[tuple[int, int], tuple[metal.Launch, ...]] = {}

    def solve(o: Operands, shape: list[int], codes: int) -> None:
        even = rounds or (o.x.stride(0) % metal.VECTOR == 0 and o.x.storage_offset() % metal.VECTOR == 0)
        key = codes, metal.VECTOR if even else 1
        if key not in variants:
            variants[key] = build(*key)
        sort, rounder, up, down, combine = variants[key]
        given, empty = _given(o), lambda dtype, *sizes: memory.empty(sizes, dtype=dtype, device=o.x.device)
        order, table = empty(torch.int32, p.slots), empty(torch.int32, tiles, 4)
        h, parts = empty(seen(p), p.slots, max(p.intermediate, 1)), empty(torch.float32, p.slots, p.hidden)
        sort((o.indices, order, table, shape))
        x = o.x
        if rounds:
            x = empty(seen(p), p.tokens, p.hidden)
            rounder((o.x, given.up[4], x, shape))
        up((x, order, table, *given.up, h, shape, *_scalars(p)))
        down((h, order, table, o.weights, *given.down, parts, shape))
        combine((o.indices, parts, o.out, shape))

    return solve


def _scalars(p: Problem) -> tuple[float, float]:
    return float(p.alpha), math.inf if p.limit is None else float(p.limit)
