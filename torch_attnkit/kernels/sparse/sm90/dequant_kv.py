"""Producer for encoded rows (FP8, MXFP4, NVFP4): copy raw bytes to shared memory, dequantise to 16 bits into the K/V
ring.

    DequantTiles       cp.async: codes land in the 16 bytes that their values will occupy, scales in a buffer of their
                       own; the thread that copied a chunk expands it in stage, so only scales need a warp sync
    BulkDequantTiles   cp.async.bulk: whole rows to a staging buffer, an mbarrier per warp counts the bytes; needs rows
                       aligned to 16 bytes (FP8 at 8: the first 8 bytes go by cp.async, as all scales do)

Tile n is copied while tile n - 1 is dequantised. Which CTA dequantises a row:

    LocalDequant    every row, for this CTA
    SharedDequant   a CTA pair with the same keys and two head blocks: each dequantises half of the rows and stores the
                    values in both rings, the peer's by st.async. Both CTAs advance the ring in lock step. empty:
                    consumers of both arrived. full: local half dequantised and peer's st.async bytes landed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.asm import asm
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm90.peers import store_16_async
from torch_attnkit.cuda.sm90.warpgroup import ROW_BYTES
from torch_attnkit.cuda.smem import CHUNK
from torch_attnkit.kernels.cache.decoder import Decoder

from ..arguments import Tensors
from ..token_keys import Row, held_by
from .barriers import Barriers, paired_cta
from .config import HALVES, LANES, LOADERS, STAGING_TILES, Config
from .load_kv import Slots, producer_warp
from .plan import SIDES


class PeerSlot(NamedTuple):
    """Ring slot of the paired CTA: its distance in cluster shared-memory addresses, and its full mbarrier."""

    distance: Int32
    full: Int32


class LocalDequant:
    """``rows`` of a tile per warp: all of its rows. bfloat16 RoPE channels stay where they were copied."""

    to_peer = False

    def __init__(self, config: Config):
        self.rows = config.keys // LOADERS

    def own(self, address: Int64, counts: Int32) -> tuple[Int64, Int32]:
        """(addresses, validity mask) of the rows that this warp dequantises, from lane 0 on."""
        return address, counts

    def first_row(self, stage: Int32) -> Int32:
        """Address of the first of those rows in a ring slot."""
        return stage

    def peer_slot(self, full: cute.Pointer) -> None:
        """What ``store`` needs to know of the peer's slot."""
        return None

    def store(self, at: Int32, words: list[Any], peer: None) -> None:
        """Store 16 bytes of values."""
        copies.store_words(at, words, cute.AddressSpace.smem)

    def arrive_full(self, full: cute.Pointer) -> None:
        """Arrive on the slot's full mbarrier; one lane of each warp."""
        cute.arch.mbarrier_arrive(full)


class SharedDequant:
    """Half of the rows, stored in this CTA's ring and the peer's; RoPE channels are sent, too."""

    to_peer = True

    def __init__(self, config: Config):
        self.rows = config.keys // (LOADERS * SIDES)
        self.nbytes = self.rows * config.ring.part * config.itemsize  # of half a tile, from a warp

    def own(self, address: Int64, counts: Int32) -> tuple[Int64, Int32]:
        first = self._first()
        return held_by(cute.arch.lane_idx() + first, address), counts >> first

    def first_row(self, stage: Int32) -> Int32:
        """A multiple of 8 rows into the slot, so that the swizzle is the same."""
        return stage + self._first() * (LOADERS * ROW_BYTES)

    def peer_slot(self, full: cute.Pointer) -> PeerSlot:
        here = full.toint()
        remote = op.cluster_address(here, paired_cta())
        return PeerSlot(remote - Int32(here), remote)

    def store(self, at: Int32, words: list[Any], peer: PeerSlot) -> None:
        copies.store_words(at, words, cute.AddressSpace.smem)
        store_16_async(at + peer.distance, words, peer.full)

    def arrive_full(self, full: cute.Pointer) -> None:
        """Arrive and expect the bytes of the peer's same warp."""
        cute.arch.mbarrier_arrive_and_expect_tx(full, self.nbytes)

    def _first(self) -> Int32:
        """The warp's first own row."""
        return cute.arch.block_in_cluster_idx()[0] % SIDES * self.rows


_CHUNK_VALUES = 8  # of a chunk of 16 bytes
_WORD = 4  # bytes
_MAX_IN_FLIGHT = 4  # chunks of a lane at most whose codes are read before the first is decoded


@dsl_user_op
def copy_8_async(shared: Int32, source: Int64, valid: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """8 bytes of global to shared memory; ``valid`` is 8, or 0 to zero-fill."""
    text = "cp.async.ca.shared.global [$0], [$1], 8, $2;"
    asm(None, [shared, source, valid], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def _shared_byte(address: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    return asm(Int32, [address], "ld.shared.u8 $0, [$1];", memory=True, loc=loc, ip=ip)


@dsl_user_op
def _shared_words(count: int, address: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Int32, ...]:
    """Load 1, 2 or 4 aligned words of shared memory."""
    words = ",".join(f"${i}" for i in range(count))
    form = f"ld.shared.v{count}.b32 {{{words}}}" if count > 1 else "ld.shared.b32 $0"
    return asm([Int32] * count, [address], f"{form}, [${count}];", memory=True, loc=loc, ip=ip)


@dsl_user_op
def _shared_word_if(address: Int32, valid: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Load a word of shared memory, or 0 if ``valid`` is 0."""
    text = "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.shared.b32 $0, [$1]; }"
    return asm(Int32, [address, valid], text, memory=True, loc=loc, ip=ip)


_COPY = {4: op.copy_4_async, 8: copy_8_async, 16: op.copy_16_async}


class Chunk(Fixed):
    """A lane's 16-byte chunk of a row: address, raw words, scale byte. ``nope``: whether it holds quantised (no-RoPE)
    channels; True or False where that is known at compile time."""

    def __init__(self, nope: Any, at: Int32, words: list[Any], byte: Int32):
        self.nope, self.at, self.words, self.byte = nope, at, words, byte


class DequantTiles:
    """K/V loader for encoded rows by ``cp.async``. Halves of a tile full in order of columns, so that which chunks are
    quantised is mostly known at compile time."""

    def __init__(self, config: Config):
        self.c, self.slots = config, Slots(config)
        self.share = SharedDequant(config) if config.sides == SIDES else LocalDequant(config)
        self.steps = self.share.rows // self.slots.rows_per_copy  # chunks of a lane in half a tile
        self.in_flight = max(n for n in range(1, _MAX_IN_FLIGHT + 1) if self.steps % n == 0)
        row = config.row
        self.layout, self.decoder = row.layout, Decoder(row, config.dtype)
        self.nope_chunks = row.nope_dim // _CHUNK_VALUES  # of a row
        self.code_bytes = _CHUNK_VALUES * self.decoder.bits // 8  # of a chunk
        # Width of a copy, by the alignment of rows and of RoPE channels in them.
        self.code_width = min(config.align, self.code_bytes)
        self.rope_width = math.gcd(config.align, self.layout.rope)

    def divisor(self, tensors: Tensors) -> Any:
        return self.decoder.divisor(tensors.global_scale[0]) if self.c.divided else None

    @cute.jit
    def load(self, row: Row, divisor: Any, shared: Int32, barriers: Barriers, filled: Int32, n: Int32):
        """Copy tile n of the work tile, ``filled`` tiles after kernel start, then dequantise the tile before, which may
        be the previous work tile's last: whoever still reads its Q waits for it."""
        n = filled + n
        self._copy_tile(row, shared, barriers, n)
        cute.arch.cp_async_wait_group(1)
        if n > 0:
            self._decode_tile(divisor, shared, barriers, n - 1)

    def load_single_pass(
        self, rows: list[Row], divisor: Any, shared: Int32, barriers: Barriers, tiles: range, warpgroup: int
    ) -> None:
        """Copy all of a warpgroup's resident tiles, then dequantise them in turn."""
        for row, n in zip(rows, tiles, strict=True):
            self._copy_tile(row, shared, barriers, Int32(n))
        for i, n in enumerate(tiles):
            cute.arch.cp_async_wait_group(len(tiles) - 1 - i)
            self._decode_tile(divisor, shared, barriers, Int32(n))

    def finish(self, divisor: Any, shared: Int32, barriers: Barriers, filled: Int32) -> None:
        """Dequantise the last tile."""
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        self._decode_tile(divisor, shared, barriers, filled - 1)

    @cute.jit
    def _copy_tile(self, row: Row, shared: Int32, barriers: Barriers, n: Int32):
        """Invalid rows are zero-filled: code 0 is the value 0."""
        warp, counts = producer_warp(), self.slots.counts(row)
        address, own = self.share.own(row.address, counts)
        for half in cutlass.range_constexpr(HALVES):
            self._copy_half(address, own, half, shared, barriers, n * HALVES + half)
        self._copy_scales(address, own, self._scales(shared, barriers, n, warp))
        if cute.arch.lane_idx() == 0:
            self.slots.set_mask(shared, barriers, n * HALVES, counts)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def _copy_half(
        self, address: Int64, counts: Int32, half: cutlass.Constexpr, shared: Int32, barriers: Barriers, n: Int32
    ):
        """Copy half of the columns of the warp's own rows to slot ``n``."""
        warp, lane = producer_warp(), cute.arch.lane_idx()
        barriers.tiles.await_empty(n)
        stage = self.share.first_row(self.slots.stage(shared, barriers, n))
        for i in cutlass.range_constexpr(self.steps):
            lane_of_row = i * self.slots.rows_per_copy + lane // self.slots.chunks
            source, valid = held_by(lane_of_row, address), (counts >> lane_of_row) & 1
            self._copy_chunk(half, self.slots.chunk_at(stage, lane_of_row * LOADERS + warp), source, valid)

    @cute.jit
    def _copy_chunk(self, half: cutlass.Constexpr, to: Int32, source: Int64, valid: Int32):
        chunk = self._chunk(half)
        if self._is_nope(half):
            self._copy(to, source + chunk * self.code_bytes, self.code_bytes, self.code_width, valid)
        else:
            rope = source + (self.layout.rope + (chunk - self.nope_chunks) * CHUNK)
            self._copy(to, rope, CHUNK, self.rope_width, valid)

    def _chunk(self, half: int) -> Int32:
        """Index of this lane's chunk within a row."""
        return cute.arch.lane_idx() % self.slots.chunks + half * self.slots.chunks

    def _is_nope(self, half: int) -> Any:
        """Whether this lane's chunk is quantised: a bool where all lanes agree."""
        if (half + 1) * self.slots.chunks <= self.nope_chunks:
            return True
        return False if half * self.slots.chunks >= self.nope_chunks else self._chunk(half) < self.nope_chunks

    def _copy(self, to: Int32, source: Int64, nbytes: int, width: int, valid: Int32) -> None:
        for at in range(0, nbytes, width):
            _COPY[width](to + at, source + at, valid * width)

    @cute.jit
    def _copy_scales(self, address: Int64, counts: Int32, target: Int32):
        """Copy the scales of the warp's own rows, a word per lane; the first row's go to ``target``."""
        c, rows = self.c, const_expr(self.share.rows)
        words = const_expr(c.scale_bytes // _WORD)
        for first in cutlass.range_constexpr(0, rows * words, LANES):
            index = first + cute.arch.lane_idx()
            key = cutlass.min(index // words, rows - 1)
            word = index - key * words
            source = held_by(key, address)
            to = target + key * (LOADERS * c.scale_bytes) + word * _WORD
            if word < words:
                op.copy_4_async(to, source + (self.layout.scales + word * _WORD), ((counts >> key) & 1) * _WORD)

    def _scales(self, shared: Int32, barriers: Barriers, n: Int32, key: Int32) -> Int32:
        """Address of the scales of a key that is dequantised here."""
        own, stage = self.c.keys // self.c.sides, barriers.tiles.slot(n * HALVES) // HALVES
        return self.c.shared.scales.at(shared) + (stage * own + key) * self.c.scale_bytes

    @cute.jit
    def _decode_tile(self, divisor: Any, shared: Int32, barriers: Barriers, n: Int32):
        """Dequantise tile n and hand it to the consumers."""
        cute.arch.sync_warp()  # scales that other lanes copied
        for half in cutlass.range_constexpr(HALVES):
            self._decode_half(divisor, half, shared, barriers, n)

    @cute.jit
    def _decode_half(self, divisor: Any, half: cutlass.Constexpr, shared: Int32, barriers: Barriers, n: Int32):
        fill = n * HALVES + half
        stage = self.share.first_row(self.slots.stage(shared, barriers, fill))
        full = barriers.tiles.full + barriers.tiles.slot(fill)
        peer = self.share.peer_slot(full)
        for first in cutlass.range(0, self.steps, self.in_flight, unroll=1):
            chunks = []
            for i in cutlass.range_constexpr(self.in_flight):
                chunks.append(self._read_row(half, shared, barriers, stage, n, first + i))
            for chunk in chunks:
                self._decode(chunk, divisor, peer)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.share.arrive_full(full)

    def _read_row(self, half: int, shared: Int32, barriers: Barriers, stage: Int32, n: Int32, i: Int32) -> Chunk:
        """Load chunk ``i`` of this lane and its scale byte: codes, or bfloat16 RoPE channels. Unpredicated, so that
        loads overlap."""
        key = (i * self.slots.rows_per_copy + cute.arch.lane_idx() // self.slots.chunks) * LOADERS + producer_warp()
        at, scales = self.slots.chunk_at(stage, key), self._scales(shared, barriers, n, key)
        nope, words, byte = self._is_nope(half), [], Int32(0)
        # RoPE channels to convert or to send.
        rope = nope is not True and (self.c.dtype is not BFloat16 or self.share.to_peer)
        if nope is not False:
            words = list(_shared_words(self.code_bytes // _WORD, at))
        elif rope:
            words = list(_shared_words(CHUNK // _WORD, at))
        if nope is not False and rope:  # only the codes are in shared memory
            pairs = cutlass.select_(nope, Int32(0), Int32(1))
            words += [_shared_word_if(at + i, pairs) for i in range(self.code_bytes, CHUNK, _WORD)]
        if nope is not False:
            last = cutlass.min(self._chunk(half), self.nope_chunks - 1)
            byte = self._scale_byte(scales, last)
        return Chunk(nope, at, words, byte)

    def _scale_byte(self, scales: Int32, chunk: Int32) -> Int32:
        """Scale of the block that a chunk is in."""
        return _shared_byte(scales + chunk * _CHUNK_VALUES // self.c.row.block)

    @cute.jit
    def _decode(self, chunk: Chunk, divisor: Any, peer: PeerSlot | None):
        """Store the dequantised chunk. bfloat16 RoPE channels need no conversion in bfloat16 calls."""
        words = chunk.words
        if const_expr(chunk.nope is True):
            self.share.store(chunk.at, self._nope(chunk, divisor), peer)
        elif const_expr(chunk.nope is not False and len(words) == CHUNK // _WORD):
            both = zip(self._nope(chunk, divisor), self.decoder.rope(words), strict=True)
            self.share.store(chunk.at, [cutlass.select_(chunk.nope, a, b) for a, b in both], peer)
        elif const_expr(chunk.nope is not False):
            values = self._nope(chunk, divisor)
            if chunk.nope:
                self.share.store(chunk.at, values, peer)
        elif const_expr(len(words) > 0):
            self.share.store(chunk.at, self.decoder.rope(words), peer)

    def _nope(self, chunk: Chunk, divisor: Any) -> list[Any]:
        return self.decoder.nope(chunk.words[: self.code_bytes // _WORD], chunk.byte, divisor)


_WORD = 4  # bytes
_ODD = 8  # bytes past a multiple of 16 at which a row may start


@dsl_user_op
def _bulk_load(shared: Int32, source: Int64, nbytes: int, barrier: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """``cp.async.bulk`` of ``nbytes`` of global to shared memory; completes on ``barrier``."""
    text = f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {nbytes}, [$2];"
    asm(None, [shared, source, barrier], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def _words_if(count: int, address: Int32, valid: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Int32, ...]:
    """Load 1 or 2 aligned words of shared memory, or zeros if ``valid`` is 0."""
    outs = ",".join(f"${i}" for i in range(count))
    zeros = "".join(f"mov.b32 ${i}, 0; " for i in range(count))
    form = f"ld.shared.v{count}.b32 {{{outs}}}" if count > 1 else "ld.shared.b32 $0"
    text = f"{{ .reg .pred p; setp.ne.s32 p, ${count + 1}, 0; {zeros}@p {form}, [${count}]; }}"
    return asm([Int32] * count, [address, valid], text, memory=True, loc=loc, ip=ip)


class BulkDequantTiles(DequantTiles):
    """K/V loader for encoded rows by bulk copies, one a row; half a row has as copied chunks as a warp has lanes."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.nbytes = self.layout.size // CHUNK * CHUNK  # of a bulk copy

    @cute.jit
    def _copy_tile(self, row: Row, shared: Int32, barriers: Barriers, n: Int32):
        warp, lane, counts = producer_warp(), cute.arch.lane_idx(), self.slots.counts(row)
        address, own = self.share.own(row.address, counts)
        odd = cute.arch.vote_ballot_sync((address & _ODD) != 0)
        self._copy_scales(address, own, self._scales(shared, barriers, n, warp))
        full = barriers.staged + (n % STAGING_TILES * LOADERS + warp)
        has_row = (lane < self.share.rows) & ((own >> lane) & 1 != 0)
        copied = cute.arch.popc(cute.arch.vote_ballot_sync(has_row))
        if lane == 0:
            sent = self._sent(shared, n)
            sent[0], sent[1], sent[2] = counts, own, odd
            cute.arch.mbarrier_arrive_and_expect_tx(full, Int32(copied) * self.nbytes)
        if has_row:
            offset = Int32(address) & _ODD
            slot = self._slot(shared, n, lane * LOADERS + warp)
            if offset != 0:
                copy_8_async(slot + _ODD, address, Int32(_ODD))
            _bulk_load(slot + 2 * offset, address + offset, self.nbytes, full.toint())
        cute.arch.cp_async_commit_group()

    @cute.jit
    def _decode_tile(self, divisor: Any, shared: Int32, barriers: Barriers, n: Int32):
        warp = producer_warp()
        cute.arch.sync_warp()  # what other lanes copied
        cute.arch.mbarrier_wait(barriers.staged + (n % STAGING_TILES * LOADERS + warp), n // STAGING_TILES & 1)
        for half in cutlass.range_constexpr(HALVES):
            barriers.tiles.await_empty(n * HALVES + half)
            if (half == 0) & (cute.arch.lane_idx() == 0):
                self.slots.set_mask(shared, barriers, n * HALVES, self._sent(shared, n)[0])
            self._decode_half(divisor, half, shared, barriers, n)

    def _read_row(self, half: int, shared: Int32, barriers: Barriers, stage: Int32, n: Int32, i: Int32) -> Chunk:
        key, sent, chunk = i * LOADERS + producer_warp(), self._sent(shared, n), self._chunk(half)
        valid, nope, code_words = (sent[1] >> i) & 1, self._is_nope(half), self.code_bytes // _WORD
        row = self._slot(shared, n, key) + ((sent[2] >> i) & 1) * _ODD
        at, byte = row + chunk * self.code_bytes, Int32(0)
        if nope is not True:
            rope = row + (self.layout.rope + (chunk - self.nope_chunks) * CHUNK)
            at = rope if nope is False else cutlass.select_(nope, at, rope)
        words = list(_words_if(code_words, at, valid))
        if nope is not True:
            pairs = valid if nope is False else cutlass.select_(nope, Int32(0), valid)
            for offset in range(self.code_bytes, CHUNK, self.code_bytes):
                words += list(_words_if(code_words, at + offset, pairs))
        if nope is not False:
            last = cutlass.min(chunk, self.nope_chunks - 1)
            byte = self._scale_byte(self._scales(shared, barriers, n, key), last)
        return Chunk(nope, self.slots.chunk_at(stage, key), words, byte)

    def _sent(self, shared: Int32, n: Int32) -> cute.Tensor:
        """(3) of the warp's rows of tile n: validity in the tile, validity of its own, which start 8 bytes past a
        multiple of 16."""
        at = self.c.shared.row_bits.at(shared) + (n % STAGING_TILES * LOADERS + producer_warp()) * CHUNK
        return cute.make_tensor(cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=16), cute.make_layout(4))

    def _slot(self, shared: Int32, n: Int32, key: Int32) -> Int32:
        """Staging address of own row ``key`` of tile n."""
        own = self.c.keys // self.c.sides
        return self.c.shared.staging.at(shared) + (n % STAGING_TILES * own + key) * self.c.slot_bytes
