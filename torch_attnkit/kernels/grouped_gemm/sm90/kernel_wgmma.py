"""Routed experts with FP4 weights on Hopper, many tokens an expert: a persistent grouped GEMM by ``wgmma``, swap-AB.

    1 warp         weights of a stage by TMA, or by cp.async (load_weights.py)
    1 warp         activations by TMA, from rows sorted by expert (permute.py)
    2 warps        scales of half of a stage's rows each, to bf16 factors
    8 or 12 warps  warpgroups of 64 rows: dequantise to registers (operand A), multiply, epilogue (epilogue_wgmma.py)

    ring         producers (arrivals)                   consumers (arrivals)
    weights      weights (1 by TMA, 32), scale warps 2     8 or 12 warps
    tokens       activations 1                          8 or 12 warps

A tile is multiplied by the narrowest ``wgmma`` that holds its tokens: a branch for each width. While one group of
k-steps is multiplied, the next is decoded into the other of two register sets. The second GEMM's weights are in flight
while CTAs of the first still run (PDL). docs/kernels/grouped_gemm.md has what limits it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32, Uint8, Uint16, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from torch_attnkit.cuda import copies, fake, memory_ops
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.fp4_weights import both, both_of_two, decode
from torch_attnkit.cuda.ring import Fixed, Ring, rings

from ..arguments import Flags, Matrices, Scalars, Tensors, arguments
from ..problem import SPAN
from ..quantize_act import FAKE_QUANTIZE
from ..weight_scales import load_words
from ..work_tiles import WorkTile, static_scheduler
from .config import BOX, LOADERS, SCALERS, TOKEN_BOX, WgmmaConfig
from .epilogue_mma import output_scale
from .epilogue_wgmma import WgmmaStore, WgmmaSwiglu, WgmmaSwigluQuantize
from .load_weights import (
    ROW_BYTES,
    ScaleLoader,
    TmaLoads,
    await_copies,
    box_layout,
    box_rows,
    copy_packed,
    prefetch_biases,
    weight_tma,
)
from .permute import SortAndPermute
from .topk_reduce import TopkReduce

_THREADS = 128  # of a warpgroup
_STEP = 16  # elements of a row that one ``wgmma`` takes
_STEPS = SPAN // _STEP
_BOX_STEPS = TOKEN_BOX // _STEP
_SETS = 2  # of registers for decoded words: one is multiplied while the other is written
# Of a thread that loads and of one that multiplies, by the warps that multiply: together what the block starts with.
_REGISTERS = {8: (40, 232), 12: (56, 152)}
_SPANS = BOX // SPAN  # of a weights' stage


@dataclass
class WgmmaSmem(Fixed):
    """A block's shared memory: two rings."""

    weights: Ring  # a box, and its factors
    tokens: Ring
    sW: cute.Tensor  # (rows, bytes, stages)
    sX: cute.Tensor  # (tokens, TOKEN_BOX, boxes of all stages)
    factors: Int32  # address of (stage, part of the rows, span, row, quad)
    results: Int32  # address of (tokens, features) of float32, which are rounded block by block


@dataclass
class Consumer(Fixed):
    """A lane's registers and shared-memory addresses for weights."""

    slots: WgmmaSmem
    lane: Int32
    packed: Int32  # address of its first row's 16 bytes in the first stage
    factors: Int32  # and of that row's factors
    rPacked: cute.Tensor  # (4, 2) words of a span, of both rows
    rFactors: cute.Tensor  # (2) words
    rA: list[cute.Tensor]  # by set: the first operand of a group
    rWords: list[cute.Tensor]  # the same in words


class WgmmaMainloop:
    """``row_step``: from a lane's first row to its second, 1 where first rows are even, or 8."""

    def __init__(self, config: WgmmaConfig, row_step: int):
        self.c, self.row_step = config, row_step
        self.factor_bytes = SPAN // config.block * 2  # of a row in a span

    def mma(self, tokens: int) -> cute.TiledMma:
        return hopper.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (64, tokens),
            warpgroup.OperandSource.RMEM,
        )  # fmt: skip

    def consumer(self, slots: WgmmaSmem, row: Int32) -> Consumer:
        """``row``: of the box, the first of this lane's; the second is ``row_step`` further on."""
        lane, part = cute.arch.lane_idx(), self.c.scaler.rows
        mma = self.mma(self.c.columns)
        shape = mma.partition_shape_A((64, _STEP * self.c.group))
        rA = [mma.make_fragment_A(shape) for _ in range(_SETS)]
        return Consumer(
            slots=slots,
            lane=lane,
            packed=slots.sW.iterator.toint() + row * ROW_BYTES + ((lane % 4) ^ (row & 7)) * 16,
            factors=slots.factors
            + row // part * (_SPANS * part * self.factor_bytes)
            + row % part * self.factor_bytes
            + lane % 4 * (self.factor_bytes // 4),
            rPacked=cute.make_rmem_tensor((4, 2), Uint32),
            rFactors=cute.make_rmem_tensor(2, Uint32),
            rA=rA,
            rWords=[cute.recast_tensor(a, Uint32) for a in rA],
        )

    @cute.jit
    def load(self, w: Consumer, fill: Int32, span: Any):
        """A span of this lane's packed weights and factors, of a full stage of the weights' ring."""
        slot = w.slots.weights.slot(fill)
        packed = (w.packed + slot * self.c.weight_bytes) ^ (span * 64)  # as TMA swizzles them
        factors = w.factors + slot * self.c.factor_bytes + span * (self.c.scaler.rows * self.factor_bytes)
        kind = Uint32 if self.c.format == "nvfp4" else Uint16
        for r in cutlass.range_constexpr(2):
            step = const_expr(r * self.row_step)
            words = load_words((packed ^ (step % 8 * 16)) + step * ROW_BYTES, 4)
            for i in cutlass.range_constexpr(4):
                w.rPacked[i, r] = words[i]
            w.rFactors[r] = Uint32(load_words(factors + step * self.factor_bytes, 1, kind)[0])

    @cute.jit
    def run(self, w: Consumer, tokens: cutlass.Constexpr, k_tiles: Int32, n: Int32, m: Int32, last: cutlass.Boolean):
        """The sums of a work tile by ``wgmma`` of so many tokens, from fill n of the weights' ring on, whose first span
        is loaded, and m of the tokens'. Behind it comes the next work tile's, unless this is the ``last``."""
        c, mma = self.c, self.mma(tokens)
        sX = cute.make_tensor(w.slots.sX.iterator, tokens_layout(c, tokens))
        tB = mma.make_fragment_B(mma.get_slice(cute.arch.thread_idx()[0] % _THREADS).partition_B(sX))
        rSum = cute.make_rmem_tensor(mma.partition_shape_C((64, tokens)), Float32)
        rSum.fill(0.0)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        stages = const_expr(token_stages(c))  # in a k-tile
        for k in cutlass.range(k_tiles, unroll=1):
            end = k == k_tiles - 1
            for span in cutlass.range_constexpr(c.spans):
                self._span(w, mma, rSum, tB, span, n, m, k, end)
                if const_expr(span + 1 < c.spans):
                    self.load(w, n + k, Int32(span + 1))
            self._load_next(w, n, k, end, k_tiles, last)
        warpgroup.wait_group(0)
        cute.arch.sync_warp()
        over = const_expr((c.spans * _STEPS - _SETS * c.group) // (_BOX_STEPS * c.token_boxes))  # were released
        for i in cutlass.range_constexpr(stages - over, 0, -1):
            self._release(w, w.slots.tokens, m + stages * k_tiles - i, True)
        return rSum

    @cute.jit
    def _span(
        self, w: Consumer, mma: cute.TiledMma, rSum: cute.Tensor, tB: cute.Tensor, span: cutlass.Constexpr, n: Int32,
        m: Int32, k: Int32, end: cutlass.Boolean,
    ):  # fmt: skip
        """A span of k-tile k, whose weights and factors are loaded."""
        c, stages, stage_steps = self.c, const_expr(token_stages(self.c)), const_expr(_BOX_STEPS * self.c.token_boxes)
        factors = [self._pair(w.rFactors[r]) for r in range(2)]
        for group in cutlass.range_constexpr(_STEPS // c.group):
            first = const_expr(span * _STEPS + group * c.group)  # step of the k-tile
            x = m + stages * k + first // stage_steps
            if const_expr(c.group == _BOX_STEPS and group == 0):  # all of the span, lest products wait for each other
                for i in cutlass.range_constexpr(_STEPS // stage_steps):
                    w.slots.tokens.wait(x + i)
            elif const_expr(c.group < _BOX_STEPS and first % stage_steps == 0):
                w.slots.tokens.wait(x)
            # The group before the last is over: its registers are free, and maybe the tokens that it read.
            warpgroup.wait_group(_SETS - 1)
            over = const_expr(first - c.group)  # steps of this k-tile that are over; before the first, of the last
            if const_expr(group == 1 or over % stage_steps == 0):
                cute.arch.sync_warp()
            if const_expr(group == 1 and c.spans == _SPANS and span == _SPANS - 1):
                self._release(w, w.slots.weights, n + k, True)
            elif const_expr(group == 1 and c.spans < _SPANS):
                self._release(w, w.slots.weights, n + k // _SPANS, (k % _SPANS == _SPANS - 1) | end)
            if const_expr(over % stage_steps == 0):
                done = stages * k + over // stage_steps - 1
                if const_expr(over > 0):
                    self._release(w, w.slots.tokens, m + done, True)
                else:
                    self._release(w, w.slots.tokens, m + cutlass.max(done, 0), done >= 0)
            for i in cutlass.range_constexpr(c.group):
                self._decode(w, factors, group % _SETS, i, group * c.group + i)
            warpgroup.fence()
            for i in cutlass.range_constexpr(c.group):
                box = w.slots.tokens.slot(x) * c.token_boxes + (first + i) % stage_steps // _BOX_STEPS
                rB = tB[None, None, (first + i) % _BOX_STEPS, box]
                cute.gemm(mma, rSum, w.rA[group % _SETS][None, None, i], rB, rSum)
            warpgroup.commit_group()

    @cute.jit
    def _load_next(self, w: Consumer, n: Int32, k: Int32, end: cutlass.Boolean, k_tiles: Int32, last: cutlass.Boolean):
        """The first span behind k-tile k; behind the very last, any that is loaded."""
        none = cutlass.select_(end & last, Int32(1), Int32(0))
        if const_expr(self.c.spans == _SPANS):
            fill, span = n + k + 1 - none, Int32(0)
        else:
            after = cutlass.select_(end, (k_tiles + 1) // _SPANS * _SPANS, k + 1)
            fill, span = n + after // _SPANS - none, after % _SPANS
        w.slots.weights.wait(fill)
        self.load(w, fill, span)

    def _release(self, w: Consumer, ring: Ring, fill: Int32, condition: Any) -> None:
        """``Ring.release``, where ``condition`` holds."""
        predicate = cutlass.select_((w.lane == 0) & condition, Int32(1), Int32(0))
        memory_ops.arrive_if((ring.empty + ring.slot(fill)).toint(), predicate)

    def _decode(self, w: Consumer, factors: list[tuple[Uint32, Uint32]], set_: int, k_step: int, step: int) -> None:
        """A k-step of packed weights, half a word of both rows, to its registers of a set."""
        word, half = step // 2, step % 2
        for r in range(2):
            pairs = decode(w.rPacked[word, r], factors[r][word // 2])[2 * half : 2 * half + 2]
            for i in range(2):
                w.rWords[set_][(0, r, i), 0, k_step] = pairs[i]

    def _pair(self, factors: Uint32) -> tuple[Uint32, Uint32]:
        """Of a row's 32 elements, the first and the second 16."""
        if self.c.format == "nvfp4":
            return both_of_two(factors)
        return both(factors), both(factors)


def token_stages(config: WgmmaConfig) -> int:
    """Of a k-tile."""
    return config.spans * SPAN // (config.token_boxes * TOKEN_BOX)


def weight_fills(config: WgmmaConfig, k_tiles: Int32) -> Int32:
    """Of the weights' ring in so many k-tiles."""
    return k_tiles if config.spans == _SPANS else (k_tiles + _SPANS - 1) // _SPANS


def tokens_layout(config: WgmmaConfig, tokens: int) -> cute.Layout:
    """(tokens, TOKEN_BOX, boxes of all stages) of so many first tokens of the tokens' ring, whose boxes have room for
    the widest work tile."""
    return cute.make_layout(
        ((8, tokens // 8), (TOKEN_BOX, 1), config.token_stages * config.token_boxes),
        stride=((TOKEN_BOX, 8 * TOKEN_BOX), (1, 0), config.columns * TOKEN_BOX),
    )


class WgmmaGemm:
    """The kernel of one GEMM, by warp roles. ``scheduler`` gives a CTA its tiles of ``tensors``, which only it and
    ``results`` look into; without ``paired`` it is called before the launch before has written. ``reduce``: what
    consumers do behind their last tile.
    """

    def __init__(
        self, config: WgmmaConfig, results: Any, scheduler: Any = static_scheduler, reduce: TopkReduce | None = None
    ):
        self.c, self.results, self.scheduler, self.reduce = config, results, scheduler, reduce
        self.mainloop, self.factors = WgmmaMainloop(config, results.row_step), ScaleLoader(config.scaler)

    @cute.jit
    def launch(
        self, tensors: Any, flags: Flags, weights: Matrices, rows: cute.Tensor, scalars: Any, blocks: Int32,
        stream: Any,
    ):  # fmt: skip
        self.kernel(
            tensors, flags, weights, scalars, weight_tma(self.c, flags, weights) if self.c.by_tma else None,
            self._token_loads(rows),
        ).launch(
            grid=[blocks, 1, 1], block=[self.c.threads, 1, 1], stream=stream, min_blocks_per_mp=1,
            preferred_smem_carveout=100, use_pdl=True,
        )  # fmt: skip

    def _token_loads(self, rows: cute.Tensor) -> list[TmaLoads]:
        """Of rows of tokens, (slots, columns), by width."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        made = []
        for tokens in self.c.token_widths:
            box = (tokens, TOKEN_BOX)
            tile = cute.tile_to_shape(atom, box, order=(0, 1))
            made.append(TmaLoads(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), rows, tile, box)))
        return made

    @cute.kernel
    def kernel(
        self, tensors: Any, flags: Flags, weights: Matrices, scalars: Any, packed: TmaLoads, tokens: list[TmaLoads]
    ):
        c = self.c
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator()
        slots = self._slots(memory, warp)
        shares = self.reduce.share(memory) if self.reduce else None
        if warp == c.row_warps:
            if const_expr(c.by_tma):
                cpasync.prefetch_descriptor(packed.atom)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        if const_expr(c.paired):
            # Only now may the next launch begin: what it then reads without waiting, the work tiles, is there.
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        share = self.scheduler(tensors, (Int32(weights.packed.shape[1]) + c.rows - 1) // c.rows)
        k_tiles = (Int32(weights.packed.shape[2]) * 2 + c.spans * SPAN - 1) // (c.spans * SPAN)
        if warp < c.row_warps:
            cute.arch.setmaxregister_increase(_REGISTERS[c.row_warps][1])
            if const_expr(self.reduce is not None):
                if cute.arch.thread_idx()[0] == 0:
                    self.reduce.begin(tensors)
            self._consume(tensors, flags, weights, scalars, share, k_tiles, slots, warp)
            if const_expr(self.reduce is not None):
                self.reduce.run(tensors, shares, warp)
        else:
            cute.arch.setmaxregister_decrease(_REGISTERS[c.row_warps][0])
            if warp == c.row_warps:
                if const_expr(c.by_tma):
                    self._load_weights(tensors, packed, share, k_tiles, slots)
                else:
                    self._copy_weights(tensors, flags, weights, share, k_tiles, slots)
            elif warp == c.row_warps + 1:
                self._load_tokens(tensors, tokens, share, k_tiles, slots)
            else:
                self._load_factors(tensors, flags, weights, share, k_tiles, slots, warp - c.row_warps - 2)

    @cute.jit
    def _slots(self, memory: Any, warp: Int32):
        c = self.c
        table = (
            ("weights", c.weight_stages, c.code_arrivals + SCALERS, c.row_warps),
            ("tokens", c.token_stages, 1, c.row_warps),
        )
        named = rings(memory, warp, table)
        boxes = cute.make_layout(c.weight_stages, stride=c.weight_bytes)
        swizzle = cute.make_swizzle(3, 4, 3)
        return WgmmaSmem(
            weights=named["weights"],
            tokens=named["tokens"],
            sW=memory.allocate_tensor(Uint8, cute.append(box_layout(c), boxes), 1024, swizzle=swizzle),
            sX=memory.allocate_tensor(BFloat16, tokens_layout(c, c.columns), 1024, swizzle=swizzle),
            factors=memory.allocate(c.weight_stages * c.factor_bytes, 128).toint(),
            results=memory.allocate(c.result_bytes, 128).toint() if c.result_bytes else Int32(0),
        )

    @cute.jit
    def _load_weights(self, tensors: Any, packed: TmaLoads, share: Any, k_tiles: Int32, slots: WgmmaSmem):
        c = self.c
        n = Int32(0)
        for tile_idx in cutlass.range(share.count, unroll=1):
            tile = share.tile(tensors, tile_idx)
            gW = cute.local_tile(packed.rows[None, None, tile.expert], (box_rows(c), ROW_BYTES), (None, None))
            tWs, tWg = copies.tma_partition(packed.atom, 0, 1, slots.sW, gW)
            for k in cutlass.range(weight_fills(c, k_tiles), unroll=1):
                full = slots.weights.acquire(n, c.weight_bytes)
                cute.copy(packed.atom, tWg[None, tile.row, k], tWs[None, slots.weights.slot(n)], tma_bar_ptr=full)
                n += 1

    @cute.jit
    def _copy_weights(
        self, tensors: Any, flags: Flags, weights: Matrices, share: Any, k_tiles: Int32, slots: WgmmaSmem
    ):
        """The same by cp.async, where rows start or end amid 16 bytes."""
        n = Int32(0)
        for tile_idx in cutlass.range(share.count, unroll=1):
            tile = share.tile(tensors, tile_idx)
            for k in cutlass.range(weight_fills(self.c, k_tiles), unroll=1):
                full = slots.weights.await_empty(n)
                box = slots.sW.iterator.toint() + slots.weights.slot(n) * self.c.weight_bytes
                copy_packed(self.c, flags, weights, tile, k, box, full)
                n += 1
        await_copies()

    @cute.jit
    def _load_tokens(self, tensors: Any, loads: list[TmaLoads], share: Any, k_tiles: Int32, slots: WgmmaSmem):
        """Rows behind a tile's last are those of the next expert, or beyond the tensor and zeros: their results are not
        used."""
        c = self.c
        if const_expr(not c.paired):  # weights may come before h is there
            cute.arch.griddepcontrol_wait()
        m = Int32(0)
        for tile_idx in cutlass.range(share.count, unroll=1):
            tile = share.tile(tensors, tile_idx)
            least = 0
            for i in cutlass.range_constexpr(len(c.token_widths)):
                tokens = const_expr(c.token_widths[i])
                if (tile.columns > least) & (tile.columns <= tokens):
                    sX = cute.make_tensor(slots.sX.iterator, tokens_layout(c, tokens))
                    rows = cute.domain_offset((tile.first, 0), loads[i].rows)
                    gX = cute.local_tile(rows, (tokens, TOKEN_BOX), (0, None))
                    tXs, tXg = copies.tma_partition(loads[i].atom, 0, 1, sX, gX)
                    for k in cutlass.range(k_tiles * token_stages(c), unroll=1):
                        full = slots.tokens.acquire(m + k, tokens * TOKEN_BOX * 2 * c.token_boxes)
                        for box in cutlass.range_constexpr(c.token_boxes):
                            tX = tXs[None, slots.tokens.slot(m + k) * c.token_boxes + box]
                            cute.copy(loads[i].atom, tXg[None, k * c.token_boxes + box], tX, tma_bar_ptr=full)
                least = tokens
            m += k_tiles * token_stages(c)

    @cute.jit
    def _load_factors(
        self, tensors: Any, flags: Flags, weights: Matrices, share: Any, k_tiles: Int32, slots: WgmmaSmem, part: Int32
    ):
        """Half of the rows of every stage."""
        lane = cute.arch.lane_idx()
        target = slots.factors + part * self.c.scaler.factor_bytes
        fills = weight_fills(self.c, k_tiles)
        n = Int32(0)
        for tile_idx in cutlass.range(share.count, unroll=1):
            tile = share.tile(tensors, tile_idx)
            if part == 0:
                prefetch_biases(self.c, flags, weights, tile, lane)
            for k in cutlass.range(fills, unroll=1):
                # What follows from the tile is worked out anew, for these warps have few registers.
                fresh = tile._replace(row=op.fresh(tile.row * SCALERS + part))
                rS = self.factors.load(flags, weights, fresh, k, lane)
                full = slots.weights.await_empty(n + k)
                self.factors.store(rS, lane, target + slots.weights.slot(n + k) * self.c.factor_bytes)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(full)
            n += fills

    @cute.jit
    def _consume(
        self, tensors: Any, flags: Flags, weights: Matrices, scalars: Any, share: Any, k_tiles: Int32,
        slots: WgmmaSmem, warp: Int32,
    ):  # fmt: skip
        w = self.mainloop.consumer(slots, self.results.row(warp, cute.arch.lane_idx()))
        n, m = Int32(0), Int32(0)
        if share.count > 0:
            slots.weights.wait(n)
            self.mainloop.load(w, n, Int32(0))
        for tile_idx in cutlass.range(share.count, unroll=1):
            # Known to be the same in all lanes, it takes none of their registers.
            tile = WorkTile(*(cute.arch.make_warp_uniform(n) for n in share.tile(tensors, tile_idx)))
            last = tile_idx == share.count - 1
            # Before the sums: they leave a division few registers.
            factor = output_scale(self.c, flags, weights, tile.expert)
            least = 0
            for i in cutlass.range_constexpr(len(self.c.token_widths)):
                tokens = const_expr(self.c.token_widths[i])
                if (tile.columns > least) & (tile.columns <= tokens):
                    rSum = self.mainloop.run(w, tokens, k_tiles, n, m, last)
                    share.prefetch(tensors, tile_idx + 1)
                    self.results.run(
                        tensors, scalars, rSum, tile, factor, tokens, slots.results, warp, op.thread_index() % 32
                    )  # fmt: skip
                least = tokens
            n += weight_fills(self.c, k_tiles)
            m += k_tiles * token_stages(self.c)


class WgmmaExperts:
    """The launches of a call."""

    def __init__(self, up: WgmmaConfig, down: WgmmaConfig, experts: int, rounded: Any):
        self.begin = SortAndPermute(up.columns, experts, rounded, up.token_vector)
        self.up = WgmmaGemm(up, WgmmaSwiglu(up) if rounded is None else WgmmaSwigluQuantize(up, rounded))
        self.down = WgmmaGemm(down, WgmmaStore(down), reduce=TopkReduce(down.row_warps))

    @cute.jit
    def __call__(
        self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, sort_blocks: Int32, up_blocks: Int32,
        down_blocks: Int32, stream: Any,
    ):  # fmt: skip
        """``x``: (slots, whole spans), to be written, as ``Tensors.h`` is."""
        self.begin.launch(tensors, x, scalars, sort_blocks, stream)
        self.up.launch(tensors, scalars.up, tensors.up, x, scalars, up_blocks, stream)
        self.down.launch(tensors, scalars.down, tensors.down, tensors.h, scalars, down_blocks, stream)


def trace(
    arch: str, *, dtype: str, index_dtype: str, format: str, activations: str, experts: int,
    scale_vectors: tuple[int, int], code_alignment: int, token_widths: tuple[int, ...], group: int, warps: int,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """The same for many tokens an expert; ``token_widths`` and ``group`` as in ``WgmmaConfig``, ``warps``
    those that multiply."""
    up, down = (
        WgmmaConfig(
            format, warps, dtype, activations, token_widths[-1], paired, vector, code_alignment, token_widths, group
        )
        for paired, vector in zip((True, False), scale_vectors, strict=True)
    )
    tensors, scalars, up_blocks, down_blocks, stream = arguments(dtype, index_dtype, code_alignment)
    x = fake.tensor("bf16", (None, None), (fake.dim(8), 1))
    return WgmmaExperts(up, down, experts, FAKE_QUANTIZE[activations]), [
        tensors, x, scalars, up_blocks, up_blocks, down_blocks, stream,
    ]  # fmt: skip


assert _SETS == 2 and LOADERS == 2 + SCALERS
