"""Persistent grouped GEMM on Blackwell for 16-bit activations: weights dequantised to tensor memory, swap-AB.

    1 warp    weights of a stage by TMA, 256 elements of 128 rows; of the second GEMM before h is written
    8 warps   two groups, each with half of a stage: a row a lane, decoded to bf16, to tensor memory
    1 warp    activations by TMA, 32 rows at a time, as many as the tile has
    1 warp    MMA: weights' rows are the lanes of tensor memory, tokens the columns, as many as there are
    4 warps   epilogue (epilogue_swap_ab.py), while the next tile is multiplied

    ring      producers (arrivals)   consumers (arrivals)
    weights   TMA 1                  8 decoding warps
    tokens    TMA 1                  tcgen05.commit 1
    decoded   4 decoding warps       tcgen05.commit 1
    sums      tcgen05.commit 1       4 epilogue warps

Decoding is that of ``cuda/fp4_weights.py``; rows of activations are in its order of elements. A float16 activation is
the sum of two bf16, multiplied one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, tcgen05

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.fp4_weights import LOWERED, both_of_two, decode, factors_of_e4m3, factors_of_e8m0
from torch_attnkit.cuda.ring import Fixed, Ring, rings
from torch_attnkit.cuda.sm100 import decoded_product, tmem

from ..arguments import Flags, Matrices
from ..problem import SPAN
from ..weight_scales import WeightScales, load_words
from ..work_tiles import static_scheduler
from .config import (
    CHUNK,
    DECODED_PRODUCT_WARP,
    DECODED_STAGES,
    DECODED_THREADS,
    DECODED_TOKEN_WARP,
    DECODED_WEIGHT_WARP,
    RESULT_WARPS,
    ROW_BYTES,
    SPAN_COLUMNS,
    SPANS,
    STAGES_AHEAD,
    SUMS,
    TOKEN_BOX,
    TOKEN_STAGES,
    TOKENS,
    WEIGHT_ROWS,
    WEIGHT_STAGES,
    DequantConfig,
)
from .epilogue import factor_of
from .kernel_block_scaled import TmaLoads, await_work_tiles, begin, swizzled, weight_tma
from .load_scales import ScaleRows, row_scales, weight_row

_STAGE_BYTES = WEIGHT_ROWS * ROW_BYTES
_BOX_BYTES = TOKEN_BOX * ROW_BYTES
_ROW_BOXES = TOKENS // TOKEN_BOX
_SPAN_BOXES = SPAN // decoded_product.BOX
_DECODED = SUMS * TOKENS  # the first column of decoded weights
_CHUNK = 32  # elements of 16 bytes of packed weights


@dataclass
class DequantSmem(Fixed):
    """A block's shared memory, and the rings of tensor memory."""

    weights: Ring
    tokens: Ring
    decoded: Ring
    sums: Ring
    sX: cute.Tensor  # (TOKEN_BOX, elements, boxes of all stages)
    sW: cute.Tensor  # (rows, bytes, stages)
    results: Int32  # address of what ``results`` needs


class DequantGemm:
    """The kernel, by warp roles. ``results``: the epilogue."""

    def __init__(self, config: DequantConfig, results: Any):
        self.c, self.results = config, results
        self.factors = WeightScales(ScaleRows(config.span_scales, config.block, config.scale_vector))
        self.lowered = 2.0 ** LOWERED[config.format]

    @cute.jit
    def launch(
        self, tensors: Any, flags: Flags, weights: Matrices, rows: cute.Tensor, scalars: Any, blocks: Int32,
        stream: Any,
    ):  # fmt: skip
        """``rows``: x or h, (slots, parts of elements)."""
        self.kernel(
            tensors, flags, weights, scalars, weight_tma(self.c, flags, weights), self._token_loads(weights, rows)
        ).launch(grid=[blocks, 1, 1], block=[DECODED_THREADS, 1, 1], stream=stream, min_blocks_per_mp=1, use_pdl=True)

    def _token_loads(self, weights: Matrices, rows: cute.Tensor) -> TmaLoads:
        """(slots, elements, parts)."""
        columns = weights.packed.shape[2] * 2
        layout = cute.make_layout(
            (rows.shape[0], columns, self.c.parts), stride=(rows.stride[0], 1, cute.assume(columns, divby=32))
        )
        tensor, box = cute.make_tensor(rows.iterator, layout), (TOKEN_BOX, decoded_product.BOX)
        tile = swizzled(cute.make_layout(box, stride=(decoded_product.BOX, 1)))
        return TmaLoads(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, tile, box))

    @cute.kernel
    def kernel(self, tensors: Any, flags: Flags, weights: Matrices, scalars: Any, packed: TmaLoads, tokens: TmaLoads):
        await_work_tiles(self.c)
        # Of gate and up a work tile has half of its rows each.
        share = static_scheduler(tensors, (Int32(weights.packed.shape[1]) + WEIGHT_ROWS - 1) // WEIGHT_ROWS)
        if share.count > 0:
            self._roles(tensors, flags, weights, scalars, packed, tokens, share)

    @cute.jit
    def _roles(
        self, tensors: Any, flags: Flags, weights: Matrices, scalars: Any, packed: TmaLoads, tokens: TmaLoads,
        share: Any,
    ):  # fmt: skip
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        s = self._shared(warp)
        if warp == DECODED_WEIGHT_WARP:
            cpasync.prefetch_descriptor(packed.atom)
        if warp == DECODED_TOKEN_WARP:
            cpasync.prefetch_descriptor(tokens.atom)
        begin(self.c)
        columns = Int32(weights.packed.shape[2]) * 2
        spans = (columns + SPAN - 1) // SPAN
        if warp < RESULT_WARPS:
            self._results(tensors, flags, weights, scalars, share, s, warp)
        elif warp < DECODED_PRODUCT_WARP:
            self._decode(tensors, flags, weights, share, spans, s, warp - RESULT_WARPS)
        elif warp == DECODED_PRODUCT_WARP:
            self._multiply(tensors, share, columns, spans, s)
        elif warp == DECODED_WEIGHT_WARP:
            self._load_weights(tensors, packed, share, (spans + SPANS - 1) // SPANS, s)
        else:
            if const_expr(not self.c.paired):
                cute.arch.griddepcontrol_wait()
            self._load_tokens(tensors, tokens, share, spans, s)
        tmem.before_sync()
        cute.arch.barrier()
        tmem.after_sync()
        if warp == DECODED_PRODUCT_WARP:
            cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.dealloc_tmem(tmem.pointer(Float32, 0), tmem.COLUMNS)

    @cute.jit
    def _shared(self, warp: Int32):
        memory = cutlass.memory.SmemAllocator()
        table = (
            ("weights", WEIGHT_STAGES, 1, 4 * SPANS),
            ("tokens", TOKEN_STAGES, 1, 1),
            ("decoded", DECODED_STAGES, 4, 1),
            ("sums", SUMS, 1, RESULT_WARPS),
        )
        named = rings(memory, warp, table)
        base = memory.allocate(4, 4)
        if warp == DECODED_PRODUCT_WARP:
            cute.arch.alloc_tmem(tmem.COLUMNS, cute.recast_ptr(base, dtype=Int32))
        swizzle = cute.make_swizzle(3, 4, 3)
        box = decoded_product.BOX
        boxes = cute.make_layout(
            (TOKEN_BOX, box, TOKEN_STAGES * _SPAN_BOXES * _ROW_BOXES), stride=(box, 1, TOKEN_BOX * box)
        )
        shape, steps = self.c.box_layout
        stages = cute.make_layout(WEIGHT_STAGES, stride=_STAGE_BYTES)
        s = DequantSmem(
            **named,
            sX=memory.allocate_tensor(BFloat16, boxes, 1024, swizzle=swizzle),
            sW=memory.allocate_tensor(
                Uint8, cute.append(cute.make_layout(shape, stride=steps), stages), 1024, swizzle=swizzle
            ),
            results=memory.allocate(max(self.results.shared_bytes, 16), 128).toint(),
        )
        return s

    @cute.jit
    def _load_weights(self, tensors: Any, packed: TmaLoads, share: Any, k_tiles: Int32, s: DequantSmem):
        n = Int32(0)
        for tile_idx in cutlass.range(share.count, unroll=1):
            tile = share.tile(tensors, tile_idx)
            gW = cute.local_tile(packed.rows[None, None, tile.expert], (self.c.box, ROW_BYTES), (None, None))
            tWs, tWg = copies.tma_partition(packed.atom, 0, 1, s.sW, gW)
            for k in cutlass.range(k_tiles, unroll=1):
                full = s.weights.acquire(n, _STAGE_BYTES)
                cute.copy(packed.atom, tWg[None, tile.row, k], tWs[None, s.weights.slot(n)], tma_bar_ptr=full)
                n += 1

    @cute.jit
    def _load_tokens(self, tensors: Any, tokens: TmaLoads, share: Any, spans: Int32, s: DequantSmem):
        """Of a box, rows behind a work tile's last are those of the next expert, or beyond the tensor and zeros."""
        n = Int32(0)
        for tile_idx in cutlass.range(share.count, unroll=1):
            tile = share.tile(tensors, tile_idx)
            rows = cute.domain_offset((tile.first, 0, 0), tokens.rows)
            gX = cute.local_tile(rows, (TOKEN_BOX, decoded_product.BOX), (None, None, None))
            tXs, tXg = copies.tma_partition(tokens.atom, 0, 1, s.sX, gX)
            boxes = (tile.columns + TOKEN_BOX - 1) // TOKEN_BOX
            for k in cutlass.range(spans, unroll=1):
                for part in cutlass.range_constexpr(self.c.parts):
                    full = s.tokens.acquire(n, boxes * (_BOX_BYTES * _SPAN_BOXES))
                    for j in cutlass.range_constexpr(_SPAN_BOXES):
                        for box in cutlass.range(boxes, unroll=1):
                            to = (s.tokens.slot(n) * _SPAN_BOXES + j) * _ROW_BOXES + box
                            source = tXg[None, box, k * _SPAN_BOXES + j, part]
                            cute.copy(tokens.atom, source, tXs[None, to], tma_bar_ptr=full)
                    n += 1

    @cute.jit
    def _decode(
        self, tensors: Any, flags: Flags, weights: Matrices, share: Any, spans: Int32, s: DequantSmem, warp: Int32
    ):  # fmt: skip
        """A warp of a group: of every stage the group's span, if there is one."""
        group, row = warp // 4, warp % 4 * 32 + cute.arch.lane_idx()
        packed = s.sW.iterator.toint() + row * ROW_BYTES
        columns = tmem.lanes(Int32(_DECODED), warp)
        k_tiles = (spans + SPANS - 1) // SPANS
        n, m = Int32(0), Int32(0)  # stages and spans of work tiles before
        for tile_idx in cutlass.range(share.count, unroll=1):
            tile = share.tile(tensors, tile_idx)
            start = row_scales(self.c, flags, weights, tile, row)
            for first in cutlass.range(0, k_tiles, STAGES_AHEAD, unroll=1):
                ahead = []
                for i in cutlass.range_constexpr(STAGES_AHEAD):
                    span = cutlass.min((first + i) * SPANS + group, spans - 1)
                    ahead += self.factors.read(flags, weights, tile, [start], span)
                for i in cutlass.range_constexpr(STAGES_AHEAD):
                    span = (first + i) * SPANS + group
                    if first + i < k_tiles:
                        s.weights.wait(n + first + i)
                        if span < spans:
                            at = packed + s.weights.slot(n + first + i) * _STAGE_BYTES
                            self._decode_span(ahead[i], at, row, group, columns, s, m + span)
                        cute.arch.sync_warp()
                        s.weights.release(n + first + i)
            n += k_tiles
            m += spans

    @cute.jit
    def _decode_span(
        self, scales: cute.Tensor, packed: Int32, row: Int32, group: Int32, columns: Int32, s: DequantSmem, fill: Int32
    ):  # fmt: skip
        """``packed``: of a stage's row."""
        factors = []
        for j in cutlass.range_constexpr(self.c.span_scales // 4):
            factors += self._factors(scales[j])
        full = s.decoded.await_empty(fill)
        tmem.after_sync()
        target = columns + s.decoded.slot(fill) * SPAN_COLUMNS
        for chunk in cutlass.range_constexpr(SPAN // _CHUNK):
            words = load_words(packed + ((group * (SPAN // _CHUNK) + chunk) ^ (row & 7)) * 16, 4)
            pairs = []
            for w in cutlass.range_constexpr(4):
                pairs += decode(words[w], factors[(chunk * _CHUNK + w * 8) // self.c.block])
            tmem.store(target + chunk * (_CHUNK // 2), [Int32(p) for p in pairs])
        tmem.await_stores()
        tmem.before_sync()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full)

    def _factors(self, word: Uint32) -> list[Uint32]:
        """Of four scales, each in both halves of a word."""
        halves = factors_of_e4m3(word) if self.c.format == "nvfp4" else factors_of_e8m0(word)
        return [factor for half in halves for factor in both_of_two(half)]

    @cute.jit
    def _multiply(self, tensors: Any, share: Any, columns: Int32, spans: Int32, s: DequantSmem):
        x = s.sX.iterator.toint()
        steps = const_expr(SPAN // decoded_product.STEP)
        box_steps = const_expr(decoded_product.BOX // decoded_product.STEP)
        n, m = Int32(0), Int32(0)
        for tile_idx in cutlass.range(share.count, unroll=1):
            rows = cute.arch.make_warp_uniform(share.tile(tensors, tile_idx).columns)
            # All that is read together must have been multiplied.
            instruction = decoded_product.instruction((rows + CHUNK - 1) // CHUNK * CHUNK)
            done = s.sums.await_empty(tile_idx)
            tmem.after_sync()
            d = s.sums.slot(tile_idx) * TOKENS
            for k in cutlass.range(spans, unroll=1):
                s.decoded.wait(m)
                a = Int32(_DECODED) + s.decoded.slot(m) * SPAN_COLUMNS
                for part in cutlass.range_constexpr(self.c.parts):
                    s.tokens.wait(n)
                    tmem.after_sync()
                    slot = s.tokens.slot(n)
                    with cute.arch.elect_one():
                        for step in cutlass.range_constexpr(steps):
                            if (step == 0) | (k * SPAN + step * decoded_product.STEP < columns):
                                box = x + (slot * _SPAN_BOXES + step // box_steps) * (_ROW_BOXES * _BOX_BYTES)
                                decoded_product.multiply(
                                    d, a + step * (decoded_product.STEP // 2), box, step % box_steps, instruction,
                                    cutlass.select_(k + step + part > 0, Int32(1), Int32(0)),
                                )  # fmt: skip
                        tcgen05.commit(s.tokens.empty + slot)
                    n += 1
                with cute.arch.elect_one():
                    tcgen05.commit(s.decoded.empty + s.decoded.slot(m))
                m += 1
            with cute.arch.elect_one():
                tcgen05.commit(done)

    @cute.jit
    def _results(
        self, tensors: Any, flags: Flags, weights: Matrices, scalars: Any, share: Any, s: DequantSmem, warp: Int32
    ):
        row = warp * 32 + cute.arch.lane_idx()
        for tile_idx in cutlass.range(share.count, unroll=1):
            tile = share.tile(tensors, tile_idx)
            factor = factor_of(flags, weights, tile.expert) * self.lowered
            bias = Float32(0.0)
            if flags.bias != 0:
                bias = Float32(weights.bias[tile.expert, weight_row(self.c, flags, weights, tile, row)])
            s.sums.wait(tile_idx)
            tmem.after_sync()
            sums = tmem.lanes(s.sums.slot(tile_idx) * TOKENS, warp)
            self.results.run(tensors, scalars, tile, factor, bias, sums, s.results, warp)
            tmem.before_sync()
            cute.arch.sync_warp()
            s.sums.release(tile_idx)


assert CHUNK % decoded_product.LEAST_ROWS == 0 and CHUNK % TOKEN_BOX == 0
