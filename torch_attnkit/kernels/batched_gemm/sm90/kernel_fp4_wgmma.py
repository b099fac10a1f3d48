"""Batched GEMM of FP4 for many tokens on Hopper, in two launches.

    prepare   activations and scales -> bf16 rows in the K order of weights, a group's tokens one after another
    GEMM      that of routed experts (``grouped_gemm/sm90/kernel_wgmma.py``): weights dequantised in registers

A group is an expert that has all tokens. Weights are in flight while the last CTAs of ``prepare`` still run (PDL).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies, fake, fp4
from torch_attnkit.cuda.fp4_weights import LOWERED

from ...grouped_gemm.arguments import Flags, Matrices
from ...grouped_gemm.problem import SPAN
from ...grouped_gemm.sm90.config import WgmmaConfig
from ...grouped_gemm.sm90.epilogue_wgmma import WgmmaStore
from ...grouped_gemm.sm90.kernel_wgmma import WgmmaGemm
from ...grouped_gemm.sm90.permute import share_of_quads
from ...grouped_gemm.work_tiles import WorkTile
from .fp4_activations import Fp4Activations, fake_operands

_THREADS = 256


class Tensors(NamedTuple):
    """What the GEMM takes beside weights and activations."""

    out: cute.Tensor  # (T, G, N), contiguous
    factors: cute.Tensor  # (2), by which sums are multiplied one after the other
    columns: Int32  # most tokens of a work tile


class GroupScheduler(NamedTuple):
    """A CTA's tiles: every ``blocks``-th, those of the same tokens consecutive."""

    block: Int32
    blocks: Int32
    row_tiles: Int32
    count: Int32

    def tile(self, tensors: Tensors, tile_idx: Int32) -> WorkTile:
        unit = self.block + tile_idx * self.blocks
        tokens = Int32(tensors.out.shape[0])
        tiles = (tokens + tensors.columns - 1) // tensors.columns
        part = unit // self.row_tiles
        group, first = part // tiles, part % tiles * tensors.columns
        columns = cutlass.min(tokens - first, tensors.columns)
        return WorkTile(group, group * tokens + first, columns, unit % self.row_tiles)

    def prefetch(self, tensors: Tensors, tile_idx: Int32) -> None:
        """``tile`` reads no memory."""


def group_scheduler(tensors: Tensors, row_tiles: Int32) -> GroupScheduler:
    block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    tokens, groups, _ = (Int32(size) for size in tensors.out.shape)
    units = groups * ((tokens + tensors.columns - 1) // tensors.columns) * row_tiles
    count = cutlass.max((units - block + blocks - 1) // blocks, Int32(0))
    return GroupScheduler(block, blocks, row_tiles, count)


class StoreGroups(WgmmaStore):
    """Outputs in 16 bits to (T, G, N). ``even``: two neighbouring features are stored at once."""

    def __init__(self, config: WgmmaConfig, even: bool):
        super().__init__(config)
        self.even = even

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Any, rSum: cute.Tensor, tile: WorkTile, factor: Float32,
        tokens: cutlass.Constexpr, shared: Int32, warp: Int32, lane: Int32,
    ):  # fmt: skip
        mOut = tensors.out
        features = Int32(mOut.shape[2])
        feature = tile.row * self.c.rows + self.row(warp, lane)
        first = tile.first - tile.expert * Int32(mOut.shape[0]) + lane % 4 * 2
        left = tile.columns - lane % 4 * 2
        row = Int64(mOut.shape[1]) * mOut.shape[2]
        out = mOut.iterator + (Int64(first) * row + Int64(tile.expert) * mOut.shape[2] + feature)
        factors = [tensors.factors[i] for i in range(2)]
        for group in cutlass.range_constexpr(tokens // 8):
            for j in cutlass.range_constexpr(2):
                if left > 8 * group + j:
                    sums = [rSum[4 * group + 2 * part + j] for part in range(2)]
                    y = [(x * factors[0] * factors[1]).to(mOut.element_type) for x in sums]
                    self._store(out + (8 * group + j) * row, y, features - feature)

    @cute.jit
    def _store(self, out: cute.Pointer, y: list[Any], left: Int32):
        width = const_expr(2 if self.even else 1)
        for i in cutlass.range_constexpr(0, 2, width):
            if left > i:
                rOut = cute.make_rmem_tensor(width, y[0].dtype)
                for j in cutlass.range_constexpr(width):
                    rOut[j] = y[i + j]
                copies.store(rOut, out + i)


class Fp4Wgmma:
    """``divisors``: which of o and the weights have a global scale."""

    def __init__(self, config: WgmmaConfig, tokens: Fp4Activations, divisors: tuple[bool, bool], even: bool):
        self.c, self.tokens, self.divisors = config, tokens, divisors
        self.product = WgmmaGemm(config, StoreGroups(config, even), group_scheduler)

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,  # (T, G, K/2)
        mScale: cute.Tensor,  # (G, T, blocks), or each group's in the 128x4 layout
        mOGlobal: cute.Tensor,  # (1)
        mWeightGlobal: cute.Tensor,  # (1)
        weights: Matrices,
        mX: cute.Tensor,  # (G T, whole spans), to be written
        mFactor: cute.Tensor,  # (2), likewise
        mOut: cute.Tensor,  # (T, G, N), contiguous
        numbers: tuple[Int32, Int32, Int32, Int32],
        stream: Any,
    ):
        """``numbers``: layout of the weights' scales (``grouped_gemm/problem.py``), most tokens of a work
        tile, and blocks of either launch."""
        kind, columns, prepare_blocks, blocks = numbers
        self.prepare(mO, mScale, mOGlobal, mWeightGlobal, mX, mFactor).launch(
            grid=[prepare_blocks, 1, 1], block=[_THREADS, 1, 1], stream=stream
        )
        no = Int32(0)
        flags = Flags(no, no, no, kind, no)
        self.product.launch(Tensors(mOut, mFactor, columns), flags, weights, mX, None, blocks, stream)

    @cute.kernel
    def prepare(
        self, mO: cute.Tensor, mScale: cute.Tensor, mOGlobal: cute.Tensor, mWeightGlobal: cute.Tensor, mX: cute.Tensor,
        mFactor: cute.Tensor,
    ):  # fmt: skip
        """A quad of lanes has a span of a token at a time."""
        cute.arch.griddepcontrol_launch_dependents()
        lane, tokens, spans = cute.arch.lane_idx(), Int32(mO.shape[0]), Int32(mX.shape[1]) // SPAN
        units = Int32(mX.shape[0]) * spans
        first, step = share_of_quads(_THREADS)
        for start in cutlass.range(first, units, step, unroll=1):
            unit = start + lane // 4
            row, span = unit // spans, unit % spans
            words = self.tokens.words(mO, mScale, row // tokens, row % tokens, span, unit < units, lane % 4)
            if unit < units:
                self.tokens.spans.store(mX, words, row, span * SPAN, lane % 4)
        if (cute.arch.block_idx()[0] == 0) & (cute.arch.thread_idx()[0] == 0):
            factors = [Float32(2.0 ** LOWERED[self.c.format]), Float32(1.0)]
            for i, divisor in enumerate((mOGlobal, mWeightGlobal)):
                if const_expr(self.divisors[i]):
                    factors[i] = fp4.divide(factors[i], divisor[0])
                mFactor[i] = factors[i]


def trace(
    arch: str, *, format: str, out_dtype: str, swizzled: bool, divisors: tuple[bool, bool], widths: tuple[int, ...],
    group: int, warps: int, code_alignment: int, scale_vector: int, o_alignment: int, even: bool,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """As ``Fp4WgmmaPlan`` has them; ``swizzled``: scales are in the 128x4 layout."""
    config = WgmmaConfig(format, warps, "bf16", "none", widths[-1], False, scale_vector, code_alignment, widths, group)
    x, factor = fake.tensor("bf16", (None, None), (fake.dim(8), 1)), fake.tensor("f32", (None,), (1,), align=4)
    out = fake.tensor(out_dtype, (None, None, None), align=4 if even else 2)
    made = Fp4Wgmma(config, Fp4Activations(format, swizzled, o_alignment), divisors, even)
    return made, [*fake_operands(o_alignment, code_alignment), x, factor, out, (Int32(0),) * 4, fake.stream()]
