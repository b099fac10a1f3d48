"""Batched GEMM of FP4 for up to 4 tokens on Hopper: ``kernel_fp4_mma.py`` with E4M3 ``wgmma`` on re-encoded FP4.

Both operands are E2M1 re-encoded as E4M3 (exact, 2 ANDs for 4 values); block scales are applied to the accumulators.
Occupancy is 2, so with PDL the next grid prefetches weights while this one drains.

An accumulator must be of one block of either side. A lane's 16 bytes of a row of weights are of its own blocks, so
every quarter of 128 elements has columns of its own, zero where the other lanes' elements are: a pair of columns for
each two tokens, or of one token for the first and the second NVFP4 block of a lane. So a lane receives the sums of its
own blocks. Sums of E2M1 products are exact in E4M3 MMAs: the largest product is 36, the smallest 1/4.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from torch_attnkit.cuda import copies, fp4, l2
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.fp4 import permute_bytes
from torch_attnkit.cuda.sm90.bulk_prefetch import prefetch_bulk

from ...grouped_gemm.arguments import Matrices
from ...grouped_gemm.problem import SPAN
from ...grouped_gemm.sm90.config import BOX
from ...grouped_gemm.sm90.load_weights import ROW_BYTES
from ...grouped_gemm.sm90.mainloop_mma import row_of
from ...grouped_gemm.weight_scales import load_words
from ...grouped_gemm.work_tiles import WorkTile
from . import kernel_fp4_mma
from .fp4_activations import Fp4Activations
from .kernel_fp4_mma import Fp4Mma, Fp4Smem
from .plan import FewTokens

_SPANS = BOX // SPAN  # of a box
_WORDS = SPAN // 8  # of eight codes, of a span
_STEPS = 4  # over K, of a span: a word of each of four lanes
_ROW = 128  # bytes of a column's row of shared memory, within which chunks of 16 are swizzled: a span
_SIGNS, _REST = 0x80808080, 0x1C1C1C1C  # of E4M3, where E2M1's exponent and mantissa give the number times 2^-6
# Powers of two by which sums are too small until they are stored: of both codes, and of MXFP4 as many as let all
# results be float32.
_E4M3_LOWERED = 12
_LOWERED = {"nvfp4": _E4M3_LOWERED, "mxfp4": 63}
_TILE_ROWS, _TILE_BYTES = 128, 512  # of a tile of scales: four of each row


def _e4m3(word: Uint32) -> tuple[Uint32, Uint32]:
    """E2M1 codes 0, 2, 4, 6 and 1, 3, 5, 7 of a word as E4M3, 2^-6 of their values."""
    low = ((word << 4) & Uint32(_SIGNS)) | ((word << 2) & Uint32(_REST))
    return low, (word & Uint32(_SIGNS)) | ((word >> 2) & Uint32(_REST))


class Fp4E4m3(Fp4Mma):
    def __init__(self, config: FewTokens, tokens: Fp4Activations, divisors: tuple[bool, bool], even: bool):
        super().__init__(config, tokens, divisors, even)
        self.each = 32 // self.block  # blocks of a lane's 32 elements
        # Whether a lane's two blocks of a token are sums of the same product, in columns of their own.
        self.paired = self.each == 2 and config.columns == 1
        self.sets = 1 if self.each == 1 or self.paired else 2  # of sums of a span: products of steps of a block each

    def _mma(self) -> cute.TiledMma:
        return hopper.make_trivial_tiled_mma(
            Float8E4M3FN, Float8E4M3FN, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1),
            (64, self.c.e4m3_columns), warpgroup.OperandSource.RMEM,
        )  # fmt: skip

    def _columns(self, tokens: Int32) -> cute.Tensor:
        """(columns, codes of a span, spans of the slice) in shared memory."""
        columns = self.c.e4m3_columns
        layout = cute.make_layout(
            ((8, columns // 8), (_ROW, 1), self.c.boxes * _SPANS), stride=((_ROW, 8 * _ROW), (1, 0), columns * _ROW)
        )
        pointer = cute.make_ptr(Float8E4M3FN, tokens, cute.AddressSpace.smem, assumed_align=1024)
        return cute.make_tensor(cute.recast_ptr(pointer, cute.make_swizzle(3, 4, 3), dtype=Float8E4M3FN), layout)

    def _sums(self) -> cute.Tensor:
        """(row of the lane, token), of the lane's own blocks."""
        return cute.make_rmem_tensor(cute.make_layout((2, self.c.columns)), Float32)

    def _output_scale(self) -> float:
        return 2.0 ** _LOWERED[self.c.format]

    @cute.jit
    def _prefetch(self, weights: Matrices, tile: WorkTile, first: Int32):
        """To L2: the first box and all scales of the CTA's rows, a row a thread. L2 is where the launch before writes,
        so what is read later is up to date."""
        c, packed, scale = self.c, weights.packed, weights.scale
        thread, nbytes = cute.arch.thread_idx()[0], Int32(packed.shape[2])
        row = cutlass.min(tile.row * c.rows + thread % c.rows, Int32(packed.shape[1]) - 1)
        begin = first * ROW_BYTES
        if thread < c.rows:
            if begin < nbytes:
                start = packed.iterator.toint() + Int64(tile.expert) * packed.stride[0] + Int64(row) * packed.stride[1]
                prefetch_bulk(start + begin, cutlass.min(nbytes - begin, Int32(ROW_BYTES)))
        elif thread < 2 * c.rows:
            base = scale.iterator.toint() + Int64(tile.expert) * scale.stride[0]
            begin = first * (BOX // self.block)
            count = const_expr(c.boxes * BOX // self.block)  # of a row
            if const_expr(self.tokens.swizzled):
                tiles, ends = const_expr(count // 4), Int32(scale.shape[2])
                base += Int64(row // _TILE_ROWS) * ends * _TILE_ROWS + begin * _TILE_ROWS
                for i in cutlass.range_constexpr(-(-tiles * (_TILE_BYTES // l2.LINE) // c.rows)):
                    line = i * c.rows + thread % c.rows
                    if (line < tiles * (_TILE_BYTES // l2.LINE)) & (begin + line < ends):
                        l2.prefetch(base + line * l2.LINE)
            else:
                last = cutlass.min(begin + count, nbytes * 2 // self.block) - 1
                for i in cutlass.range_constexpr(count // l2.LINE + 1):
                    byte = cutlass.min(begin + i * l2.LINE, last)
                    if byte >= begin:
                        l2.prefetch(base + Int64(row) * scale.stride[1] + byte)

    def _load_tokens(self, mO: cute.Tensor, mScale: cute.Tensor, tile: WorkTile, first: Int32) -> Any:
        """This thread's words of eight codes of the slice, and its scales, to registers."""
        return self._packed_words(mO, tile, first), self._token_scales(mScale, tile, first, Int32(mO.shape[2]))

    @cute.jit
    def _store_tokens(
        self, loaded: Any, mO: cute.Tensor, mScale: cute.Tensor, tile: WorkTile, first: Int32, boxes: Int32,
        shared: Fp4Smem, warp: Int32,
    ):  # fmt: skip
        """To the swizzled columns of the MMA, zeros where other lanes' elements are; then scales."""
        c, (words, scales) = self.c, loaded
        chunks, count = const_expr(c.e4m3_bytes // 16), const_expr(self._words_of_token)
        for i in cutlass.range_constexpr(-(-chunks // c.threads)):
            chunk = cute.arch.thread_idx()[0] + i * c.threads
            if chunk < chunks:
                copies.store_words(shared.tokens + chunk * 16, [Int32(0)] * 4, cute.AddressSpace.smem)
        cute.arch.barrier()
        for i in cutlass.range_constexpr(len(words)):
            unit = cute.arch.thread_idx()[0] + i * c.threads
            if unit < count * c.columns:
                self._store_e4m3(shared, unit // count, unit % count, words[i])
        for i in cutlass.range_constexpr(len(scales)):
            unit = cute.arch.thread_idx()[0] + i * c.threads
            if unit < c.scales:
                self._put(shared.tokens + c.e4m3_bytes + unit * 4, scales[i])
        cute.arch.fence_proxy("async.shared", space="cta")

    @property
    def _words_of_token(self) -> int:
        return self.c.boxes * _SPANS * _WORDS

    @cute.jit
    def _packed_words(self, mO: cute.Tensor, tile: WorkTile, first: Int32):
        """Zeros where there are none."""
        c, count, words = self.c, const_expr(self._words_of_token), []
        for i in cutlass.range_constexpr(-(-count * c.columns // c.threads)):
            unit = cute.arch.thread_idx()[0] + i * c.threads
            token, word = unit // count, first * (_SPANS * _WORDS) + unit % count
            words.append(self._packed_word(mO, tile.expert, token, word, token < tile.columns))
        return words

    @cute.jit
    def _packed_word(self, mO: cute.Tensor, group: Int32, token: Int32, word: Int32, inside: cutlass.Boolean) -> Uint32:
        found = Uint32(0)
        if inside & (word * 4 < Int32(mO.shape[2])):
            row = mO.iterator.toint() + Int64(token) * mO.stride[0] + Int64(group) * mO.stride[1]
            pointer = cute.make_ptr(Uint32, row + word * 4, cute.AddressSpace.gmem, assumed_align=4)
            found = Uint32(copies.scalar(pointer))
        return found

    @cute.jit
    def _token_scales(self, mScale: cute.Tensor, tile: WorkTile, first: Int32, nbytes: Int32):
        """Of blocks, each of all tokens: float32 scales, zeros where there are none. ``nbytes``: of a token's codes."""
        c, per_box, scales = self.c, BOX // self.block, []
        for i in cutlass.range_constexpr(-(-c.scales // c.threads)):
            unit = cute.arch.thread_idx()[0] + i * c.threads
            token, block = unit % c.columns, first * per_box + unit // c.columns
            found = (token < tile.columns) & (block < nbytes * 2 // self.block)
            byte = self._scale_byte(mScale, tile.expert, token, block, found)
            value = fp4.e4m3_values(byte)[0] if const_expr(c.format == "nvfp4") else fp4.ue8m0_value(byte)
            scales.append(cutlass.select_(found, value, Float32(0.0)))
        return scales

    @cute.jit
    def _scale_byte(
        self, mScale: cute.Tensor, group: Int32, token: Int32, block: Int32, inside: cutlass.Boolean
    ) -> Int32:
        found = Int32(0)
        if inside:
            found = self.tokens.scale(mScale, group, token, block)
        return found

    def _store_e4m3(self, shared: Fp4Smem, token: Int32, word: Int32, packed: Uint32) -> None:
        """A token's word, in a column of its lane."""
        span, quarter, w = word // _WORDS, word % _WORDS // 4, word % 4
        pair, column = (Int32(0), w // 2) if self.paired else (token // 2, token % 2)
        column += 2 * quarter
        at = shared.tokens + span * (self.c.e4m3_columns * _ROW) + pair * (8 * _ROW) + column * _ROW + quarter * 4
        for i, four in enumerate(_e4m3(packed)):
            self._put(at + ((2 * w + i) ^ column) * 16, four, Uint32)

    def _operands(self, shared: Fp4Smem, count: Int32) -> Any:
        """Registers for a span of weights, and the tokens. Columns behind the last token are zeros."""
        mma = self._mma()
        part = mma.get_slice(cute.arch.thread_idx()[0] % 128).partition_B(self._columns(shared.tokens))
        return mma.make_fragment_A(mma.partition_shape_A((64, SPAN))), mma.make_fragment_B(part)

    @cute.jit
    def _multiply_box(
        self, rSum: cute.Tensor, rScale: list[cute.Tensor], operands: Any, box: Int32, local: Int32, k: Int32,
        shared: Fp4Smem,
    ):  # fmt: skip
        (rA, tB), mma = operands, self._mma()
        rWords = cute.recast_tensor(rA, Uint32)
        shape = mma.partition_shape_C((64, self.c.e4m3_columns))
        rPart = [cute.make_rmem_tensor(shape, Float32) for _ in range(self.sets)]
        steps = const_expr(_STEPS // self.sets)  # of one of them
        for span in cutlass.range_constexpr(_SPANS):
            at = box + local * ROW_BYTES + ((cute.arch.lane_idx() % 4 + span * 4) ^ (local & 7)) * 16
            packed = [load_words(at + 8 * r * ROW_BYTES, _STEPS) for r in range(2)]
            for step in cutlass.range_constexpr(_STEPS):
                for r in cutlass.range_constexpr(2):
                    rWords[(0, r, 0), 0, step], rWords[(0, r, 1), 0, step] = _e4m3(packed[r][step])
            warpgroup.fence()
            for step in cutlass.range_constexpr(_STEPS):
                mma.set(warpgroup.Field.ACCUMULATE, step % steps != 0)
                rC = rPart[step // steps]
                cute.gemm(mma, rC, rA[None, None, step], tB[None, None, step, k * _SPANS + span], rC)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            self._add(rSum, rPart, rScale, span, k * _SPANS + span, shared)

    def _add(
        self, rSum: cute.Tensor, rPart: list[cute.Tensor], rScale: list[cute.Tensor], span: int, span_idx: Int32,
        shared: Fp4Smem,
    ) -> None:  # fmt: skip
        """A span's sums of the lane's blocks, times their scales: first the weights', so that with scales within the
        limits of weights nothing overflows that a result does not. ``span``: of the box; ``span_idx``: of the slice."""
        c, quarter = self.c, cute.arch.lane_idx() % 4
        count = self.each * c.columns
        at = shared.tokens + c.e4m3_bytes + (span_idx * 4 + quarter) * (count * 4)
        of_tokens = load_words(at, count, Float32)
        of_weights = self._weight_scales(rScale[0], rScale[1], span, quarter)
        for block in range(self.each):
            for t in range(c.columns):
                column, pair = (block, 0) if self.paired else (t % 2, t // 2)
                for r in range(2):
                    x = rPart[block if self.sets == 2 else 0][column + 2 * r + 4 * pair]
                    rSum[r, t] = op.fma(x * of_weights[r][block], of_tokens[block * c.columns + t], rSum[r, t])

    def _weight_scales(self, r0: cute.Tensor, r1: cute.Tensor, span: int, quarter: Int32) -> list[list[Float32]]:
        """Of both rows the scales of the lane's blocks."""
        if self.c.format == "nvfp4":
            selector = cutlass.select_(quarter % 2 == 0, Int32(0x5410), Int32(0x7632))
            four = permute_bytes(Int32(r0[span]), Int32(r1[span]), selector)
            return [list(fp4.e4m3_values(four)), list(fp4.e4m3_values(four >> 16))]
        two = permute_bytes(Int32(r0[span]), Int32(r1[span]), quarter * 0x11 + 0x40)
        values = (fp4.ue8m0_value(byte) for byte in (two & 0xFF, two >> 8 & 0xFF))
        return [[value * Float32(2.0 ** (_E4M3_LOWERED - _LOWERED["mxfp4"]))] for value in values]

    @cute.jit
    def _store_sums(self, rSum: cute.Tensor, sums: Int32, warp: Int32):
        """The quad's lanes reduced, each of which stores some."""
        c, lane = self.c, cute.arch.lane_idx()
        row = warp % c.row_warps * 16 + row_of(lane)
        at = sums + (warp // c.row_warps * c.columns * c.sum_pitch + row) * 4
        for t in cutlass.range_constexpr(c.columns):
            for r in cutlass.range_constexpr(2):
                total = rSum[r, t]
                for distance in cutlass.range_constexpr(1, 3):
                    total = total + cute.arch.shuffle_sync_bfly(total, distance)
                if lane % 4 == (2 * t + r) % 4:
                    self._put(at + (t * c.sum_pitch + 8 * r) * 4, total)

    def _put(self, addr: Int32, value: Any, kind: Any = Float32) -> None:
        """A word to shared memory."""
        pointer = cute.make_ptr(kind, addr, cute.AddressSpace.smem, assumed_align=4)
        cute.make_tensor(pointer, cute.make_layout(1))[0] = value


def trace(arch: str, **signature: Any) -> tuple[Any, list[Any]]:
    return kernel_fp4_mma.trace(arch, kernel=Fp4E4m3, **signature)
