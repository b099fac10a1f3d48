"""Tile shapes, grids and workspace of the routed experts on Hopper."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from torch_attnkit.core import invariance
from torch_attnkit.core.spec import short

from ..problem import ALIGNMENT, BLOCK, BULK_ROWS, SPAN, STRADDLING, WARP_SLOTS, Problem, Weights, experts_compiled
from .config import BOX, BOXES, CODE_ALIGNMENT, CONSUMERS, MOST_BLOCKS, MOST_COLUMNS, SHARED, WARP_ROWS, WIDTHS, Config

_LEAST_STAGES = 3  # of a ring whose warps multiply slices of K
# Tokens of a work tile, in units of an expert's mean. H200, 256 MXFP4 experts of 4096 x 2048, top 6: 256 tokens take
# 1020 us with 1.5 and 1031 with 1, 512 take 1310 and 1299.
_HEADROOM = 1.5
# Stages of weights that the start of a work tile costs as much time as. H200, 29 shapes and numbers of tokens of five
# models with rows of 128, 64 and 32: in the mean 0.1 % over the fastest, at most 3 % (docs/lab/grouped_gemm.md).
_START = 0.45
# Work tiles of a CTA, up to which both GEMMs by mma.sync are one launch: one start and one end less. H200, MXFP4
# experts of 2880 x 2880, top 4, us of two launches and of one: 32 experts, 25 work tiles, 64 tokens 166 and 157; 128
# experts, 82 work tiles, 64 tokens 426 and 405, 99 work tiles, 256 tokens 567 and 586.
_ONE_LAUNCH = 85
# Tokens of an expert, from which on products are by wgmma. H200, us by mma.sync and by wgmma: 128 MXFP4 experts of 2880
# x 2880 with 8 tokens each 579, 677, with 16 774, 717; 256 of 4096 x 2048 with 6 tokens 1031, 1253, with 12 1281, 1268.
_MANY = 12
# The same where K of the second GEMM is one stage of mma.sync, as many ends of work tiles as stages. H200, 512 NVFP4
# experts of 2048 x 512, top 10, with 5 tokens each 375 and 417, with 7.5 426 and 421, with 10 470 and 431.
_MANY_SHORT = 7.5
# Tokens that work tiles of wgmma have, steps over K in a group, and warps that multiply. Narrow work tiles are as fast
# as codes are decoded, which more warps do better. H200, 128 MXFP4 experts of 2880 x 2880, top 4, 64 tokens each: 1141
# us with 12 warps, narrow or middling, for 1197 and 1171 with 8, and 256 tokens each: 2892 with halves for 3078 with
# wide; 256 MXFP4 experts of 4096 x 2048, top 6, 192 tokens each, with 8: 4672 us for 4794 from 160 on.
_SLIM = (16, 24, 32, 64), 2, 12
_NARROW = (32, 48, 64, 80), 2, 12
_MIDDLING = (80, 96, 112, 128, 144), 1, 12
_HALVES = (96, 120, 128, 136, 144), 1, 12
_WIDE = (96, 128, 144, 160, 176, 192, 208, 224, 240), 1, 8
# By the most tokens that an expert has in the mean. One of more than 240 tokens has two work tiles of 120 and more.
_WGMMA = ((20, _SLIM), (64, _NARROW), (128, _MIDDLING), (240, _WIDE), (288, _HALVES), (math.inf, _WIDE))


@dataclass(frozen=True)
class Plan:
    """By ``mma.sync`` for few tokens an expert; by ``wgmma`` for many, for which x is sorted by expert first."""

    token_widths: tuple[int, ...]  # of ``wgmma``; none by ``mma.sync``
    group: int  # as in ``WgmmaConfig``
    columns: int  # most tokens of a work tile
    experts: int  # at least so many
    tiles: int  # at most, of tokens
    blocks: tuple[int, ...]  # of the launches whose number of blocks is free
    counters: tuple[int, int]
    x_rows: tuple[int, int]  # shape of x as the first GEMM wants it, and so on
    h_rows: tuple[int, int]
    row_warps: int
    by_warp: bool  # slots are so few that every block sorts them for itself
    one_launch: bool  # for both GEMMs; always if ``by_warp``
    scale_vectors: tuple[int, int]
    code_alignment: int  # as in ``Config``

    @property
    def scale_alignments(self) -> tuple[int, int]:
        up, down = (ALIGNMENT.get(vector, vector) for vector in self.scale_vectors)
        return up, down


def plan(problem: Problem, sms: int) -> Plan:
    p = problem
    mean = p.slots / p.experts
    # Numbers of float16 that are not quantised are sums of two of bf16, which only ``mma.sync`` takes.
    many = _MANY_SHORT if p.intermediate <= BOXES * BOX and p.activations == "none" else _MANY
    fixed = invariance.is_on()  # one kernel for any number of tokens, and one order in which K is added up
    if not fixed and mean >= many and p.intermediate > 0 and (p.dtype is torch.bfloat16 or p.activations != "none"):
        widths, group, warps = next(kind for most, kind in _WGMMA if mean <= most)
        return _by_wgmma(p, widths, group, warps, sms)
    return by_mma(p, sms, SHARED)


def by_mma(problem: Problem, sms: int, shared: int, bulk: bool = True) -> Plan:
    """By ``mma.sync``, however many tokens there are; ``shared`` as in ``Config``. ``bulk``: whether there are bulk
    copies, and both GEMMs may be one launch."""
    p = problem
    mean = p.slots / p.experts
    wanted = min(p.tokens, _HEADROOM * mean)
    columns = next((8 * w for w in WIDTHS if 8 * w >= wanted), MOST_COLUMNS)
    while _config(p, CONSUMERS, columns, shared).stages < 2:
        columns //= 2
    tiles = p.slots // columns + min(p.experts, p.slots)
    row_warps = CONSUMERS if invariance.is_on() else _row_warps(p, columns, tiles, sms, shared)
    c = _config(p, row_warps, columns, shared)
    up_tiles, down_tiles = (-(-w.rows // c.rows) for w in (p.up, p.down))
    x_columns, h_columns = (-(-w.columns // c.stage) * c.stage for w in (p.up, p.down))
    spans = p.tokens * x_columns // SPAN
    by_warp = bulk and p.slots <= WARP_SLOTS
    one_launch = by_warp or bulk and tiles * (up_tiles + down_tiles) <= _ONE_LAUNCH * sms
    return Plan(
        token_widths=(),
        group=0,
        columns=columns,
        experts=experts_compiled(p.experts),
        tiles=tiles,
        blocks=(
            (not by_warp) + min(max(sms - 1, 1), -(-max(spans, p.slots) // 64)),
            min(sms, tiles * max(up_tiles, down_tiles)),
        ),
        counters=(p.tokens + 1, max(down_tiles, 2)),
        x_rows=(p.tokens * c.parts, x_columns),
        h_rows=(p.slots * c.parts, h_columns),
        row_warps=row_warps,
        by_warp=by_warp,
        one_launch=one_launch,
        scale_vectors=_few_vectors(p, c) if bulk else (_vector(p, p.up, False), _vector(p, p.down, False)),
        code_alignment=c.code_alignment,
    )


def _by_wgmma(p: Problem, widths: tuple[int, ...], group: int, warps: int, sms: int) -> Plan:
    columns = widths[-1]
    tiles = p.slots // columns + min(p.experts, p.slots)
    units = (tiles * -(-w.rows // (WARP_ROWS * warps)) for w in (p.up, p.down))
    x_spans, h_spans = -(-p.hidden // SPAN), -(-p.intermediate // SPAN)
    return Plan(
        token_widths=widths,
        group=group,
        columns=columns,
        experts=experts_compiled(p.experts),
        tiles=tiles,
        blocks=(min(sms, -(-p.tokens * x_spans // 256)), *(min(sms, most) for most in units)),
        counters=(1, 3 + p.experts),
        x_rows=(p.slots, x_spans * SPAN),
        h_rows=(p.slots, h_spans * SPAN),
        row_warps=warps,
        by_warp=False,
        one_launch=False,
        scale_vectors=(_vector(p, p.up, True), _vector(p, p.down, True)),
        code_alignment=_code_alignment(p),
    )


def _config(p: Problem, row_warps: int, columns: int, shared: int) -> Config:
    """Of the first GEMM, which needs more shared memory beside its stages."""
    return Config(
        p.format, row_warps, short(p.dtype), p.activations, columns, True, 1, _code_alignment(p), shared=shared
    )


def _code_alignment(p: Problem) -> int:
    """8 if a row of NVFP4 has an odd number of blocks: it ends, and mostly the next one starts, amid 16 bytes."""
    steps = (step for w in (p.up, p.down) for step in (w.columns // 2, w.row, w.expert))
    return math.gcd(CODE_ALIGNMENT, *steps)


def _row_warps(p: Problem, columns: int, tiles: int, sms: int, shared: int) -> int:
    """Rows of a work tile: few of them are enough work tiles for all multiprocessors, but have longer stages, which K
    fills less well, and more starts. Blocks take work tiles one by one, those of the second GEMM last."""

    def stages(warps: int) -> float:
        """How many the busiest block has, of both GEMMs."""
        c = _config(p, warps, columns, shared)
        waves = lambda w: -(-tiles * -(-w.rows // c.rows) // sms)
        return sum(waves(w) * (-(-w.columns // c.stage) + _START) for w in (p.up, p.down))

    # A work tile of the first GEMM has whole blocks of features, where they are rounded. Many tokens leave no room
    # for stages of few rows.
    fewer = (4,) if p.activations != "none" else (4, 2)
    some = [warps for warps in fewer if _config(p, warps, columns, shared).stages >= _LEAST_STAGES]
    return min((CONSUMERS, *some), key=stages)


def _vector(p: Problem, weights: Weights, many: bool) -> int:
    """Bytes of scales that start and end where a load of so many can: 16, 8, 4, 2 or 1, or STRADDLING."""
    if p.scale_layout != "linear":
        return math.gcd(4, weights.scale_row, weights.scale_expert)
    blocks = weights.columns // BLOCK[p.format]
    vector = math.gcd(BOX // BLOCK[p.format] if many else 16, blocks, weights.scale_row, weights.scale_expert)
    dense = weights.scale_row == blocks and weights.scale_expert == blocks * weights.rows
    return STRADDLING if vector == 2 and dense and weights.rows % 2 == 0 else vector


def _few_vectors(p: Problem, config: Config) -> tuple[int, int]:
    """Those of both GEMMs for few tokens: rows of scales that no vector load takes come together, if those of both
    products are such and that costs no stage."""
    up, down = (_vector(p, w, False) for w in (p.up, p.down))
    fits = replace(config, scale_vector=BULK_ROWS).stages == config.stages
    if fits and up == down == STRADDLING and max(p.up.scale_row, p.down.scale_row) <= MOST_BLOCKS:
        return BULK_ROWS, BULK_ROWS
    return up, down
