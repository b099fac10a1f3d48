"""Products of a warp's keys with a token's heads, and what becomes of them: relu, weights, sum over heads.

An accumulator of ``mma.m16n8`` gives a quad of lanes two rows, and of every 8 columns, which are heads, two each.
Weights lie in shared memory as a lane needs them: those of its own columns side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda import fake
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.asm import asm
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.word_ops import load_words

from ..arguments import Tensors
from .load import QUAD, Keys
from .plan import ATOMS, COLUMN_TILE, GROUP

_HEADS = 16  # whose products are summed up together: in registers beside the keys


@dataclass
class HeadWeights(Fixed):
    """Weights, and scales of q if there are any."""

    factors: list[cute.Tensor]  # (columns of a lane, lanes of a quad, stages)


def allocate_weights(c: Any, memory: Any) -> HeadWeights:
    layout = cute.make_layout((c.pitch, QUAD, c.stages))
    return HeadWeights([memory.allocate_tensor(Float32, layout, byte_alignment=16) for _ in range(1 + c.q_scale)])


@cute.jit
def fetch(c: cutlass.Constexpr, t: Tensors, token: Int32, rWeight: cute.Tensor):
    """Load the weight of this thread's head, and its scale; 0 without a head."""
    rWeight.fill(0)
    head = cute.arch.thread_idx()[0]
    if head < c.heads:
        rWeight[0] = t.mWeight[token, head].to(Float32)
        if const_expr(c.q_scale):
            rWeight[1] = Float32(t.mQScale[token, head, 0])


@cute.jit
def share(c: cutlass.Constexpr, shared: HeadWeights, rWeight: cute.Tensor, slot: Int32):
    """Store them to a stage of the ring."""
    head = cute.arch.thread_idx()[0]
    if head < c.columns:
        index, lane = head // COLUMN_TILE * 2 + head % 2, head % COLUMN_TILE // 2
        for i in cutlass.range_constexpr(len(shared.factors)):
            shared.factors[i][index, lane, slot] = rWeight[i]


def score(c: Any, keys: Keys, even: Int32, odd: Int32, weights: HeadWeights, slot: Int32) -> list[Float32]:
    """Of each of this lane's rows the sum over its columns; ``even`` and ``odd``: where it reads these groups of Q."""
    sums = [Float32(0) for _ in range(2 * ATOMS)]
    for first in range(0, c.columns, _HEADS):
        tiles = range(first // COLUMN_TILE, min(first + _HEADS, c.columns) // COLUMN_TILE)
        accs = _products(c, keys, even, odd, tiles)
        factors = [_of_columns(shared, tiles, slot) for shared in weights.factors]
        for a in range(ATOMS):
            for v, acc in zip(tiles, accs[a], strict=True):
                for i in range(4):
                    column = 2 * (v - tiles.start) + i % 2
                    x = acc[i] * factors[1][column] if c.q_scale else acc[i]  # first, for it may be negative
                    x = op.max_or_nan(x, Float32(0))
                    if COLUMN_TILE * (v + 1) > c.heads:  # a column without a head may be NaN
                        head = cute.arch.lane_idx() % QUAD * 2 + (COLUMN_TILE * v + i % 2)
                        x = cutlass.select_(head < c.heads, x, Float32(0))
                    row = 2 * a + i // 2
                    sums[row] = op.fma(x, factors[0][column], sums[row])
    return sums


def _products(c: Any, keys: Keys, even: Int32, odd: Int32, tiles: range) -> list[list[list[Float32]]]:
    """Accumulators of each 16 keys and 8 heads."""
    accs = [[[Float32(0) for _ in range(4)] for _ in tiles] for _ in range(ATOMS)]
    for group in range(c.row_bytes // GROUP):
        for n, v in enumerate(tiles):
            at = (odd if group % 2 else even) + (v * COLUMN_TILE * c.row_bytes + group * GROUP)
            rQ = load_words(4, at)
            for half in range(2):
                for a in range(ATOMS):
                    A = keys.operand(a, 2 * group + half)
                    accs[a][n] = _multiply(c, A, rQ[2 * half : 2 * half + 2], accs[a][n])
    return accs


def _multiply(c: Any, a: Any, b: Any, acc: Any) -> Any:
    return _mma_e4m3(a, b, acc) if c.dtype == "f8e4m3" else op.mma_m16n8k16(fake.dtype(c.dtype), a, b, acc)


@dsl_user_op
def _mma_e4m3(a: Any, b: Any, c: Any, *, loc: Any = None, ip: Any = None) -> tuple[Float32, ...]:
    """``a (16, 32) @ b (32, 8) + c (16, 8)`` of E4M3: a has four registers, b two, c four floats."""
    text = (
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    return asm([Float32] * 4, [*a, *b, *c], text, loc=loc, ip=ip)


def _of_columns(shared: cute.Tensor, tiles: range, slot: Int32) -> cute.Tensor:
    """Of this lane's columns."""
    found = cute.make_rmem_tensor(2 * len(tiles), Float32)
    lane = cute.arch.lane_idx() % QUAD
    at = shared[None, lane, slot].iterator + 2 * tiles.start
    cute.autovec_copy(cute.make_tensor(at, cute.make_layout(2 * len(tiles))), found)
    return found
