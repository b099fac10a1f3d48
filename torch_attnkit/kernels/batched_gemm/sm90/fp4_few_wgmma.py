"""Products of groups of FP4 numbers for few tokens on Hopper by ``wgmma``: weights are its first operand, in registers.

    bf16   weights decoded to bf16, as ``fp4_few.py`` does, times tokens in bf16
    codes  codes of either side as E4M3, exact, so that decoding is two masks for four numbers; scales are for the sums

A sum of codes must be of one block of either side. A lane's 16 bytes of a row of weights are numbers of its own blocks,
so every quarter of 128 numbers has columns of its own, which hold zeros in the other lanes' places: a pair of columns
for each two tokens, or of one token for the first and the second NVFP4 block of a lane. What a lane receives are then
the sums of its own blocks. E4M3 products of E2M1 numbers add up exactly, for there are few, 36 the largest and 1/4 the
smallest. Imports cutlass.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from torch_attnkit.cuda import copies, fp4
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.fp4 import permute_bytes
from torch_attnkit.cuda.fp4_weights import LOWERED, decode

from ...grouped_gemm.sm90.config import BOX, SPAN
from ...grouped_gemm.sm90.mainloop import load_words, row_of
from ...grouped_gemm.sm90.schedule import WorkTile
from ...grouped_gemm.sm90.shared import ROW_BYTES
from .fp4_few import Fp4FewTokens, Shared
from .fp4_tokens import Tokens
from .plan import Few

_SPANS = BOX // SPAN  # of a box
_ROW = 128  # bytes of a column's row of shared memory, within which chunks of 16 are swizzled
_WORDS = SPAN // 8  # of a span
_SIGNS, _REST = 0x80808080, 0x1C1C1C1C  # of E4M3, where E2M1's exponent and mantissa give the number times 2^-6
_LOWERED = {"nvfp4": 12, "mxfp4": 63}  # powers of two by which sums of codes are too small


def _e4m3(word: Uint32) -> tuple[Uint32, Uint32]:
    """Codes 0, 2, 4, 6 and 1, 3, 5, 7 of a word as E4M3 numbers, 2^-6 of theirs."""
    low = ((word << 4) & Uint32(_SIGNS)) | ((word << 2) & Uint32(_REST))
    return low, (word & Uint32(_SIGNS)) | ((word >> 2) & Uint32(_REST))


class Fp4FewByWgmma(Fp4FewTokens):
    def __init__(self, config: Few, tokens: Tokens, divisors: tuple[bool, bool], even: bool):
        super().__init__(config, tokens, divisors, even)
        self.codes = config.kind == "codes"
        self.element = Float8E4M3FN if self.codes else BFloat16
        self.each = 32 // self.block if self.codes else 0  # blocks of a lane's 32 numbers
        # Whether both blocks of a lane are multiplied together, into columns of their own, as those of one token are.
        self.together = self.each == 1 or config.columns == 1
        self.sets = 1 if self.together else 2  # of sums of a span
        # Spans that are multiplied at a time: one, where threads have registers for no more.
        self.flying = 1 if config.threads * config.resident > 512 or self.sets * config.mma_columns > 32 else 2

    def _mma(self) -> cute.TiledMma:
        return hopper.make_trivial_tiled_mma(
            self.element, self.element, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1),
            (64, self.c.mma_columns), warpgroup.OperandSource.RMEM,
        )  # fmt: skip

    def _columns(self, tokens: Int32) -> cute.Tensor:
        """(columns, numbers of 128 bytes, rows of all of the slice) in shared memory."""
        numbers = _ROW * 8 // self.element.width
        rows = self.c.boxes * BOX // numbers
        layout = cute.make_layout(
            ((8, self.c.mma_columns // 8), (numbers, 1), rows),
            stride=((numbers, 8 * numbers), (1, 0), self.c.mma_columns * numbers),
        )  # fmt: skip
        pointer = cute.make_ptr(self.element, tokens, cute.AddressSpace.smem, assumed_align=1024)
        return cute.make_tensor(cute.recast_ptr(pointer, cute.make_swizzle(3, 4, 3), dtype=self.element), layout)

    def _sums(self) -> cute.Tensor:
        if self.codes:
            return cute.make_rmem_tensor(cute.make_layout((2, self.c.columns)), Float32)  # of a lane's rows
        return cute.make_rmem_tensor(self._mma().partition_shape_C((64, self.c.columns)), Float32)

    def _raised(self) -> float:
        return 2.0 ** (_LOWERED if self.codes else LOWERED)[self.c.format]

    @cute.jit
    def _clear(self, shared: Shared):
        """Zeros where other lanes have codes."""
        zeros, chunks = [Int32(0)] * 4, const_expr(self.c.code_bytes // 16)
        for i in cutlass.range_constexpr(-(-chunks // self.c.threads)):
            chunk = cute.arch.thread_idx()[0] + i * self.c.threads
            if chunk < chunks:
                copies.store_words(shared.tokens + chunk * 16, zeros, cute.AddressSpace.smem)

    def _ask(self, mO: cute.Tensor, mScale: cute.Tensor, tile: WorkTile, first: Int32, warp: Int32) -> Any:
        read = self._read_codes if self.codes else self._read_numbers
        return read(mO, mScale, tile, first, warp)

    def _take(self, asked: Any, shared: Shared, warp: Int32) -> None:
        """The tokens to shared memory, in the order and at the places of products."""
        if self.codes:
            self._clear(shared)
            cute.arch.barrier()
            self._store_read(*asked, shared)
        else:
            self._store_numbers(asked, shared, warp)
        cute.arch.fence_proxy("async.shared", space="cta")

    def _operands(self, shared: Shared, count: Int32) -> Any:
        """Registers for decoded weights, and the tokens."""
        mma = self._mma()
        part = mma.get_slice(cute.arch.thread_idx()[0] % 128).partition_B(self._columns(shared.tokens))
        shape = mma.partition_shape_A((64, 4 * (32 if self.codes else 16)))
        return [mma.make_fragment_A(shape) for _ in range(2)], mma.make_fragment_B(part)

    @cute.jit
    def _box_of(
        self, rSum: cute.Tensor, rScale: list[cute.Tensor], operands: Any, box: Int32, local: Int32, k: Int32,
        shared: Shared,
    ):  # fmt: skip
        rA, tB = operands
        if const_expr(self.codes):
            self._box_of_codes(rSum, rA, tB, rScale, box, local, k, shared)
        else:
            self._box_of_numbers(rSum, rA, tB, rScale, box, local, k)

    def _end(self) -> None:
        if not self.codes:
            warpgroup.wait_group(0)

    def _words(self, box: Int32, local: Int32, span: int) -> list[cute.Tensor]:
        """The lane's codes of a span of both rows."""
        at = box + local * ROW_BYTES + ((cute.arch.lane_idx() % 4 + span * 4) ^ (local & 7)) * 16
        return [load_words(at + 8 * r * ROW_BYTES, 4) for r in range(2)]

    @cute.jit
    def _box_of_numbers(
        self, rSum: cute.Tensor, rA: list[cute.Tensor], tB: cute.Tensor, rScale: list[cute.Tensor],
        box: Int32, local: Int32, k: Int32,
    ):  # fmt: skip
        mma = self._mma()
        mma.set(warpgroup.Field.ACCUMULATE, True)
        for span in cutlass.range_constexpr(_SPANS):
            words = self._words(box, local, span)
            factors = self._factors(rScale[0], rScale[1], span, cute.arch.lane_idx() % 4)
            for half in cutlass.range_constexpr(2):
                warpgroup.wait_group(1)  # what was multiplied from these registers
                rWords = cute.recast_tensor(rA[half], Uint32)
                for word in cutlass.range_constexpr(2):
                    for r in cutlass.range_constexpr(2):
                        pairs = decode(words[r][2 * half + word], factors[r][half])
                        for i in cutlass.range_constexpr(4):
                            rWords[(0, r, i % 2), 0, 2 * word + i // 2] = pairs[i]
                warpgroup.fence()
                for i in cutlass.range_constexpr(4):
                    rB = tB[None, None, i, (k * _SPANS + span) * 2 + half]
                    cute.gemm(mma, rSum, rA[half][None, None, i], rB, rSum)
                warpgroup.commit_group()

    @cute.jit
    def _box_of_codes(
        self, rSum: cute.Tensor, rA: list[cute.Tensor], tB: cute.Tensor, rScale: list[cute.Tensor],
        box: Int32, local: Int32, k: Int32, shared: Shared,
    ):  # fmt: skip
        mma = self._mma()
        shape = mma.partition_shape_C((64, self.c.mma_columns))
        rPart = [[cute.make_rmem_tensor(shape, Float32) for _ in range(self.sets)] for _ in range(self.flying)]
        for span in cutlass.range_constexpr(_SPANS):
            words, turn = self._words(box, local, span), const_expr(span % self.flying)
            rWords = cute.recast_tensor(rA[turn], Uint32)
            for word in cutlass.range_constexpr(4):
                for r in cutlass.range_constexpr(2):
                    rWords[(0, r, 0), 0, word], rWords[(0, r, 1), 0, word] = _e4m3(words[r][word])
            warpgroup.fence()
            for word in cutlass.range_constexpr(4):
                mma.set(warpgroup.Field.ACCUMULATE, word % (4 // self.sets) != 0)
                rC = rPart[turn][word // 2 if self.sets == 2 else 0]
                cute.gemm(mma, rC, rA[turn][None, None, word], tB[None, None, word, k * _SPANS + span], rC)
            warpgroup.commit_group()
            if const_expr(self.flying == 1):
                warpgroup.wait_group(0)
                self._fold(rSum, rPart[0], rScale, span, k * _SPANS + span, shared)
        if const_expr(self.flying > 1):
            for span in cutlass.range_constexpr(_SPANS):
                warpgroup.wait_group(_SPANS - 1 - span)
                self._fold(rSum, rPart[span], rScale, span, k * _SPANS + span, shared)

    def _fold(
        self, rSum: cute.Tensor, rPart: list[cute.Tensor], rScale: list[cute.Tensor], span: int, place: Int32,
        shared: Shared,
    ) -> None:  # fmt: skip
        """A span's sums of the lane's blocks, times their scales of both sides."""
        c, quarter = self.c, cute.arch.lane_idx() % 4
        count = self.each * c.columns
        at = shared.tokens + c.code_bytes + (place * 4 + quarter) * (count * 4)
        tokens = load_words(at, count, Float32)
        weights = self._weight_scales(rScale[0], rScale[1], span, quarter)
        for block in range(self.each):
            for t in range(c.columns):
                column, group = (block, 0) if c.columns == 1 and self.each == 2 else (t % 2, t // 2)
                for r in range(2):
                    x = rPart[0 if self.sets == 1 else block][column + 2 * r + 4 * group]
                    rSum[r, t] = op.fma(x, tokens[block * c.columns + t] * weights[r][block], rSum[r, t])

    def _weight_scales(self, r0: cute.Tensor, r1: cute.Tensor, span: int, quarter: Int32) -> list[list[Float32]]:
        """Of both rows the scales of the lane's blocks."""
        if self.c.format == "nvfp4":
            selector = cutlass.select_(quarter % 2 == 0, Int32(0x5410), Int32(0x7632))
            four = permute_bytes(Int32(r0[span]), Int32(r1[span]), selector)
            return [list(fp4.e4m3_values(four)), list(fp4.e4m3_values(four >> 16))]
        two = permute_bytes(Int32(r0[span]), Int32(r1[span]), quarter * 0x11 + 0x40)
        values = (fp4.ue8m0_value(byte) for byte in (two & 0xFF, two >> 8 & 0xFF))
        return [[value * Float32(2.0 ** (12 - _LOWERED["mxfp4"]))] for value in values]

    @cute.jit
    def _read_codes(self, mO: cute.Tensor, mScale: cute.Tensor, tile: WorkTile, first: Int32, warp: Int32):
        """This thread's words of eight codes of the slice, and its scales; zeros where there are none."""
        c, count = self.c, self.c.boxes * _SPANS * _WORDS  # of a token
        words = []
        for i in cutlass.range_constexpr(-(-count * c.columns // c.threads)):
            unit = cute.arch.thread_idx()[0] + i * c.threads
            inside = unit // count < tile.columns
            words.append(
                self._code_word(mO, tile.expert, unit // count, first * (_SPANS * _WORDS) + unit % count, inside)
            )
        return words, self._token_scales(mScale, tile, first, Int32(mO.shape[2]) * 2 // self.block)

    @cute.jit
    def _store_read(self, words: list[Uint32], scales: list[Float32], shared: Shared):
        c, count = self.c, self.c.boxes * _SPANS * _WORDS
        for i in cutlass.range_constexpr(len(words)):
            unit = cute.arch.thread_idx()[0] + i * c.threads
            if unit < count * c.columns:
                self._store_codes(shared, unit // count, unit % count, words[i])
        for i in cutlass.range_constexpr(len(scales)):
            unit = cute.arch.thread_idx()[0] + i * c.threads
            if unit < c.boxes * (BOX // self.block) * c.columns:
                self._put(shared.tokens + c.code_bytes + unit * 4, scales[i])

    @cute.jit
    def _token_scales(self, mScale: cute.Tensor, tile: WorkTile, first: Int32, blocks: Int32):
        """This thread's of the slice's scales, block by block of all tokens: numbers, zeros where there are none."""
        c, per_box, scales = self.c, BOX // self.block, []
        for i in cutlass.range_constexpr(-(-c.boxes * per_box * c.columns // c.threads)):
            unit = cute.arch.thread_idx()[0] + i * c.threads
            token, block = unit % c.columns, first * per_box + unit // c.columns
            found = (token < tile.columns) & (block < blocks)
            byte = self._scale_byte(mScale, tile.expert, token, block, found)
            value = fp4.e4m3_values(byte)[0] if const_expr(c.format == "nvfp4") else fp4.ue8m0_value(byte)
            scales.append(cutlass.select_(found, value, Float32(0.0)))
        return scales

    @cute.jit
    def _code_word(self, mO: cute.Tensor, group: Int32, token: Int32, word: Int32, inside: cutlass.Boolean) -> Uint32:
        found = Uint32(0)
        if inside & (word * 4 < Int32(mO.shape[2])):
            row = mO.iterator.toint() + Int64(token) * mO.stride[0] + Int64(group) * mO.stride[1]
            pointer = cute.make_ptr(Uint32, row + word * 4, cute.AddressSpace.gmem, assumed_align=4)
            found = Uint32(copies.scalar(pointer))
        return found

    @cute.jit
    def _scale_byte(
        self, mScale: cute.Tensor, group: Int32, token: Int32, block: Int32, inside: cutlass.Boolean
    ) -> Int32:
        found = Int32(0)
        if inside:
            found = self.tokens._scale(mScale, group, token, block)
        return found

    def _store_codes(self, shared: Shared, token: Int32, word: Int32, codes: Uint32) -> None:
        """A token's word, in the columns of its lanes."""
        span, quarter, w = word // _WORDS, word % _WORDS // 4, word % 4
        if self.c.columns == 1 and self.each == 2:
            pair, column = Int32(0), 2 * quarter + w // 2
        else:
            pair, column = token // 2, 2 * quarter + token % 2
        at = shared.tokens + span * (self.c.mma_columns * _ROW) + pair * (8 * _ROW) + column * _ROW + quarter * 4
        for i, four in enumerate(_e4m3(codes)):
            self._put(at + ((2 * w + i) ^ column) * 16, four, Uint32)

    def _units(self, warp: Int32) -> list[tuple[Int32, Int32]]:
        """A quad of lanes has a span of a token at a time, neighbours those of neighbouring tokens: those and spans."""
        c, first = self.c, warp * 8 + cute.arch.lane_idx() // 4
        units = (first + i * c.warps * 8 for i in range(-(-c.boxes * _SPANS * c.columns // (c.warps * 8))))
        return [(unit % c.columns, unit // c.columns) for unit in units]

    def _read_numbers(
        self, mO: cute.Tensor, mScale: cute.Tensor, tile: WorkTile, first: Int32, warp: Int32
    ) -> list[tuple[cute.Tensor, list[Int32]]]:
        quarter = cute.arch.lane_idx() % 4
        return [
            self.tokens.read(
                mO, mScale, tile.expert, token, first * _SPANS + span,
                (token < tile.columns) & (span < self.c.boxes * _SPANS), quarter,
            )
            for token, span in self._units(warp)
        ]  # fmt: skip

    @cute.jit
    def _store_numbers(self, found: list[tuple[cute.Tensor, list[Int32]]], shared: Shared, warp: Int32):
        """Each lane stores its words where they belong. Columns behind the last token are zeros."""
        c, units = self.c, self._units(warp)
        for i in cutlass.range_constexpr(len(units)):
            token, span = units[i]
            if span < c.boxes * _SPANS:
                words = self.tokens.numbers(*found[i])
                at = shared.tokens + span * (c.columns * 2 * _ROW) + token // 8 * (8 * _ROW) + token % 8 * _ROW
                for w in cutlass.range_constexpr(16):
                    place = at + w // 8 * (c.columns * _ROW) + ((w % 8) ^ (token % 8)) * 16
                    self._put(place + cute.arch.lane_idx() % 4 * 4, words[w], Int32)

    @cute.jit
    def _leave(self, rSum: cute.Tensor, sums: Int32, warp: Int32):
        c, lane = self.c, cute.arch.lane_idx()
        row = warp % c.row_warps * 16 + row_of(lane)
        at = sums + (warp // c.row_warps * c.columns * c.sum_pitch + row) * 4
        if const_expr(self.codes):
            for t in cutlass.range_constexpr(c.columns):
                for r in cutlass.range_constexpr(2):
                    total = rSum[r, t]
                    for distance in cutlass.range_constexpr(1, 3):
                        total = total + cute.arch.shuffle_sync_bfly(total, distance)
                    if lane % 4 == (2 * t + r) % 4:
                        self._put(at + (t * c.sum_pitch + 8 * r) * 4, total)
        else:
            at += lane % 4 * 2 * c.sum_pitch * 4
            for g in cutlass.range_constexpr(c.columns // 8):
                for x in cutlass.range_constexpr(4):
                    self._put(at + ((8 * g + x % 2) * c.sum_pitch + x // 2 * 8) * 4, rSum[4 * g + x])

    def _put(self, place: Int32, value: Any, kind: Any = Float32) -> None:
        """A word to shared memory."""
        pointer = cute.make_ptr(kind, place, cute.AddressSpace.smem, assumed_align=4)
        cute.make_tensor(pointer, cute.make_layout(1))[0] = value
