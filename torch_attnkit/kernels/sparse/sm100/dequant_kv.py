"""Producer for encoded rows (FP8, MXFP4, NVFP4): copy raw bytes by ``cp.async``, dequantise to 16 bits in place.

Codes land in the 16 bytes that their values will occupy, scales in a buffer of their own. The thread that copied a
chunk expands it, so only scales need a warp sync. Two sides dequantise half of the keys each and forward values.
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

from ..arguments import Tensors
from ..token_keys import Row, held_by
from .config import LANES, LOADERS, Config
from .cta import CtaCoord, Memory, own_warp
from .load_tile import Peer, TileProducer

_ELEMENTS = 8  # of 16 bits in a 16-byte chunk
_WORD = 4  # bytes
_IN_FLIGHT = 4  # chunks of a lane whose codes are read before the first is decoded


class DequantProducer(TileProducer):
    """Key mapping and pipeline are ``TileProducer``'s."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.layout = config.row.layout
        self.decoder = Decoder(config.row, config.dtype)
        self.nope_chunks = config.row.nope_dim // _ELEMENTS  # of a row
        self.code_bytes = self.decoder.bits * _ELEMENTS // 8  # of a chunk
        # Width of a copy, by the alignment of rows and of RoPE channels in them.
        self.code_width = min(self.code_bytes, config.align)
        self.rope_width = math.gcd(self.layout.rope, config.align)

    def _divisor(self, tensors: Tensors) -> Any:
        return self.decoder.divisor(tensors.global_scale[0]) if self.c.divided else None

    @cute.jit
    def _load_tile(self, row: Row, peer: Peer, divisor: Any, m: Memory, n: Int32):
        """Invalid rows are zero-filled: code 0 is the value 0."""
        counts = cute.arch.vote_ballot_sync(row.counts)
        for p in cutlass.range_constexpr(self.parts):
            self._await_part(counts, peer, divisor, m, p, n)
            if const_expr(p == 0):
                self._copy_scales(row.address, counts, peer.cta, self._scales(m, n))
            stage = self._stage(m, n * self.parts + p)
            for i in cutlass.range(self.steps, unroll=4):
                lane_of_row = self._lane_of_row(peer.cta, i)
                source, valid = held_by(lane_of_row, row.address), (counts >> lane_of_row) & 1
                self._copy_chunk(p, self._chunk_at(stage, peer.cta, i), source, valid)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def _copy_chunk(self, p: cutlass.Constexpr, to: Int32, source: Int64, valid: Int32):
        chunk = self._chunk(p)
        if self._is_nope(p):
            self._copy(to, source + chunk * self.code_bytes, self.code_bytes, self.code_width, valid)
        else:
            rope = source + (self.layout.rope + (chunk - self.nope_chunks) * CHUNK)
            self._copy(to, rope, CHUNK, self.rope_width, valid)

    def _chunk(self, p: int) -> Int32:
        """Index of this lane's chunk within a row."""
        return cute.arch.lane_idx() % self.chunks + p * self.chunks

    def _is_nope(self, p: int) -> Any:
        """Whether this lane's chunk holds quantised (no-RoPE) channels: a bool where all lanes agree."""
        if (p + 1) * self.chunks <= self.nope_chunks:
            return True
        return False if p * self.chunks >= self.nope_chunks else self._chunk(p) < self.nope_chunks

    def _copy(self, to: Int32, source: Int64, nbytes: int, width: int, valid: Int32) -> None:
        for at in range(0, nbytes, width):
            word_ops.copy_async(width, to + at, source + at, valid * width)

    def _scales(self, m: Memory, n: Int32) -> Int32:
        """Address of the scales of this warp's own keys of tile n."""
        keys = self.c.own_keys
        return m.scales_at + ((n & 1) * LOADERS + own_warp()) * (keys * self.c.scale_bytes)

    @cute.jit
    def _copy_scales(self, address: Int64, counts: Int32, cta: CtaCoord, target: Int32):
        """Copy the scales of the warp's own keys, a word per lane."""
        c = self.c
        words = const_expr(c.scale_bytes // _WORD)
        for first in cutlass.range_constexpr(0, c.own_keys * words, LANES):
            index = first + cute.arch.lane_idx()
            key = cutlass.min(index // words, c.own_keys - 1)
            word = index - key * words
            lane_of_row = cta.side * c.own_keys + key
            source = held_by(lane_of_row, address)
            to = target + key * c.scale_bytes + word * _WORD
            if word < words:
                op.copy_4_async(to, source + (self.layout.scales + word * _WORD), ((counts >> lane_of_row) & 1) * _WORD)

    @cute.jit
    def _decode_part(self, peer: Peer, divisor: Any, m: Memory, p: cutlass.Constexpr, n: Int32):
        """Dequantise a part."""
        if const_expr(p == 0):
            cute.arch.sync_warp()  # the scales are valid, which other lanes have copied
        stage, scales = self._stage(m, n * self.parts + p), self._scales(m, n)
        for first in cutlass.range(0, self.steps, _IN_FLIGHT, unroll=1):
            chunks = []
            for i in cutlass.range_constexpr(_IN_FLIGHT):
                key = (first + i) * self.rows_per_copy + cute.arch.lane_idx() // self.chunks  # among the warp's own
                at = self._chunk_at(stage, peer.cta, first + i)
                chunks.append((at, *self._read(p, at, scales + key * self.c.scale_bytes)))
            for at, words, byte in chunks:
                self._decode(p, at, words, byte, divisor)

    def _read(self, p: int, at: Int32, scales: Int32) -> tuple[list[Any], Int32]:
        """Words and scale byte of a chunk: codes, or bfloat16 RoPE channels to convert. Unpredicated, so that loads
        overlap."""
        nope, byte, words = self._is_nope(p), Int32(0), []
        rope = nope is not True and self.c.dtype is not BFloat16  # RoPE channels to convert
        if nope is not False:
            last = cutlass.min(self._chunk(p), self.nope_chunks - 1)
            byte = word_ops.load_byte(scales + last * _ELEMENTS // self.c.row.block)
            words = list(word_ops.load_words(self.code_bytes // _WORD, at))
        elif rope:
            words = list(word_ops.load_words(CHUNK // _WORD, at))
        if nope is not False and rope:  # only the codes are in shared memory
            pairs = cutlass.select_(nope, Int32(0), Int32(1))
            words += word_ops.load_words_if((CHUNK - self.code_bytes) // _WORD, at + self.code_bytes, pairs)
        return words, byte

    @cute.jit
    def _decode(self, p: cutlass.Constexpr, at: Int32, words: list[Any], byte: Int32, divisor: Any):
        """Store the dequantised chunk. bfloat16 RoPE channels need no conversion in bfloat16 calls."""
        nope = self._is_nope(p)
        if const_expr(nope is False):
            if const_expr(len(words) > 0):
                copies.store_words(at, self.decoder.rope(words), cute.AddressSpace.smem)
        else:
            values = self.decoder.nope(words[: self.code_bytes // _WORD], byte, divisor)
            if const_expr(nope is True):
                copies.store_words(at, values, cute.AddressSpace.smem)
            elif const_expr(len(words) == CHUNK // _WORD):
                both = zip(values, self.decoder.rope(words), strict=True)
                copies.store_words(at, [cutlass.select_(nope, a, b) for a, b in both], cute.AddressSpace.smem)
            elif nope:
                copies.store_words(at, values, cute.AddressSpace.smem)
