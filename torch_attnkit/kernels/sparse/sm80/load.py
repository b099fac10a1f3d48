"""Copies by ``cp.async``: Q, and a token's keys, row by row, since rows are scattered.

A warp copies ``keys / warps`` neighbouring keys of every tile: lane l looks up row l, all lanes copy each row. Invalid
rows are zero-filled and never read. Encoded rows are copied as they are to a staging buffer, and dequantised into the
K/V tile by the warp that copied them, for which cp.async.wait_group and a warp barrier are enough.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.asm import asm
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.smem import CHUNK
from torch_attnkit.kernels.cache.decoder import Decoder

from ..arguments import Tensors
from ..token_keys import Row, WorkTile, held_by
from .config import ITEMSIZE, LANES, WORD, Config

_VALUES = CHUNK // ITEMSIZE  # of a chunk


@dsl_user_op
def _copy_8_async(shared: Int32, source: Int64, valid: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """8 bytes of device to shared memory; ``valid`` is 8, or 0 to zero-fill."""
    text = "cp.async.ca.shared.global [$0], [$1], 8, $2;"
    asm(None, [shared, source, valid], text, memory=True, loc=loc, ip=ip)


_COPY = {4: op.copy_4_async, 8: _copy_8_async, 16: op.copy_16_async}


@dsl_user_op
def shared_words(count: int, address: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Int32, ...]:
    """1, 2 or 4 aligned words of shared memory."""
    words = ",".join(f"${i}" for i in range(count))
    form = f"ld.shared.v{count}.b32 {{{words}}}" if count > 1 else "ld.shared.b32 $0"
    return asm([Int32] * count, [address], f"{form}, [${count}];", memory=True, loc=loc, ip=ip)


@dsl_user_op
def store_shared_words(address: Int32, words: list[Int32], *, loc: Any = None, ip: Any = None) -> None:
    """1, 2 or 4 words to aligned shared memory."""
    values = ",".join(f"${i + 1}" for i in range(len(words)))
    form = f"st.shared.v{len(words)}.b32 [$0], {{{values}}}" if len(words) > 1 else "st.shared.b32 [$0], $1"
    asm(None, [address, *words], f"{form};", memory=True, loc=loc, ip=ip)


@dsl_user_op
def _shared_byte(address: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    return asm(Int32, [address], "ld.shared.u8 $0, [$1];", memory=True, loc=loc, ip=ip)


def swizzled(row: Any, chunk: Any) -> Any:
    """Byte offset of a 16-byte chunk in a row: of eight rows that an ``ldmatrix`` reads they lie in different banks."""
    return (chunk ^ (row & 7)) * CHUNK


@cute.jit
def load_query(config: cutlass.Constexpr, tensors: Tensors, tile: WorkTile, shared: Int32):
    """Start the copy of a work tile's rows of Q; those past its heads are zero-filled."""
    c, q, thread = config, tensors.q, cute.arch.thread_idx()[0]
    row_bytes = Int64(q.stride[1]) * ITEMSIZE
    first = q.iterator.toint() + Int64(q.stride[0]) * tile.token * ITEMSIZE + row_bytes * tile.head
    for n in cutlass.range_constexpr(c.rows * c.chunks // c.threads):
        i = thread + n * c.threads
        head, chunk = i // c.chunks, i % c.chunks
        source = first + row_bytes * cutlass.min(head, tile.heads - 1) + chunk * CHUNK
        valid = cutlass.select_(head < tile.heads, Int32(CHUNK), Int32(0))
        op.copy_16_async(c.shared.query.at(shared) + head * c.pitch + swizzled(head, chunk), source, valid)


class KeyLoader(Fixed):
    """A warp's rows of K/V tiles."""

    def __init__(self, config: Config):
        self.c = config
        self.rows = config.keys // config.warps  # of a tile
        self.decoder = None if config.row.plain else Decoder(config.row, config.dtype)

    def _first(self) -> Int32:
        """The warp's first key of a tile."""
        return cute.arch.warp_idx() * self.rows

    def key(self, n: Int32) -> Int32:
        """This lane's key of tile n, from the CTA's first key on; lanes without a row repeat the last one's."""
        return n * self.c.keys + self._first() + cutlass.min(cute.arch.lane_idx(), self.rows - 1)

    def valid(self, shared: Int32, n: Int32) -> Int32:
        """Address of tile n's validity, a word a key."""
        return self.c.shared.valid.at(shared) + n % (self.c.ahead + 1) * (self.c.keys * WORD)

    def tile(self, shared: Int32, n: Int32) -> Int32:
        """Address of K/V tile n."""
        tiles = self.c.shared.tiles.at(shared)
        return tiles + n % self.c.stages * self.c.tile_bytes if self.c.row.plain else tiles

    def _staged(self, shared: Int32, n: Int32) -> Int32:
        """Address of the warp's first staged row of tile n."""
        return (
            self.c.shared.staging.at(shared) + n % self.c.stages * self.c.staging_bytes
            + self._first() * self.c.slot_bytes
        )  # fmt: skip

    @cute.jit
    def load(self, row: Row, shared: Int32, n: Int32):
        """Start the copy of tile n, of which ``row`` is this lane's."""
        c, lane = self.c, cute.arch.lane_idx()
        counts = cute.arch.vote_ballot_sync(row.counts)
        if lane < self.rows:
            word = cute.make_ptr(Int32, self.valid(shared, n), cute.AddressSpace.smem, assumed_align=4)
            at = cute.make_tensor(word, cute.make_layout(c.keys))
            at[self._first() + lane] = cutlass.select_(row.counts, Int32(1), Int32(0))
        if const_expr(c.row.plain):
            self._copy_plain(row.address, counts, self.tile(shared, n))
        else:
            self._copy_encoded(row.address, counts, self._staged(shared, n))

    @cute.jit
    def _copy_plain(self, address: Int64, counts: Int32, tile: Int32):
        c = self.c
        for t in cutlass.range_constexpr(self.rows * c.chunks // LANES):
            own, chunk = self._position(t)
            row = self._first() + own
            source = held_by(own, address) + chunk * CHUNK
            op.copy_16_async(tile + row * c.pitch + swizzled(row, chunk), source, ((counts >> own) & 1) * CHUNK)

    def _position(self, t: int) -> tuple[Any, Any]:
        """The row, of the warp's, and the chunk of it that this lane has in step t."""
        chunks, lane = self.c.chunks, cute.arch.lane_idx()
        if chunks >= LANES:
            return t // (chunks // LANES), lane + t % (chunks // LANES) * LANES
        return lane // chunks + t * (LANES // chunks), lane % chunks

    @cute.jit
    def _copy_encoded(self, address: Int64, counts: Int32, staged: Int32):
        c, lane = self.c, cute.arch.lane_idx()
        width = const_expr(c.align)
        count = const_expr(c.row.size // width)  # copies of a row
        for own in cutlass.range(self.rows, unroll=1):
            source, valid = held_by(own, address), ((counts >> own) & 1) * width
            for first in cutlass.range_constexpr(0, count, LANES):
                i = first + lane
                if const_expr(first + LANES <= count):
                    _COPY[width](staged + own * c.slot_bytes + i * width, source + i * width, valid)
                elif i < count:
                    _COPY[width](staged + own * c.slot_bytes + i * width, source + i * width, valid)

    def divisor(self, tensors: Tensors) -> Any:
        """The global scale of encoded rows, as ``decode`` takes it, or None."""
        return self.decoder.divisor(tensors.global_scale[0]) if self.decoder and self.c.divided else None

    @cute.jit
    def decode(self, divisor: Any, shared: Int32, n: Int32):
        """Dequantise the warp's rows of tile n, which have come, into the K/V tile."""
        c = self.c
        staged, tile = self._staged(shared, n), self.tile(shared, n) + self._first() * c.pitch
        rows = const_expr(max(1, LANES // c.chunks))  # that lanes have side by side
        for first in cutlass.range(0, self.rows, rows, unroll=1):
            for t in cutlass.range_constexpr(rows * c.chunks // LANES):
                down, chunk = self._position(t)
                own = first + down
                at = tile + own * c.pitch + swizzled(self._first() + own, chunk)
                self._decode_chunk(divisor, staged + own * c.slot_bytes, t, chunk, at)

    @cute.jit
    def _decode_chunk(self, divisor: Any, row: Int32, t: cutlass.Constexpr, chunk: Int32, at: Int32):
        """8 channels of a staged row to 16 bytes; which are quantised is mostly known at compile time."""
        nope_chunks = const_expr(self.c.row.nope_dim // _VALUES)
        begin = const_expr(t * LANES if self.c.chunks >= LANES else 0)
        end = const_expr(begin + min(LANES, self.c.chunks))
        if const_expr(end <= nope_chunks):
            self._decode_nope(divisor, row, chunk, at)
        elif const_expr(begin >= nope_chunks):
            self._decode_rope(row, chunk, at)
        elif chunk < nope_chunks:
            self._decode_nope(divisor, row, chunk, at)
        else:
            self._decode_rope(row, chunk, at)

    def _decode_nope(self, divisor: Any, row: Int32, chunk: Int32, at: Int32) -> None:
        nbytes = _VALUES * self.decoder.bits // 8
        codes = list(shared_words(nbytes // WORD, row + chunk * nbytes))
        byte = _shared_byte(row + self.c.row.layout.scales + chunk * _VALUES // self.c.row.block)
        store_shared_words(at, self.decoder.nope(codes, byte, divisor))

    def _decode_rope(self, row: Int32, chunk: Int32, at: Int32) -> None:
        first = row + (chunk - self.c.row.nope_dim // _VALUES) * CHUNK + self.c.row.layout.rope
        pairs = [word for i in (0, 8) for word in shared_words(2, first + i)]
        store_shared_words(at, self.decoder.rope(pairs))
