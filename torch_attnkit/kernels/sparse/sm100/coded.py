"""The producer where rows are encoded: bytes by ``cp.async``, decoded in the place where they are multiplied.

    tile n sent for      its codes -> into the 16 bytes of the numbers that they stand for; RoPE channels -> where they
                         belong; scales -> a region of their own
    when it has come     codes -> registers -> eight numbers, times their scale -> the same 16 bytes

A thread decodes what it has copied itself, and where two sides share keys each decodes half of them: the other gets
numbers.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, const_expr

from torch_attnkit.cuda import copies, word_ops
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.smem import CHUNK
from torch_attnkit.kernels.cache.decoder import Decoder

from ..sm90.arguments import Tensors
from ..sm90.places import held_by
from ..sm90.schedule import Row
from .config import LANES, LOADERS, Config
from .loads import Peer, Producer
from .memory import Memory
from .place import Place, own_warp

_NUMBERS = 8  # of a chunk of 16 bytes
_WORD = 4  # bytes
_AT_ONCE = 4  # chunks of a lane whose codes are read before the first is decoded


class CodedProducer(Producer):
    """Keys and their warps are as ``Producer`` has them."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.layout = config.row.layout
        self.decoder = Decoder(config.row, config.dtype)
        self.nope_chunks = config.row.nope_dim // _NUMBERS  # of a row
        self.code_bytes = self.decoder.bits * _NUMBERS // 8  # of a chunk
        # Rows start at any multiple of ``align``, and so do RoPE channels in them: as much does one copy bring.
        self.code_width = min(self.code_bytes, config.align)
        self.rope_width = math.gcd(self.layout.rope, config.align)

    def _divisor(self, tensors: Tensors) -> Any:
        return self.decoder.divisor(tensors.global_scale[0]) if self.c.divided else None

    @cute.jit
    def _load_tile(self, row: Row, peer: Peer, divisor: Any, m: Memory, n: Int32):
        """Rows that do not count become zeros, which stand for zeros."""
        counts = cute.arch.vote_ballot_sync(row.counts)
        for p in cutlass.range_constexpr(self.parts):
            self._await_part(counts, peer, divisor, m, p, n)
            if const_expr(p == 0):
                self._copy_scales(row.address, counts, peer.place, self._scales(m, n))
            stage = self._stage(m, n * self.parts + p)
            for i in cutlass.range(self.steps, unroll=4):
                mine = self._mine(peer.place, i)
                source, there = held_by(mine, row.address), (counts >> mine) & 1
                self._copy_chunk(p, self._chunk_at(stage, peer.place, i), source, there)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def _copy_chunk(self, p: cutlass.Constexpr, to: Int32, source: Int64, there: Int32):
        chunk = self._chunk(p)
        if self._is_nope(p):
            self._copy(to, source + chunk * self.code_bytes, self.code_bytes, self.code_width, there)
        else:
            rope = source + (self.layout.rope + (chunk - self.nope_chunks) * CHUNK)
            self._copy(to, rope, CHUNK, self.rope_width, there)

    def _chunk(self, p: int) -> Int32:
        """Which of a row's chunks this lane has."""
        return cute.arch.lane_idx() % self.chunks + p * self.chunks

    def _is_nope(self, p: int) -> Any:
        """Whether this lane's chunk has codes: known beforehand where all of a part's have, or none."""
        if (p + 1) * self.chunks <= self.nope_chunks:
            return True
        return False if p * self.chunks >= self.nope_chunks else self._chunk(p) < self.nope_chunks

    def _copy(self, to: Int32, source: Int64, nbytes: int, width: int, there: Int32) -> None:
        for at in range(0, nbytes, width):
            word_ops.copy_async(width, to + at, source + at, there * width)

    def _scales(self, m: Memory, n: Int32) -> Int32:
        """Where the scales of this warp's own keys of tile n are."""
        keys = self.c.own_keys
        return m.scales_at + ((n & 1) * LOADERS + own_warp()) * (keys * self.c.scale_bytes)

    @cute.jit
    def _copy_scales(self, address: Int64, counts: Int32, place: Place, target: Int32):
        """Those of a warp's own keys, one word a lane."""
        c = self.c
        words = const_expr(c.scale_bytes // _WORD)
        for first in cutlass.range_constexpr(0, c.own_keys * words, LANES):
            index = first + cute.arch.lane_idx()
            key = cutlass.min(index // words, c.own_keys - 1)
            word = index - key * words
            mine = place.side * c.own_keys + key
            source = held_by(mine, address)
            to = target + key * c.scale_bytes + word * _WORD
            if word < words:
                op.copy_4_async(to, source + (self.layout.scales + word * _WORD), ((counts >> mine) & 1) * _WORD)

    @cute.jit
    def _decode_part(self, peer: Peer, divisor: Any, m: Memory, p: cutlass.Constexpr, n: Int32):
        """Make numbers of the codes of a part."""
        if const_expr(p == 0):
            cute.arch.sync_warp()  # the scales are there, which other lanes have copied
        stage, scales = self._stage(m, n * self.parts + p), self._scales(m, n)
        for first in cutlass.range(0, self.steps, _AT_ONCE, unroll=1):
            held = []
            for i in cutlass.range_constexpr(_AT_ONCE):
                key = (first + i) * self.abreast + cute.arch.lane_idx() // self.chunks  # of the warp's own
                at = self._chunk_at(stage, peer.place, first + i)
                held.append((at, *self._read(p, at, scales + key * self.c.scale_bytes)))
            for at, words, byte in held:
                self._decode(p, at, words, byte, divisor)

    def _read(self, p: int, at: Int32, scales: Int32) -> tuple[list[Any], Int32]:
        """The words of a chunk that has codes, or of one with pairs in bfloat16 that must be converted, and the byte of
        its scale: read by all lanes, whatever they have, so that many are on their way."""
        nope, byte, words = self._is_nope(p), Int32(0), []
        rope = nope is not True and self.c.dtype is not BFloat16  # pairs to convert
        if nope is not False:
            last = cutlass.min(self._chunk(p), self.nope_chunks - 1)
            byte = word_ops.load_byte(scales + last * _NUMBERS // self.c.row.block)
            words = list(word_ops.load_words(self.code_bytes // _WORD, at))
        elif rope:
            words = list(word_ops.load_words(CHUNK // _WORD, at))
        if nope is not False and rope:  # behind codes is nothing yet
            pairs = cutlass.select_(nope, Int32(0), Int32(1))
            words += word_ops.load_words_if((CHUNK - self.code_bytes) // _WORD, at + self.code_bytes, pairs)
        return words, byte

    @cute.jit
    def _decode(self, p: cutlass.Constexpr, at: Int32, words: list[Any], byte: Int32, divisor: Any):
        """Leave the numbers of a chunk where its codes were. Pairs in bfloat16 may be the numbers themselves."""
        nope = self._is_nope(p)
        if const_expr(nope is False):
            if const_expr(len(words) > 0):
                copies.store_words(at, self.decoder.rope(words), cute.AddressSpace.smem)
        else:
            numbers = self.decoder.nope(words[: self.code_bytes // _WORD], byte, divisor)
            if const_expr(nope is True):
                copies.store_words(at, numbers, cute.AddressSpace.smem)
            elif const_expr(len(words) == CHUNK // _WORD):
                both = zip(numbers, self.decoder.rope(words), strict=True)
                copies.store_words(at, [cutlass.select_(nope, a, b) for a, b in both], cute.AddressSpace.smem)
            elif nope:
                copies.store_words(at, numbers, cute.AddressSpace.smem)
