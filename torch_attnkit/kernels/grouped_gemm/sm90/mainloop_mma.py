"""Mainloop by ``mma.sync``: weights dequantised in registers as operand A, activations by ldmatrix as operand B.

A warp has 16 rows and two boxes of every stage. A quad of lanes has a row and the one 8 further on; each lane decodes
16 bytes of both at a time: 32 elements, operand A of eight m16n8k16. The two k-steps of a word accumulate separately,
so dependency chains are half as long.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, Uint16, Uint32, const_expr

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.fp4_weights import both, both_of_two, decode
from torch_attnkit.cuda.ring import Fixed, Ring

from ..problem import SPAN
from ..weight_scales import load_words
from .config import BOX, CONSUMERS, WARP_ROWS, Config
from .load_weights import ROW_BYTES, box_layout, clear
from .tile_scheduler import width_of


def row_of(lane: Int32) -> Int32:
    """The row of 8 that a quad has: with TMA's swizzle, rows that a quarter of a warp reads at once are four apart."""
    quad = lane // 4
    return (quad >> 1) + ((quad & 1) << 2)


class NamedBarrier(IntEnum):
    """Of a block; 0 is that of all threads."""

    CONSUMERS = 1


def sync_consumers() -> None:
    """All consumers."""
    cute.arch.barrier(barrier_id=int(NamedBarrier.CONSUMERS), number_of_threads=32 * CONSUMERS)


def store_floats(address: Any, values: list[Float32]) -> None:
    """Four floats to shared memory, aligned to 16 bytes."""
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=16)
    rV = cute.make_rmem_tensor(4, Float32)
    for i, value in enumerate(values):
        rV[i] = value
    cute.autovec_copy(rV, cute.make_tensor(pointer, cute.make_layout(4)))


class LaneAddrs(NamedTuple):
    """Where a lane reads a stage."""

    row: Int32  # of 8
    quarter: Int32  # of a row's 128 elements
    packed: Int32  # address of its first row
    tokens: Int32  # of its row, 16 bytes, of the four 8 x 8 tiles that are a word's operands of two steps
    factors: Int32


class MmaSmem(Fixed):
    """Addresses in shared memory, and the ring's weights for TMA. Stages of both GEMMs have the same sizes;
    ``config``'s own is what the first needs beside its stages."""

    def __init__(self, config: Config, memory: Any):
        self.c = config
        self.sW = memory.allocate_tensor(Uint8, self._boxes(config), 1024, swizzle=cute.make_swizzle(3, 4, 3))
        self._tokens = memory.allocate(config.stages * config.token_bytes, 128).toint()
        self._factors = memory.allocate(config.stages * config.factor_bytes, 128).toint()
        self.sums = memory.allocate(config.sum_bytes, 128).toint() if config.sum_bytes else Int32(0)
        self.results = memory.allocate(config.result_bytes, 128).toint() if config.result_bytes else Int32(0)

    def _boxes(self, config: Config) -> cute.Layout:
        boxes = cute.make_layout(self.c.stages * config.boxes, stride=config.rows * ROW_BYTES)
        return cute.append(box_layout(config), boxes)

    def boxes(self, config: Config) -> cute.Tensor:
        """(rows, bytes, boxes) as a product's rows are."""
        return cute.make_tensor(self.sW.iterator, self._boxes(config))

    def weights(self, stage: Int32) -> Int32:
        """(slice, row, chunk) of 16 bytes."""
        return self.sW.iterator.toint() + stage * self.c.weight_bytes

    def tokens(self, stage: Int32) -> Int32:
        """(token, part) of a row each, with ``_PAD`` bytes behind it."""
        return self._tokens + stage * self.c.token_bytes

    def clear_tokens(self) -> None:
        """Rows of tokens that a tile does not have are read, so they must not hold NaN."""
        clear(self._tokens, self.c.stages * self.c.token_bytes)

    def factors(self, stage: Int32) -> Int32:
        """(span, row, quad) of one or two bf16."""
        return self._factors + stage * self.c.factor_bytes


class MmaMainloop:
    def __init__(self, config: Config):
        self.c = config
        self.spans = config.own_boxes * BOX // SPAN  # of a stage that a consumer has

    def sums(self) -> cute.Tensor:
        """A lane's results: (4, groups of 8 tokens, 2 chains)."""
        return cute.make_rmem_tensor(cute.make_layout((4, self.c.columns // 8, 2)), Float32)

    @cute.jit
    def run(self, rSum: cute.Tensor, columns: Int32, spans: Int32, n: Int32, ring: Ring, shared: MmaSmem, warp: Int32):
        """The sums of a work tile of ``columns`` tokens and ``spans`` of K, from the ring's fill n on."""
        c, each, own = self.c, const_expr(self.c.stage // SPAN), const_expr(self.spans)
        first = warp // c.row_warps * own  # of every stage
        whole = (spans + each - first - own) // each  # stages of which this warp has all its spans
        rSum.fill(0.0)
        padded = width_of(c, columns)
        for width in cutlass.range_constexpr(len(c.widths)):
            groups = const_expr(c.widths[width])
            if padded == 8 * groups:
                for k in cutlass.range(whole, unroll=1):
                    ring.wait(n + k)
                    addrs = self.lane_addrs(shared, ring.slot(n + k), warp)
                    for span in cutlass.range_constexpr(own):
                        self.multiply_span(rSum, groups, addrs, span)
                    self._release(ring, n + k)
                for k in cutlass.range(whole, (spans + each - 1) // each, unroll=1):
                    ring.wait(n + k)
                    addrs = self.lane_addrs(shared, ring.slot(n + k), warp)
                    for span in cutlass.range(spans - k * each - first, unroll=1):
                        self.multiply_span(rSum, groups, addrs, span)
                    self._release(ring, n + k)

    def _release(self, ring: Ring, n: Int32) -> None:
        """By every warp that has read fill n. An arrival does not wait for loads in flight: on an H200 the next fill's
        tokens overwrote what the last ``ldmatrix`` of this one read, in one of 40 calls of a model's layer, in half of
        them beside other processes. The fence costs nothing that could be measured."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        ring.release(n)

    def lane_addrs(self, shared: MmaSmem, stage: Int32, warp: Int32) -> LaneAddrs:
        c, lane = self.c, cute.arch.lane_idx()
        stage = op.fresh(stage)  # or each product with it is worked out from the fill's number
        row, quarter = row_of(lane), lane % 4
        rows, slice_ = warp % c.row_warps * WARP_ROWS + row, warp // c.row_warps
        row_of_tokens = lane % 8 * (c.parts * c.token_row_bytes) + lane // 8 * 16
        return LaneAddrs(
            row,
            quarter,
            packed=shared.weights(stage) + (slice_ * (c.own_boxes * c.rows) + rows) * ROW_BYTES,
            tokens=shared.tokens(stage) + row_of_tokens + slice_ * (c.own_boxes * BOX * 2),
            factors=shared.factors(stage)
            + (slice_ * (self.spans * c.rows) + rows) * self._factor_bytes
            + quarter * self._factor_bytes // 4,
        )

    @cute.jit
    def multiply_span(self, rSum: cute.Tensor, groups: cutlass.Constexpr, addrs: LaneAddrs, span: Any):
        """A span of the warp's part of a stage."""
        c = self.c
        chunk = ((addrs.quarter + span % 2 * 4) ^ addrs.row) * 16  # of a box's row, as TMA swizzles them
        first = addrs.packed + span // 2 * (c.rows * ROW_BYTES) + chunk
        packed = [load_words(first + 8 * r * ROW_BYTES, 4) for r in range(2)]
        factors = [self._factors(addrs.factors + (span * c.rows + 8 * r) * self._factor_bytes) for r in range(2)]
        for word in cutlass.range_constexpr(4):
            a, b = (decode(packed[r][word], factors[r][word // 2]) for r in range(2))
            for part in cutlass.range_constexpr(c.parts):
                for group in cutlass.range_constexpr(groups):
                    row_of_part = const_expr((8 * group * c.parts + part) * c.token_row_bytes)
                    rB = op.ldmatrix_x4(addrs.tokens + row_of_part + span * (SPAN * 2) + word * 64)
                    for half in cutlass.range_constexpr(2):
                        i, j = const_expr(2 * half), const_expr(2 * half + 1)
                        old = [rSum[x, group, half] for x in range(4)]
                        new = op.mma_m16n8k16(cutlass.BFloat16, (a[i], b[i], a[j], b[j]), (rB[i], rB[j]), old)
                        for x in cutlass.range_constexpr(4):
                            rSum[x, group, half] = new[x]

    @property
    def _factor_bytes(self) -> int:
        """Of the factors of a row in a span."""
        return SPAN // self.c.block * 2

    def _factors(self, address: Int32) -> tuple[Uint32, Uint32]:
        """Of a row's 32 elements, the first and the second 16."""
        if self.c.format == "nvfp4":
            return both_of_two(load_words(address, 1)[0])
        one = both(Uint32(load_words(address, 1, Uint16)[0]))
        return one, one

    @cute.jit
    def reduce_slices(self, rSum: cute.Tensor, shared: MmaSmem, warp: Int32):
        """Both chains into the first, then all slices of K into the warps of the first."""
        c = self.c
        for group in cutlass.range_constexpr(c.columns // 8):
            for x in cutlass.range_constexpr(4):
                rSum[x, group, 0] = rSum[x, group, 0] + rSum[x, group, 1]
        if const_expr(c.slices > 1):
            words = const_expr(c.columns // 2)  # of a lane
            lane = cute.arch.lane_idx()
            addrs, box = (warp % c.row_warps * 32 + lane) * 4, warp // c.row_warps
            slice_bytes, vector = const_expr(c.rows * c.columns * 4), const_expr(c.row_warps * 32 * 16)
            if box > 0:
                for i in cutlass.range_constexpr(words // 4):
                    at = shared.sums + (box - 1) * slice_bytes + i * vector + addrs * 4
                    store_floats(at, [rSum[x, i, 0] for x in range(4)])
            sync_consumers()
            if box == 0:
                for other in cutlass.range_constexpr(c.slices - 1):
                    for i in cutlass.range_constexpr(words // 4):
                        more = load_words(shared.sums + other * slice_bytes + i * vector + addrs * 4, 4, Float32)
                        for x in cutlass.range_constexpr(4):
                            rSum[x, i, 0] = rSum[x, i, 0] + more[x]
            sync_consumers()
