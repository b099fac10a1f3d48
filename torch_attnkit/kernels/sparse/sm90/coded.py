"""The producer warpgroup where rows are encoded: bytes by ``cp.async``, decoded in the place where they are multiplied.

    tile n       its codes -> into the 16 bytes of the numbers that they stand for; RoPE channels -> where they belong
    tile n - 1   codes -> registers -> eight numbers, times their scale -> the same 16 bytes

A thread decodes what it has copied itself, so nobody waits for anybody in between but for the scales, of which each
has several readers in a warp. Bytes on their way need no memory of their own.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.asm import asm
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.smem import CHUNK
from torch_attnkit.kernels.cache.decoder import Decoder

from .arguments import Tensors
from .config import HALVES, LOADERS, Config
from .delivery import Alone, Away, Shared
from .meeting import Meeting
from .places import LANES, Places, held_by, warp_of_producer
from .plan import SIDES
from .schedule import Row

_NUMBERS = 8  # of a chunk of 16 bytes
_WORD = 4  # bytes
_AT_ONCE = 4  # chunks of a lane at most whose codes are read before the first is decoded


@dsl_user_op
def copy_8_async(shared: Int32, source: Int64, valid: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """8 bytes of device memory to shared memory; ``valid`` 0 writes zeros and reads nothing, else it is 8."""
    text = "cp.async.ca.shared.global [$0], [$1], 8, $2;"
    asm(None, [shared, source, valid], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def _shared_byte(address: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    return asm(Int32, [address], "ld.shared.u8 $0, [$1];", memory=True, loc=loc, ip=ip)


@dsl_user_op
def _shared_words(count: int, address: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Int32, ...]:
    """1, 2 or 4 aligned words of shared memory."""
    words = ",".join(f"${i}" for i in range(count))
    form = f"ld.shared.v{count}.b32 {{{words}}}" if count > 1 else "ld.shared.b32 $0"
    return asm([Int32] * count, [address], f"{form}, [${count}];", memory=True, loc=loc, ip=ip)


@dsl_user_op
def _shared_word_if(address: Int32, valid: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """A word of shared memory; ``valid`` 0 reads nothing and gives 0."""
    text = "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.shared.b32 $0, [$1]; }"
    return asm(Int32, [address, valid], text, memory=True, loc=loc, ip=ip)


_COPY = {4: op.copy_4_async, 8: copy_8_async, 16: op.copy_16_async}


class Codes(Fixed):
    """What a lane has of a chunk: its words in shared memory, and the scale byte of its block. ``nope``: whether they
    are codes, True or False where that is known beforehand of all lanes."""

    def __init__(self, nope: Any, at: Int32, words: list[Any], byte: Int32):
        self.nope, self.at, self.words, self.byte = nope, at, words, byte


class CodedTiles:
    """How a producer fills the ring where rows are encoded. Halves of a tile's columns come in their order, whoever
    computes its scores, so that it is known beforehand which of them have codes."""

    def __init__(self, config: Config):
        self.c, self.places = config, Places(config)
        self.delivery = Shared(config) if config.sides == SIDES else Alone(config)
        self.steps = self.delivery.rows // self.places.abreast  # chunks of a lane in half a tile
        self.at_once = max(n for n in range(1, _AT_ONCE + 1) if self.steps % n == 0)
        row = config.row
        self.layout, self.decoder = row.layout, Decoder(row, config.dtype)
        self.nope_chunks = row.nope_dim // _NUMBERS  # of a row
        self.code_bytes = _NUMBERS * self.decoder.bits // 8  # of a chunk
        # What one copy brings: rows start at any multiple of ``align``, and so do RoPE channels in them.
        self.code_width = min(config.align, self.code_bytes)
        self.rope_width = math.gcd(config.align, self.layout.rope)

    def divisor(self, tensors: Tensors) -> Any:
        return self.decoder.divisor(tensors.global_scale[0]) if self.c.divided else None

    @cute.jit
    def load(self, row: Row, divisor: Any, shared: Int32, meeting: Meeting, filled: Int32, n: Int32):
        """Send for the bytes of tile n of the work tile, and decode the tile before it, of whatever work tile that is:
        those wait for it who still read that one's Q."""
        n = filled + n
        self._copy_tile(row, shared, meeting, n)
        cute.arch.cp_async_wait_group(1)
        if n > 0:
            self._decode_tile(divisor, shared, meeting, n - 1)

    def bring(
        self, rows: list[Row], divisor: Any, shared: Int32, meeting: Meeting, tiles: range, warpgroup: int
    ) -> None:
        """These tiles, whose places are free, with nothing before or behind them."""
        for row, n in zip(rows, tiles, strict=True):
            self._copy_tile(row, shared, meeting, Int32(n))
        for i, n in enumerate(tiles):
            cute.arch.cp_async_wait_group(len(tiles) - 1 - i)
            self._decode_tile(divisor, shared, meeting, Int32(n))

    def finish(self, divisor: Any, shared: Int32, meeting: Meeting, filled: Int32) -> None:
        """After the last of ``filled`` tiles."""
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        self._decode_tile(divisor, shared, meeting, filled - 1)

    @cute.jit
    def _copy_tile(self, row: Row, shared: Int32, meeting: Meeting, n: Int32):
        """Rows that do not count become zeros, which stand for zeros."""
        warp, counts = warp_of_producer(), self.places.counts(row)
        address, own = self.delivery.own(row.address, counts)
        for half in cutlass.range_constexpr(HALVES):
            self._copy_half(address, own, half, shared, meeting, n * HALVES + half)
        self._copy_scales(address, own, self._scales(shared, meeting, n, warp))
        if cute.arch.lane_idx() == 0:
            self.places.set_mask(shared, meeting, n * HALVES, counts)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def _copy_half(
        self, address: Int64, counts: Int32, half: cutlass.Constexpr, shared: Int32, meeting: Meeting, n: Int32
    ):
        """Half of the columns of this warp's own rows, which is fill n of the ring."""
        warp, lane = warp_of_producer(), cute.arch.lane_idx()
        meeting.tiles.await_empty(n)
        place = self.delivery.place(self.places.place(shared, meeting, n))
        for i in cutlass.range_constexpr(self.steps):
            mine = i * self.places.abreast + lane // self.places.chunks
            source, there = held_by(mine, address), (counts >> mine) & 1
            self._copy_chunk(half, self.places.chunk_at(place, mine * LOADERS + warp), source, there)

    @cute.jit
    def _copy_chunk(self, half: cutlass.Constexpr, to: Int32, source: Int64, there: Int32):
        chunk = self._chunk(half)
        if self._is_nope(half):
            self._copy(to, source + chunk * self.code_bytes, self.code_bytes, self.code_width, there)
        else:
            rope = source + (self.layout.rope + (chunk - self.nope_chunks) * CHUNK)
            self._copy(to, rope, CHUNK, self.rope_width, there)

    def _chunk(self, half: int) -> Int32:
        """Which of a row's chunks this lane has."""
        return cute.arch.lane_idx() % self.places.chunks + half * self.places.chunks

    def _is_nope(self, half: int) -> Any:
        """Whether this lane's chunk has codes: known beforehand where all of a half's have, or none."""
        if (half + 1) * self.places.chunks <= self.nope_chunks:
            return True
        return False if half * self.places.chunks >= self.nope_chunks else self._chunk(half) < self.nope_chunks

    def _copy(self, to: Int32, source: Int64, nbytes: int, width: int, there: Int32) -> None:
        for at in range(0, nbytes, width):
            _COPY[width](to + at, source + at, there * width)

    @cute.jit
    def _copy_scales(self, address: Int64, counts: Int32, target: Int32):
        """The scales of a warp's own rows, of which the first's belong at ``target``, one word a lane."""
        c, rows = self.c, const_expr(self.delivery.rows)
        words = const_expr(c.scale_bytes // _WORD)
        for first in cutlass.range_constexpr(0, rows * words, LANES):
            index = first + cute.arch.lane_idx()
            mine = cutlass.min(index // words, rows - 1)
            word = index - mine * words
            source = held_by(mine, address)
            to = target + mine * (LOADERS * c.scale_bytes) + word * _WORD
            if word < words:
                op.copy_4_async(to, source + (self.layout.scales + word * _WORD), ((counts >> mine) & 1) * _WORD)

    def _scales(self, shared: Int32, meeting: Meeting, n: Int32, key: Int32) -> Int32:
        """Where the scales of a key of tile n are, of those that are decoded here."""
        own, stage = self.c.keys // self.c.sides, meeting.tiles.slot(n * HALVES) // HALVES
        return self.c.shared.scales.at(shared) + (stage * own + key) * self.c.scale_bytes

    @cute.jit
    def _decode_tile(self, divisor: Any, shared: Int32, meeting: Meeting, n: Int32):
        """Make numbers of the codes of tile n, and give it to the consumers."""
        cute.arch.sync_warp()  # the scales are there, which other lanes have copied
        for half in cutlass.range_constexpr(HALVES):
            self._decode_half(divisor, half, shared, meeting, n)

    @cute.jit
    def _decode_half(self, divisor: Any, half: cutlass.Constexpr, shared: Int32, meeting: Meeting, n: Int32):
        fill = n * HALVES + half
        place = self.delivery.place(self.places.place(shared, meeting, fill))
        full = meeting.tiles.full + meeting.tiles.slot(fill)
        away = self.delivery.away(full)
        for first in cutlass.range(0, self.steps, self.at_once, unroll=1):
            held = []
            for i in cutlass.range_constexpr(self.at_once):
                held.append(self._read_row(half, shared, meeting, place, n, first + i))
            for codes in held:
                self._decode(codes, divisor, away)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.delivery.give(full)

    def _read_row(self, half: int, shared: Int32, meeting: Meeting, place: Int32, n: Int32, i: Int32) -> Codes:
        """A lane's chunk number ``i`` of half of tile n: codes, or pairs in bfloat16, and the byte of its scale. All
        lanes read, whatever they have, so that many are on their way."""
        key = (i * self.places.abreast + cute.arch.lane_idx() // self.places.chunks) * LOADERS + warp_of_producer()
        at, scales = self.places.chunk_at(place, key), self._scales(shared, meeting, n, key)
        nope, words, byte = self._is_nope(half), [], Int32(0)
        # Pairs to convert or to send.
        rope = nope is not True and (self.c.dtype is not BFloat16 or self.delivery.moves)
        if nope is not False:
            words = list(_shared_words(self.code_bytes // _WORD, at))
        elif rope:
            words = list(_shared_words(CHUNK // _WORD, at))
        if nope is not False and rope:  # behind codes is nothing yet
            pairs = cutlass.select_(nope, Int32(0), Int32(1))
            words += [_shared_word_if(at + i, pairs) for i in range(self.code_bytes, CHUNK, _WORD)]
        if nope is not False:
            last = cutlass.min(self._chunk(half), self.nope_chunks - 1)
            byte = self._scale_byte(scales, last)
        return Codes(nope, at, words, byte)

    def _scale_byte(self, scales: Int32, chunk: Int32) -> Int32:
        """Of a chunk's block."""
        return _shared_byte(scales + chunk * _NUMBERS // self.c.row.block)

    @cute.jit
    def _decode(self, codes: Codes, divisor: Any, away: Away | None):
        """Leave the numbers of a chunk where its codes were. Pairs in bfloat16 may be the numbers themselves."""
        words = codes.words
        if const_expr(codes.nope is True):
            self.delivery.store(codes.at, self._nope(codes, divisor), away)
        elif const_expr(codes.nope is not False and len(words) == CHUNK // _WORD):
            both = zip(self._nope(codes, divisor), self.decoder.rope(words), strict=True)
            self.delivery.store(codes.at, [cutlass.select_(codes.nope, a, b) for a, b in both], away)
        elif const_expr(codes.nope is not False):
            numbers = self._nope(codes, divisor)
            if codes.nope:
                self.delivery.store(codes.at, numbers, away)
        elif const_expr(len(words) > 0):
            self.delivery.store(codes.at, self.decoder.rope(words), away)

    def _nope(self, codes: Codes, divisor: Any) -> list[Any]:
        return self.decoder.nope(codes.words[: self.code_bytes // _WORD], codes.byte, divisor)
