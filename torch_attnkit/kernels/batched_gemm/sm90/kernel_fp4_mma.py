"""Batched GEMM of FP4 for up to 32 tokens on Hopper by ``mma.sync``, in one launch: weights are read once, by all SMs.

    a warp of every 64 rows   loads packed weights by TMA, beside its other work; full 1 arrival, empty its rows' warps
    all warps                 dequantise activations to shared memory; then weights to registers (operand A), multiply

The CTAs of a cluster have the same rows and a slice of K each (split-K), whose activations stay in shared memory;
warps of the same rows take its boxes in turn. Partial sums are reduced through shared memory and DSMEM: every CTA sums
some of the rows, in a fixed order. A lane prefetches the scales of its rows to registers. No warp only loads: with 16
warps a thread has 128 registers, with 17 it has 96. Decoding is that of ``cuda/fp4_weights.py``. For up to 4 tokens
``kernel_fp4_e4m3.py`` overrides parts; docs/kernels/batched_gemm.md has what limits it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint16, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from torch_attnkit.cuda import copies, fake, fp4
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.fp4 import permute_bytes
from torch_attnkit.cuda.fp4_weights import LOWERED, both, both_of_two, decode, factors_of_e4m3, factors_of_e8m0
from torch_attnkit.cuda.ring import Fixed, Ring

from ...grouped_gemm.arguments import Matrices
from ...grouped_gemm.problem import BLOCK, SPAN
from ...grouped_gemm.sm90.config import BOX, CODE_ALIGNMENT
from ...grouped_gemm.sm90.load_weights import ROW_BYTES, TmaLoads
from ...grouped_gemm.sm90.mainloop_mma import row_of
from ...grouped_gemm.weight_scales import load_words
from ...grouped_gemm.work_tiles import WorkTile
from .fp4_activations import Fp4Activations, fake_operands
from .plan import FEW_BOX_ROWS, FewTokens

_SPANS = BOX // SPAN  # of a box
_EACH = 4  # results that a thread adds up and stores together
_QUADS = 8  # of a warp, each with a span of a token
_IN_FLIGHT = 4  # spans that a quad loads before it decodes one


@dataclass
class Fp4Smem(Fixed):
    """A block's shared memory."""

    ring: Ring  # of the first 64 rows; the next rows' barriers follow
    sW: cute.Tensor  # (64 rows, bytes, stages of all rows)
    tokens: Int32  # address of (tokens, elements of the slice); then of sums, (parts, tokens, rows) of float32


class Fp4Mma:
    """``divisors``: which of o and the weights have a global scale; ``even``: whether four results are stored at
    once."""

    def __init__(self, config: FewTokens, tokens: Fp4Activations, divisors: tuple[bool, bool], even: bool):
        self.c, self.tokens, self.divisors, self.even = config, tokens, divisors, even
        self.block = BLOCK[config.format]

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,  # (T, G, K/2)
        mScale: cute.Tensor,  # (G, T, blocks), or each group's in the 128x4 layout
        mOGlobal: cute.Tensor,  # (1)
        mWeightGlobal: cute.Tensor,  # (1)
        weights: Matrices,
        mOut: cute.Tensor,  # (T, G, N), contiguous
        stream: Any,
    ):
        c = self.c
        tiles = (Int32(mOut.shape[2]) + (c.rows - 1)) // c.rows
        self.kernel(mO, mScale, mOGlobal, mWeightGlobal, weights, self._loads(weights.packed), mOut).launch(
            grid=[c.slices * tiles, Int32(mOut.shape[1]), 1], block=[c.threads, 1, 1], cluster=[c.slices, 1, 1],
            stream=stream, min_blocks_per_mp=c.resident, preferred_smem_carveout=100, use_pdl=c.early,
        )  # fmt: skip

    def _box(self) -> cute.Layout:
        return cute.make_layout((FEW_BOX_ROWS, ROW_BYTES), stride=(ROW_BYTES, 1))

    def _loads(self, packed: cute.Tensor) -> TmaLoads:
        rows = cute.make_tensor(packed.iterator, cute.select(packed.layout, mode=[1, 2, 0]))
        tile = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, self._box())
        load = cpasync.CopyBulkTensorTileG2SOp()
        return TmaLoads(*cpasync.make_tiled_tma_atom(load, rows, tile, (FEW_BOX_ROWS, ROW_BYTES)))

    @cute.kernel
    def kernel(
        self, mO: cute.Tensor, mScale: cute.Tensor, mOGlobal: cute.Tensor, mWeightGlobal: cute.Tensor,
        weights: Matrices, loads: TmaLoads, mOut: cute.Tensor,
    ):  # fmt: skip
        c = self.c
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, group, _ = cute.arch.block_idx()
        slice_ = block % c.slices
        tile = WorkTile(group, Int32(0), Int32(mO.shape[0]), block // c.slices)
        shared = self._shared(warp)
        first = slice_ * c.boxes
        boxes = (Int32(weights.packed.shape[2]) + (ROW_BYTES - 1)) // ROW_BYTES - first
        boxes = cutlass.min(cutlass.max(boxes, Int32(0)), Int32(c.boxes))
        if warp == 0:
            cpasync.prefetch_descriptor(loads.atom)
        self._prefetch(weights, tile, first)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        if const_expr(c.resident == 1):
            cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        rSum = self._sums()
        rSum.fill(0.0)
        self._multiply(rSum, mO, mScale, weights, loads, tile, first, boxes, shared, warp)
        cute.arch.barrier()  # sums alias the tokens' buffer
        self._store_sums(rSum, shared.tokens, warp)
        self._sync()
        self._reduce(mOGlobal, mWeightGlobal, mOut, tile, slice_, shared.tokens)
        if const_expr(c.slices > 1):
            self._sync()  # none may leave while others read its memory

    def _prefetch(self, weights: Matrices, tile: WorkTile, first: Int32) -> None:
        """What is prefetched to L2 while the launch before ends."""

    def _sums(self) -> cute.Tensor:
        """This thread's, of its warp's boxes."""
        return cute.make_rmem_tensor(cute.make_layout((4, self.c.columns // 8, self.c.warp_tiles)), Float32)

    def _output_scale(self) -> float:
        """The factor of the sums."""
        return 2.0 ** LOWERED[self.c.format]

    def _sync(self) -> None:
        """All threads of the cluster."""
        if const_expr(self.c.slices > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier()

    @cute.jit
    def _shared(self, warp: Int32):
        c, memory = self.c, cutlass.memory.SmemAllocator()
        addrs = const_expr(c.stages * c.teams)
        full, empty = (memory.allocate_array(cutlass.Int64, addrs) for _ in range(2))
        thread = cute.arch.thread_idx()[0]
        if thread < addrs:
            cute.arch.mbarrier_init(full + thread, 1)
            cute.arch.mbarrier_init(empty + thread, c.row_warps // c.teams)
        boxes = cute.append(self._box(), cute.make_layout(addrs, stride=FEW_BOX_ROWS * ROW_BYTES))
        return Fp4Smem(
            ring=Ring(full, empty, c.stages),
            sW=memory.allocate_tensor(Uint8, boxes, 1024, swizzle=cute.make_swizzle(3, 4, 3)),
            tokens=memory.allocate(c.fixed_bytes, 1024).toint(),
        )

    def _ring(self, shared: Fp4Smem, team: Any) -> Ring:
        """Of one 64 rows."""
        first = team * self.c.stages
        return Ring(shared.ring.full + first, shared.ring.empty + first, self.c.stages)

    @cute.jit
    def _load(self, loads: TmaLoads, tile: WorkTile, team: Int32, first: Int32, k: Int32, shared: Fp4Smem):
        """The slice's ``k``-th box of a team's rows, when its stage is empty."""
        c, ring = self.c, self._ring(shared, team)
        gW = cute.local_tile(loads.rows[None, None, tile.expert], (FEW_BOX_ROWS, ROW_BYTES), (None, None))
        tWs, tWg = copies.tma_partition(loads.atom, 0, 1, shared.sW, gW)
        full = ring.acquire(k, FEW_BOX_ROWS * ROW_BYTES)
        to = tWs[None, team * c.stages + ring.slot(k)]
        cute.copy(loads.atom, tWg[None, tile.row * c.teams + team, first + k], to, tma_bar_ptr=full)

    @cute.jit
    def _multiply(
        self, rSum: cute.Tensor, mO: cute.Tensor, mScale: cute.Tensor, weights: Matrices, loads: TmaLoads,
        tile: WorkTile, first: Int32, boxes: Int32, shared: Fp4Smem, warp: Int32,
    ):  # fmt: skip
        """This warp's rows times all tokens, of its part of the CTA's slice of K: every so many-th box. The first warp
        of a team's part loads the part's first boxes, and further ones into stages that it has read."""
        c = self.c
        warps_of_team = const_expr(c.row_warps // c.teams)
        part, row_warp = warp // c.row_warps, warp % c.row_warps
        team = row_warp // warps_of_team
        ring = self._ring(shared, team)
        loading = row_warp % warps_of_team == 0
        if loading:
            for k in cutlass.range(part, cutlass.min(boxes, Int32(c.stages)), c.parts, unroll=1):
                self._load(loads, tile, team, first, k, shared)
        if const_expr(c.resident > 1):  # whose blocks start beside this one, and prefetch their own weights
            cute.arch.griddepcontrol_launch_dependents()
        loaded = self._load_tokens(mO, mScale, tile, first)
        starts = self._starts(weights, tile, row_warp)
        rNext = self._scales_ahead(weights, starts, first, part, boxes)
        self._store_tokens(loaded, mO, mScale, tile, first, boxes, shared, warp)
        cute.arch.barrier()
        operands = self._operands(shared, tile.columns)
        local = row_warp % warps_of_team * (16 * c.warp_tiles) + row_of(cute.arch.lane_idx())
        for some in cutlass.range(part, boxes, c.ahead * c.parts, unroll=1):
            rScale = [cute.make_rmem_tensor_like(r) for r in rNext]
            _copy(rNext, rScale)
            _copy(self._scales_ahead(weights, starts, first, some + c.ahead * c.parts, boxes), rNext)
            for i in cutlass.range_constexpr(c.ahead):
                k = some + i * c.parts
                if k < boxes:
                    ring.wait(k)
                    box = shared.sW.iterator.toint() + (team * c.stages + ring.slot(k)) * (FEW_BOX_ROWS * ROW_BYTES)
                    rBox = rScale[i * 2 * c.warp_tiles : (i + 1) * 2 * c.warp_tiles]
                    self._multiply_box(rSum, rBox, operands, box, local, k, shared)
                    cute.arch.sync_warp()
                    if const_expr(c.stages < c.boxes):
                        ring.release(k)
                        if loading & (k + c.stages < boxes):
                            self._load(loads, tile, team, first, k + c.stages, shared)

    def _load_tokens(self, mO: cute.Tensor, mScale: cute.Tensor, tile: WorkTile, first: Int32) -> Any:
        """This thread's part of the tokens, in flight to registers, if it has enough of them."""

    @cute.jit
    def _store_tokens(
        self, loaded: Any, mO: cute.Tensor, mScale: cute.Tensor, tile: WorkTile, first: Int32, boxes: Int32,
        shared: Fp4Smem, warp: Int32,
    ):  # fmt: skip
        """All tokens of the slice to shared memory. A quad of lanes has a span of a token at a time, and loads several
        before it decodes the first. There are ``tile.columns`` tokens."""
        c, lane = self.c, cute.arch.lane_idx()
        spans = boxes * _SPANS
        units = spans * tile.columns
        in_flight = const_expr(min(_IN_FLIGHT, -(-c.boxes * _SPANS * c.columns // (c.warps * _QUADS))))
        for start in cutlass.range(warp * _QUADS, units, c.warps * _QUADS * in_flight, unroll=1):
            found = []
            for i in cutlass.range_constexpr(in_flight):
                unit = start + i * (c.warps * _QUADS) + lane // 4
                span_idx = first * _SPANS + unit % spans
                found.append(self.tokens.read(mO, mScale, tile.expert, unit // spans, span_idx, unit < units, lane % 4))
            for i in cutlass.range_constexpr(in_flight):
                if start + i * (c.warps * _QUADS) < units:
                    words = self.tokens.permuted(*found[i], lane % 4)
                    unit = start + i * (c.warps * _QUADS) + lane // 4
                    if unit < units:
                        at = shared.tokens + unit // spans * c.row_bytes + unit % spans * (SPAN * 2) + lane % 4 * 16
                        for w in cutlass.range_constexpr(4):
                            copies.store_words(at + 64 * w, words[w], cute.AddressSpace.smem)

    def _operands(self, shared: Fp4Smem, count: Int32) -> Any:
        """Addresses of operand B: where the lane reads of every 8 tokens. Columns behind the last token repeat it:
        their sums are not stored."""
        lane = cute.arch.lane_idx()
        tokens = (cutlass.min(lane % 8 + 8 * g, count - 1) for g in range(self.c.columns // 8))
        return [token * self.c.row_bytes + lane // 8 * 16 for token in tokens]

    @cute.jit
    def _multiply_box(
        self, rSum: cute.Tensor, rScale: list[cute.Tensor], operands: Any, box: Int32, local: Int32, k: Int32,
        shared: Fp4Smem,
    ):  # fmt: skip
        """The slice's ``k``-th box, which is loaded. ``local``: the lane's first row of it."""
        for span in cutlass.range_constexpr(_SPANS):
            self._span(rSum, rScale, box, local, span, shared.tokens + k * (BOX * 2), operands)

    @cute.jit
    def _starts(self, weights: Matrices, tile: WorkTile, row_warp: Int32) -> tuple[Int64, list[Int32]]:
        """The address of the scales of the block's first row (of the first of its tiles of 128x4), and how far behind
        it those of each of the lane's rows begin; rows behind the last have the last one's."""
        c, scale = self.c, weights.scale
        first, last = tile.row * c.rows, Int32(weights.packed.shape[1]) - 1
        row = first + row_warp * (16 * c.warp_tiles) + row_of(cute.arch.lane_idx())
        rows = [cutlass.min(row + 8 * i, last) for i in range(2 * c.warp_tiles)]
        base = scale.iterator.toint() + Int64(tile.expert) * scale.stride[0]
        if const_expr(self.tokens.swizzled):
            step = Int32(scale.shape[2]) * 128
            base += Int64(first // 128) * step
            return base, [(r // 128 - first // 128) * step + r % 32 * 16 + r % 128 // 32 * 4 for r in rows]
        else:
            return base + Int64(first) * scale.stride[1], [(r - first) * Int32(scale.stride[1]) for r in rows]

    def _scales_ahead(
        self, weights: Matrices, starts: tuple[Int64, list[Int32]], first: Int32, k: Int32, boxes: Int32
    ) -> list[cute.Tensor]:
        """Of the part's next boxes from the slice's ``k``-th on, box by box."""
        ks = [k + i * self.c.parts for i in range(self.c.ahead)]
        return [r for k in ks for r in self._scales(weights, starts, first + k, k < boxes)]

    def _scales(
        self, weights: Matrices, starts: tuple[Int64, list[Int32]], box: Int32, inside: cutlass.Boolean
    ) -> list[cute.Tensor]:
        """A box's scales of each row: of either span the word in which those of the lane's elements are. Zeros unless
        ``inside``, and behind K."""
        words = SPAN // self.block // 4  # of a span
        blocks = cutlass.select_(inside, Int32(weights.packed.shape[2]) * 2 // self.block, Int32(0))
        rScale = [cute.make_rmem_tensor(_SPANS, Uint32) for _ in starts[1]]
        for span in range(_SPANS):
            word = (box * _SPANS + span) * words + cute.arch.lane_idx() % 4 * words // 4
            for r, start in zip(rScale, starts[1], strict=True):
                r[span] = self._word(starts[0] + start, word, blocks - word * 4)
        return rScale

    @cute.jit
    def _word(self, start: Int64, word: Int32, left: Int32) -> Uint32:
        """Four scales of a row, of which the first ``left`` count."""
        nbytes = const_expr(min(self.c.scale_vector, 4))
        swizzled = const_expr(self.tokens.swizzled)
        kind = {1: Uint8, 2: Uint16, 4: Uint32}[nbytes]
        addr, found = start + word * (512 if swizzled else 4), Uint32(0)
        for i in cutlass.range_constexpr(0, 4, nbytes):
            if left > i:
                pointer = cute.make_ptr(kind, addr + i, cute.AddressSpace.gmem, assumed_align=nbytes)
                found = found | (Uint32(copies.scalar(pointer)) << (8 * i))
        if const_expr(swizzled):
            found = cutlass.select_(left >= 4, found, found & ((Uint32(1) << Uint32(8 * (left & 3))) - 1))
        return found

    @cute.jit
    def _span(
        self, rSum: cute.Tensor, rScale: list[cute.Tensor], box: Int32, local: Int32, span: cutlass.Constexpr,
        tokens: Int32, rows: list[Int32],
    ):  # fmt: skip
        """Half of a box. ``local``: the lane's first row of the box; ``tokens``: address of the box's first elements;
        ``rows``: what the lane reads of them."""
        c, lane = self.c, cute.arch.lane_idx()
        packed, factors = [], []
        for m in cutlass.range_constexpr(c.warp_tiles):
            at = box + (local + 16 * m) * ROW_BYTES + ((lane % 4 + span * 4) ^ (local & 7)) * 16
            packed.append([load_words(at + 8 * r * ROW_BYTES, 4) for r in range(2)])
            factors.append(self._factors(rScale[2 * m], rScale[2 * m + 1], span, lane % 4))
        for word in cutlass.range_constexpr(4):
            rB = [op.ldmatrix_x4(tokens + row + span * (SPAN * 2) + word * 64) for row in rows]
            for m in cutlass.range_constexpr(c.warp_tiles):
                a, b = (decode(packed[m][r][word], factors[m][r][word // 2]) for r in range(2))
                for i in cutlass.range_constexpr(0, 4, 2):
                    for g in cutlass.range_constexpr(c.columns // 8):
                        left = (a[i], b[i], a[i + 1], b[i + 1])
                        new = op.mma_m16n8k16(BFloat16, left, rB[g][i : i + 2], [rSum[x, g, m] for x in range(4)])
                        for x in cutlass.range_constexpr(4):
                            rSum[x, g, m] = new[x]

    def _factors(self, r0: cute.Tensor, r1: cute.Tensor, span: int, quarter: Int32) -> list[tuple[Uint32, Uint32]]:
        """Of both rows the factors of a lane's first and last 16 elements, from the box's scales of the rows."""
        if self.c.format == "nvfp4":
            selector = cutlass.select_(quarter % 2 == 0, Int32(0x5410), Int32(0x7632))
            four = Uint32(permute_bytes(Int32(r0[span]), Int32(r1[span]), selector))
            return [both_of_two(pair) for pair in factors_of_e4m3(four)]
        two = Uint32(permute_bytes(Int32(r0[span]), Int32(r1[span]), quarter * 0x11 + 0x40))
        pair = factors_of_e8m0(two)[0]
        return [(both(half), both(half)) for half in (pair & 0xFFFF, pair >> 16)]

    @cute.jit
    def _store_sums(self, rSum: cute.Tensor, sums: Int32, warp: Int32):
        """A warp's partial sums to shared memory for the cluster."""
        c, lane = self.c, cute.arch.lane_idx()
        row = warp % c.row_warps * (16 * c.warp_tiles) + row_of(lane)
        at = sums + ((warp // c.row_warps * c.columns + lane % 4 * 2) * c.sum_pitch + row) * 4
        for m in cutlass.range_constexpr(c.warp_tiles):
            for g in cutlass.range_constexpr(c.columns // 8):
                for x in cutlass.range_constexpr(4):
                    addr = at + ((8 * g + x % 2) * c.sum_pitch + 16 * m + x // 2 * 8) * 4
                    pointer = cute.make_ptr(Float32, addr, cute.AddressSpace.smem, assumed_align=4)
                    cute.make_tensor(pointer, cute.make_layout(1))[0] = rSum[x, g, m]

    @cute.jit
    def _reduce(
        self, mOGlobal: cute.Tensor, mWeightGlobal: cute.Tensor, mOut: cute.Tensor, tile: WorkTile, slice_: Int32,
        sums: Int32,
    ):  # fmt: skip
        """This CTA's share of the rows: sums of all parts of all slices, times the factor that weights were lowered by,
        divided by global scales, rounded and stored."""
        c = self.c
        fours = const_expr(c.rows // c.slices // _EACH)
        for unit in cutlass.range(cute.arch.thread_idx()[0], tile.columns * fours, c.threads, unroll=1):
            token, row = unit // fours, (slice_ * fours + unit % fours) * _EACH
            at = sums + (token * c.sum_pitch + row) * 4
            addrs = [at + part * (c.columns * c.sum_pitch * 4) for part in range(c.parts)]
            if const_expr(c.slices == 1):
                parts = [load_words(addr, 4, Float32) for addr in addrs]
            else:
                parts = [
                    op.load_cluster_floats(4, op.cluster_address(addr, Int32(i)), Int32(1))
                    for i in range(c.slices) for addr in addrs
                ]  # fmt: skip
            results = []
            for j in cutlass.range_constexpr(_EACH):
                y = parts[0][j]
                for part in parts[1:]:
                    y = y + part[j]
                y = y * Float32(self._output_scale())
                for given, divisor in zip(self.divisors, (mOGlobal, mWeightGlobal), strict=True):
                    y = fp4.divide(y, divisor[0]) if const_expr(given) else y
                results.append(y.to(mOut.element_type))
            feature = tile.row * c.rows + row
            out = mOut.iterator + ((Int64(token) * mOut.shape[1] + tile.expert) * mOut.shape[2] + feature)
            self._store(out, results, Int32(mOut.shape[2]) - feature)

    @cute.jit
    def _store(self, out: cute.Pointer, results: list[Any], left: Int32):
        width = const_expr(_EACH if self.even else 1)
        for i in cutlass.range_constexpr(0, _EACH, width):
            if left > i:
                rOut = cute.make_rmem_tensor(width, results[0].dtype)
                for j in cutlass.range_constexpr(width):
                    rOut[j] = results[i + j]
                copies.store(rOut, out + i)


def _copy(sources: list[cute.Tensor], targets: list[cute.Tensor]) -> None:
    """Between registers."""
    for source, target in zip(sources, targets, strict=True):
        target.store(source.load())


def trace(
    arch: str, *, out_dtype: str, swizzled: bool, divisors: tuple[bool, bool], config: tuple[Any, ...],
    o_alignment: int, even: bool, kernel: type[Fp4Mma] = Fp4Mma,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """``config``: a ``FewTokens``."""
    few = FewTokens(*config)
    out = fake.tensor(out_dtype, (None, None, None), align=8 if even else 2)
    made = kernel(few, Fp4Activations(few.format, swizzled, o_alignment), divisors, even)
    return made, [*fake_operands(o_alignment, CODE_ALIGNMENT), out, fake.stream()]
