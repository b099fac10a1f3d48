"""The producer: keys of a tile row by row, by ``cp.async``, from wherever the token's list says that they are.

    tile n      a part of the columns of its own keys after another -> ring, as places come free
    then        as a part has come: a proxy fence, a copy for the other side, an arrival

Lane l of warp w has row ``64 (l // 16) + 16 w + l % 16`` of a tile. Where two sides share keys, each copies 64 of them
from device memory, lanes 0 to 15 or 16 to 31 of every warp, and sends what it has to the other through the cluster:
keys are read once. Which keys count both look up for themselves, for it is a word a key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda import word_ops
from torch_attnkit.cuda.sm100.peers import send
from torch_attnkit.cuda.smem import CHUNK

from ..sm90.arguments import Numbers, Tensors
from ..sm90.places import held_by
from ..sm90.schedule import Keys, Row, entry_of, first_entry_of, guess_of, keys_of, row_of
from .boxed import Whole, WholeTiles
from .config import KEYS, LANES, LOADERS, Config
from .memory import Memory
from .place import Place, own_row, own_warp
from .row_numbers import Matrices

_HALF = KEYS // 2  # rows of a tile, of which a warp has 16 next to one another
_EACH = _HALF // LOADERS


def mask_of(key: Any) -> tuple[Any, Any]:
    """Which word of a tile's mask has a key, and which of its bits."""
    return key % _HALF // _EACH, key // _HALF * _EACH + key % _EACH


def _bit_as_chunk(bits: Int32, at: int) -> Int32:
    """The bytes of a chunk where bit ``at`` is set, else 0."""
    shift = at - (CHUNK.bit_length() - 1)
    return (bits >> shift if shift >= 0 else bits << -shift) & CHUNK


class Peer(NamedTuple):
    """The other side, and what of a tile is this one's."""

    place: Place
    ring_at: Any  # addresses of the cluster
    full_at: Any
    own_at: Any  # bytes to the first of this warp's own keys in a block of columns


class Producer:
    """Four warps. Of encoded rows ``CodedProducer`` loads and finishes parts in its own way."""

    def __init__(self, config: Config):
        c = self.c = config
        self.whole = WholeTiles(config) if config.numbered else None
        self.parts = c.mma.parts
        self.chunks = c.mma.part * c.itemsize // CHUNK  # of a row of a part
        self.abreast = LANES // self.chunks  # such rows that a warp copies at once
        self.line = c.mma.row_bytes // CHUNK  # chunks of a row of a block of columns
        self.steps = c.own_keys // self.abreast  # of a warp, through its keys of a part
        # Where scores are made a tile ahead: parts of the next tile that are sent for before a tile's are given away.
        # Its scores come before the output of the tile before gives places back, so it must not wait for one of those.
        self.before = min(self.parts, c.mma.stages - 2 * self.parts)

    @cute.jit
    def run(self, tensors: Tensors, numbers: Numbers, matrices: Matrices | None, place: Place, m: Memory):
        """All tiles of the CTA's share of a work tile. Meets the cluster once the first keys are looked up."""
        c = self.c
        guess = guess_of(tensors, numbers, place.token, place.part, own_row())
        keys = keys_of(c, tensors, numbers, place.token, place.part)
        divisor = self._divisor(tensors)
        key = keys.first + own_row()
        row = row_of(c, tensors, keys, key, first_entry_of(tensors, numbers, keys, place.token, key, guess))
        tiles = cute.arch.make_warp_uniform((keys.stop - keys.first + (KEYS - 1)) // KEYS)
        peer = self._peer(place, m)
        whole = None
        if const_expr(self.whole is not None):
            whole = self.whole.of(tensors, numbers, matrices, keys, place.token)
        cute.arch.cluster_wait()
        for n in cutlass.range(tiles, unroll=1):
            row = self._step(tensors, numbers, keys, whole, peer, row, divisor, m, n)
        if const_expr(c.mma.ahead):
            if tiles > 0:
                self._finish_tile(peer, divisor, m, tiles - 1, 0)

    @cute.jit
    def _step(
        self, tensors: Tensors, numbers: Numbers, keys: Keys, whole: Whole | None, peer: Peer, row: Row, divisor: Any,
        m: Memory, n: Int32,
    ):  # fmt: skip
        """Send for tile n, and give away what has come; returns this lane's row of the next."""
        c = self.c
        key = keys.first + (n + 1) * KEYS + own_row()
        entry = entry_of(tensors, numbers, keys, peer.place.token, key)  # on its way while tile n is loaded
        if const_expr(self.whole is None):
            self._load_tile(row, peer, divisor, m, n)
            self._finish_after(peer, divisor, m, n)
        else:
            if whole.has(n):
                self._load_boxes(whole, peer, divisor, m, n)
                self._finish_after(peer, divisor, m, n)
            else:  # the same twice, so that the second need not work out anew which places these are
                self._load_tile(row, peer, divisor, m, n)
                self._finish_after(peer, divisor, m, n)
        return row_of(c, tensors, keys, key, entry)

    @cute.jit
    def _finish_after(self, peer: Peer, divisor: Any, m: Memory, n: Int32):
        """Give away what is due when all of tile n has been sent for."""
        if const_expr(not self.c.mma.ahead):
            self._finish_tile(peer, divisor, m, n, 0)
        elif const_expr(self.before == self.parts):
            if n > 0:
                self._finish_tile(peer, divisor, m, n - 1, self.parts)

    @cute.jit
    def _load_boxes(self, whole: Whole, peer: Peer, divisor: Any, m: Memory, n: Int32):
        """All keys count. No row is copied: groups of ``cp.async`` are empty, and parts given away as ever."""
        for p in cutlass.range_constexpr(self.parts):
            self._await_part(Int32(-1), peer, divisor, m, p, n)
            self.whole.load(whole, m, n, p)
            cute.arch.cp_async_commit_group()

    def _peer(self, place: Place, m: Memory) -> Peer:
        c = self.c
        if c.sides == 1:
            return Peer(place, 0, 0, 0)
        rank = place.split * c.sides + (1 - place.side)
        return Peer(
            place, op.cluster_address(m.ring_at, rank), op.cluster_address(m.ring.full.toint(), rank),
            (place.side * _HALF + own_warp() * _EACH) * c.mma.row_bytes,
        )  # fmt: skip

    def _divisor(self, tensors: Tensors) -> Any:
        """What the numbers of encoded rows are divided by, or None."""
        return None

    @cute.jit
    def _load_tile(self, row: Row, peer: Peer, divisor: Any, m: Memory, n: Int32):
        """Rows that do not count become zeros."""
        counts = cute.arch.vote_ballot_sync(row.counts)
        column = cute.arch.lane_idx() % self.chunks * CHUNK
        place = peer.place
        mine = [self._mine(place, i) for i in range(self.steps)]
        sources = [held_by(x, row.address) + column for x in mine]
        ahead = counts >> mine[0]  # from this lane's first row on
        # Steps by how far they turn the swizzle: what is beside that is known beforehand.
        turn = const_expr(8 // self.abreast)
        firsts = [self._chunk_at(Int32(0), place, i) for i in range(min(turn, self.steps))]
        for p in cutlass.range_constexpr(self.parts):
            fill = n * self.parts + p
            self._await_part(counts, peer, divisor, m, p, n)
            stage = self._stage(m, fill)
            starts = [stage + first for first in firsts]
            for i in cutlass.range_constexpr(self.steps):
                target_at = (self._first_key(i) - self._first_key(i % turn)) * self.c.mma.row_bytes
                valid = _bit_as_chunk(ahead, i * self.abreast)
                word_ops.copy_16_async_at(starts[i % turn], target_at, sources[i], p * self.chunks * CHUNK, valid)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def _await_part(self, counts: Int32, peer: Peer, divisor: Any, m: Memory, p: cutlass.Constexpr, n: Int32):
        """Until a part has a place; a tile's mask has one with the first."""
        if const_expr(self.c.mma.ahead and p == self.before):
            if n > 0:
                self._finish_tile(peer, divisor, m, n - 1, p)
        m.ring.await_empty(n * self.parts + p)
        if const_expr(p == 0):
            if cute.arch.lane_idx() == 0:
                m.sMask[own_warp(), n % self.c.masks] = counts

    def _stage(self, m: Memory, fill: Int32) -> Int32:
        return m.ring_at + m.ring.slot(fill) * self.c.mma.stage_bytes

    def _mine(self, place: Place, i: Any) -> Int32:
        """Of the keys that a warp copies at once those of step i: which of the warp's lanes has this lane's."""
        return place.side * _EACH + i * self.abreast + cute.arch.lane_idx() // self.chunks

    def _key(self, place: Place, i: Any) -> Int32:
        """Which row of the tile that is."""
        rest = place.side * _HALF + own_warp() * _EACH + cute.arch.lane_idx() // self.chunks
        return rest + self._first_key(i)

    def _first_key(self, i: Any) -> Any:
        """Of step i: known beforehand where steps are unrolled."""
        first = i * self.abreast
        return first // _EACH * _HALF + first % _EACH

    def _chunk_at(self, stage: Int32, place: Place, i: Any) -> Int32:
        """Where this lane's chunk of step i is in a stage, whose blocks of columns have a line a key."""
        chunk, key = cute.arch.lane_idx() % self.chunks, self._key(place, i)
        block = stage + chunk // self.line * (KEYS * self.c.mma.row_bytes)
        return block + key * self.c.mma.row_bytes + ((chunk % self.line) ^ (key & 7)) * CHUNK

    @cute.jit
    def _finish_tile(self, peer: Peer, divisor: Any, m: Memory, n: Int32, after: cutlass.Constexpr):
        """Give tile n to the products, and to the other side, when ``after`` parts more have been sent for."""
        for p in cutlass.range_constexpr(self.parts):
            cute.arch.cp_async_wait_group(self.parts - 1 - p + after)
            self._decode_part(peer, divisor, m, p, n)
            self._finish_part(peer, m, n * self.parts + p)

    def _decode_part(self, peer: Peer, divisor: Any, m: Memory, p: int, n: Int32) -> None:
        """What has come are numbers."""

    @cute.jit
    def _finish_part(self, peer: Peer, m: Memory, fill: Int32):
        """This warp's keys of a part are in its own ring."""
        c = self.c
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        slot, nbytes, boxes = m.ring.slot(fill), const_expr(_EACH * c.mma.row_bytes), c.mma.part // c.mma.columns
        with cute.arch.elect_one():
            if const_expr(c.sides == 1):
                cute.arch.mbarrier_arrive(m.ring.full + slot)
            else:
                cute.arch.mbarrier_arrive_and_expect_tx(m.ring.full + slot, boxes * nbytes)
                at = slot * c.mma.stage_bytes + peer.own_at
                to, own, full = peer.ring_at + at, m.ring_at + at, peer.full_at + slot * 8
                for x in cutlass.range_constexpr(boxes):
                    send(to, own, x * (KEYS * c.mma.row_bytes), nbytes, full)
