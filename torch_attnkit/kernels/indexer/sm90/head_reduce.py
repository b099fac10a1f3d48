"""Epilogue of q k products: relu, weights, sum over heads.

A ``wgmma`` accumulator gives a quad of lanes two rows, and of every 8 columns, which are heads, two each: element ``a +
2 r + 4 v`` of lane ``q`` is column ``8 v + 2 q + a`` of row ``r``. Weights lie in shared memory in that order, so that
a lane reads its own 16 bytes at a time. ``c`` is the configuration of either kernel.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed

from ..arguments import Tensors
from .load_keys import QUAD

_LANES = 32


@dataclass
class Weights(Fixed):
    """Head weights of a token, in shared memory or registers, and the scales of q, if any."""

    weight: cute.Tensor  # shared: (columns of a lane, lanes of a quad, stages)
    scale: cute.Tensor | None


def shared_weights(c: Any, memory: Any, stages: int) -> Weights:
    layout = cute.make_layout((c.pitch, QUAD, stages))
    parts = [memory.allocate_tensor(Float32, layout, byte_alignment=16) for _ in range(1 + c.q_scale)]
    return Weights(parts[0], parts[1] if c.q_scale else None)


def registers(c: Any, count: int) -> Weights:
    parts = [cute.make_rmem_tensor(count, Float32) for _ in range(1 + c.q_scale)]
    return Weights(parts[0], parts[1] if c.q_scale else None)


def of_lane(c: Any) -> Weights:
    """Registers for the heads that a lane of the producer warp loads: every 32nd."""
    return registers(c, -(-c.columns // _LANES))


@cute.jit
def fetch(c: cutlass.Constexpr, t: Tensors, token: Int32, local: Weights):
    """One warp: load a token's weights and scales."""
    for i in cutlass.range_constexpr(cute.size(local.weight)):
        head = cute.arch.lane_idx() + i * _LANES
        local.weight[i] = Float32(0)
        if const_expr(c.q_scale):
            local.scale[i] = Float32(0)
        if head < c.heads:
            local.weight[i] = t.mWeight[token, head].to(Float32)
            if const_expr(c.q_scale):
                local.scale[i] = Float32(t.mQScale[token, head, 0])


@cute.jit
def share(c: cutlass.Constexpr, local: Weights, shared: Weights, stage: Int32):
    """One warp: store them to a stage of the ring."""
    for i in cutlass.range_constexpr(cute.size(local.weight)):
        head = cute.arch.lane_idx() + i * _LANES
        if head < c.columns:
            index, lane = head // 8 * 2 + head % 2, head % 8 // 2
            shared.weight[index, lane, stage] = local.weight[i]
            if const_expr(c.q_scale):
                shared.scale[index, lane, stage] = local.scale[i]


@cute.jit
def of_columns(c: cutlass.Constexpr, shared: Weights, stage: Int32):
    """Weights of this lane's columns."""
    lane = cute.arch.lane_idx() % QUAD
    found = registers(c, c.columns // 4)
    count = cute.make_layout(c.columns // 4)
    cute.autovec_copy(cute.make_tensor(shared.weight[None, lane, stage].iterator, count), found.weight)
    if const_expr(c.q_scale):
        cute.autovec_copy(cute.make_tensor(shared.scale[None, lane, stage].iterator, count), found.scale)
    return found


def multiply(mma: cute.TiledMma, tA: cute.Tensor, tB: cute.Tensor, acc: cute.Tensor) -> None:
    """Issue one wgmma group: 64 keys by a token's heads."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, False)
    for k in range(cute.size(tA, mode=[2])):
        cute.gemm(atom, acc, tA[None, None, k], tB[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def sums(
    c: Any, acc: cute.Tensor, weights: Weights, factors: list[Float32] | None = None, token: int = 0
) -> list[Float32]:
    """Sums of this lane's two rows over its columns of ``token``; ``factors`` are scales of the rows that may be
    negative."""
    found = []
    for r in range(2):
        parts = [Float32(0), Float32(0)]
        for v, a in itertools.product(range(c.columns // 8), range(2)):
            x = acc[a + 2 * r + 4 * (token * c.columns // 8 + v)]
            if c.q_scale:  # before the rectification, for a scale may be negative
                x = x * weights.scale[2 * v + a]
            if factors is not None:
                x = x * factors[r]
            x = op.max_or_nan(x, Float32(0))
            if 8 * v + 8 > c.heads:  # a column without a head may be NaN
                column = cute.arch.lane_idx() % QUAD * 2 + (8 * v + a)
                x = cutlass.select_(column < c.heads, x, Float32(0))
            parts[a] = op.fma(x, weights.weight[2 * v + a], parts[a])
        found.append(parts[0] + parts[1])
    return found


def over_quad(parts: list[Float32]) -> Float32:
    """Transposing quad reduction of two or four values a lane: lane q gets value q, of two value q % 2; three shuffles
    for four values."""
    lane, step = cute.arch.lane_idx(), 1
    while len(parts) > 1:
        upper = (lane & step) != 0
        kept = []
        for low, high in zip(parts[::2], parts[1::2], strict=True):
            sent = cutlass.select_(upper, low, high)
            kept.append(cutlass.select_(upper, high, low) + cute.arch.shuffle_sync_bfly(sent, offset=step))
        parts, step = kept, 2 * step
    (found,) = parts
    return found if step == QUAD else found + cute.arch.shuffle_sync_bfly(found, offset=step)
