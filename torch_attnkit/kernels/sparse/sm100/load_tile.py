"""Producer: K/V rows by 16-byte ``cp.async``; on one side, tiles whose keys are contiguous by boxes of TMA.

Lane l of warp w has row 64 (l // 16) + 16 w + l % 16 of a tile, and the index load of the next tile is in flight. Two
sides read keys once: each copies 64 rows of a tile and forwards them by a bulk copy to the other's shared memory; both
look up the masks. Once a part of the columns has landed: proxy fence, forward, arrive.

Boxes: tiles filled by a dense window, or by dense entries of which a token sees all. Pages and lists go row by row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda import word_ops
from torch_attnkit.cuda.sm100 import row_copies
from torch_attnkit.cuda.sm100.peers import send
from torch_attnkit.cuda.smem import CHUNK

from ..arguments import Scalars, Tensors
from ..token_keys import Keys, Row, entry_of, first_entry_of, guess_of, held_by, keys_of, row_of
from .config import KEYS, LANES, LOADERS, Config
from .cta import CtaCoord, Memory, own_row, own_warp
from .load_gather4 import Matrices, request_of

_SHIFT = KEYS.bit_length() - 1  # keys to tiles


class BoxTiles(NamedTuple):
    """Which tiles are contiguous: the first ``near`` ones, in the window, and those from ``far`` to ``stop``, in the
    entries."""

    matrices: Matrices
    near: Int32
    far: Int32
    stop: Int32
    near_row: Int32  # where the CTA's first tile would be, if all its keys were of the window
    far_row: Int32  # if all were entries

    def has(self, n: Int32) -> Boolean:
        return (n < self.near) | ((n >= self.far) & (n < self.stop))


class BoxLoader:
    """A warp loads its 32 contiguous keys, a box for each block of columns of a part."""

    def __init__(self, config: Config):
        c = self.c = config
        self.nbytes = c.own_keys * c.mma.part * c.itemsize  # of a part

    def of(self, tensors: Tensors, scalars: Scalars, matrices: Matrices, keys: Keys, token: Int32) -> BoxTiles:
        """Before the first tile."""
        near_paged, far_paged = self.c.paged
        request, first = request_of(tensors, scalars, token), keys.first
        near_row = request * matrices.near.apart + keys.near_first + first
        far_row = request * matrices.far.apart - keys.near_count + first
        near = Int32(0) if near_paged else (cutlass.min(keys.near_count, keys.stop) - first) >> _SHIFT
        stop = Int32(0)
        if not far_paged:
            stop = cutlass.select_(scalars.has_list == 0, (keys.stop - first) >> _SHIFT, Int32(0))
        return BoxTiles(matrices, near, (keys.near_count - first + (KEYS - 1)) >> _SHIFT, stop, near_row, far_row)

    @cute.jit
    def load(self, boxes: BoxTiles, m: Memory, n: Int32, p: cutlass.Constexpr):
        """Load part p of tile n, whose slot is free."""
        c = self.c
        near, fill = n < boxes.near, n * c.mma.parts + p
        descriptor = cutlass.select_(near, *(row_copies.address_of(x.boxes) for x in boxes.matrices))
        row = cutlass.select_(near, boxes.near_row, boxes.far_row) + n * KEYS + own_warp() * c.own_keys
        full = m.ring.full + m.ring.slot(fill)
        to = m.ring_at + m.ring.slot(fill) * c.mma.stage_bytes + own_warp() * (c.own_keys * c.mma.row_bytes)
        blocks = const_expr([(p * c.mma.part + column, at) for column, at in c.blocks])
        with cute.arch.elect_one():
            cute.arch.mbarrier_expect_tx(full, self.nbytes)
            row_copies.load_rows(to, descriptor, row, full.toint(), blocks)


_HALF = KEYS // 2  # rows of a tile, 16 consecutive ones per warp
_EACH = _HALF // LOADERS


def mask_of(key: Any) -> tuple[Any, Any]:
    """(word, bit) of a key in a tile's mask."""
    return key % _HALF // _EACH, key // _HALF * _EACH + key % _EACH


def _bit_as_chunk(bits: Int32, at: int) -> Int32:
    """16, the bytes of a chunk, if bit ``at`` is set, else 0."""
    shift = at - (CHUNK.bit_length() - 1)
    return (bits >> shift if shift >= 0 else bits << -shift) & CHUNK


class Peer(NamedTuple):
    """The other side's ring, and this CTA's keys in it."""

    cta: CtaCoord
    ring_at: Any  # addresses of the cluster
    full_at: Any
    own_at: Any  # bytes to the first of this warp's own keys in a block of columns


class TileProducer:
    """Four warps. ``DequantProducer`` overrides how parts are loaded and finished."""

    def __init__(self, config: Config):
        c = self.c = config
        self.boxes = BoxLoader(config) if config.tma_rows else None
        self.parts = c.mma.parts
        self.chunks = c.mma.part * c.itemsize // CHUNK  # of a row of a part
        self.rows_per_copy = LANES // self.chunks  # rows of a part that a warp copies at once
        self.line = c.mma.row_bytes // CHUNK  # chunks of a row of a block of columns
        self.steps = c.own_keys // self.rows_per_copy  # of a warp, through its keys of a part
        # With S computed a tile ahead: parts of the next tile in flight before a tile is published. S of a tile is
        # issued before P V of the tile before releases its slots, so publishing must not wait for those.
        self.before = min(self.parts, c.mma.stages - 2 * self.parts)

    @cute.jit
    def run(self, tensors: Tensors, scalars: Scalars, matrices: Matrices | None, cta: CtaCoord, m: Memory):
        """All tiles of the CTA's share. Joins the cluster barrier once the first keys are looked up."""
        c = self.c
        guess = guess_of(tensors, scalars, cta.token, cta.part, own_row())
        keys = keys_of(c, tensors, scalars, cta.token, cta.part)
        divisor = self._divisor(tensors)
        key = keys.first + own_row()
        row = row_of(c, tensors, keys, key, first_entry_of(tensors, scalars, keys, cta.token, key, guess))
        tiles = cute.arch.make_warp_uniform((keys.stop - keys.first + (KEYS - 1)) // KEYS)
        peer = self._peer(cta, m)
        boxes = None
        if const_expr(self.boxes is not None):
            boxes = self.boxes.of(tensors, scalars, matrices, keys, cta.token)
        cute.arch.cluster_wait()
        for n in cutlass.range(tiles, unroll=1):
            row = self._step(tensors, scalars, keys, boxes, peer, row, divisor, m, n)
        if const_expr(c.mma.ahead):
            if tiles > 0:
                self._finish_tile(peer, divisor, m, tiles - 1, 0)

    @cute.jit
    def _step(
        self, tensors: Tensors, scalars: Scalars, keys: Keys, boxes: BoxTiles | None, peer: Peer, row: Row,
        divisor: Any, m: Memory, n: Int32,
    ):  # fmt: skip
        """Load tile n and publish what has landed; returns this lane's row of tile n + 1."""
        c = self.c
        key = keys.first + (n + 1) * KEYS + own_row()
        entry = entry_of(tensors, scalars, keys, peer.cta.token, key)  # in flight while tile n is loaded
        if const_expr(self.boxes is None):
            self._load_tile(row, peer, divisor, m, n)
            self._finish_after(peer, divisor, m, n)
        else:
            if boxes.has(n):
                self._load_boxes(boxes, peer, divisor, m, n)
                self._finish_after(peer, divisor, m, n)
            else:  # duplicated, so that slot indices stay in registers
                self._load_tile(row, peer, divisor, m, n)
                self._finish_after(peer, divisor, m, n)
        return row_of(c, tensors, keys, key, entry)

    @cute.jit
    def _finish_after(self, peer: Peer, divisor: Any, m: Memory, n: Int32):
        """Publish what is due once all of tile n is in flight."""
        if const_expr(not self.c.mma.ahead):
            self._finish_tile(peer, divisor, m, n, 0)
        elif const_expr(self.before == self.parts):
            if n > 0:
                self._finish_tile(peer, divisor, m, n - 1, self.parts)

    @cute.jit
    def _load_boxes(self, boxes: BoxTiles, peer: Peer, divisor: Any, m: Memory, n: Int32):
        """Load a contiguous tile; ``cp.async`` groups stay empty."""
        for p in cutlass.range_constexpr(self.parts):
            self._await_part(Int32(-1), peer, divisor, m, p, n)
            self.boxes.load(boxes, m, n, p)
            cute.arch.cp_async_commit_group()

    def _peer(self, cta: CtaCoord, m: Memory) -> Peer:
        c = self.c
        if c.sides == 1:
            return Peer(cta, 0, 0, 0)
        rank = cta.split * c.sides + (1 - cta.side)
        return Peer(
            cta, op.cluster_address(m.ring_at, rank), op.cluster_address(m.ring.full.toint(), rank),
            (cta.side * _HALF + own_warp() * _EACH) * c.mma.row_bytes,
        )  # fmt: skip

    def _divisor(self, tensors: Tensors) -> Any:
        """Only encoded rows have one."""
        return None

    @cute.jit
    def _load_tile(self, row: Row, peer: Peer, divisor: Any, m: Memory, n: Int32):
        """Invalid rows are zero-filled."""
        counts = cute.arch.vote_ballot_sync(row.counts)
        column = cute.arch.lane_idx() % self.chunks * CHUNK
        cta = peer.cta
        lanes = [self._lane_of_row(cta, i) for i in range(self.steps)]
        sources = [held_by(x, row.address) + column for x in lanes]
        ahead = counts >> lanes[0]  # from this lane's first row on
        # Steps with the same swizzle share a base address; the rest is an immediate.
        period = const_expr(8 // self.rows_per_copy)
        firsts = [self._chunk_at(Int32(0), cta, i) for i in range(min(period, self.steps))]
        for p in cutlass.range_constexpr(self.parts):
            fill = n * self.parts + p
            self._await_part(counts, peer, divisor, m, p, n)
            stage = self._stage(m, fill)
            starts = [stage + first for first in firsts]
            for i in cutlass.range_constexpr(self.steps):
                target_at = (self._first_key(i) - self._first_key(i % period)) * self.c.mma.row_bytes
                valid = _bit_as_chunk(ahead, i * self.rows_per_copy)
                word_ops.copy_16_async_at(starts[i % period], target_at, sources[i], p * self.chunks * CHUNK, valid)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def _await_part(self, counts: Int32, peer: Peer, divisor: Any, m: Memory, p: cutlass.Constexpr, n: Int32):
        """Wait for the slot of a part; the first part publishes the tile's mask."""
        if const_expr(self.c.mma.ahead and p == self.before):
            if n > 0:
                self._finish_tile(peer, divisor, m, n - 1, p)
        m.ring.await_empty(n * self.parts + p)
        if const_expr(p == 0):
            if cute.arch.lane_idx() == 0:
                m.sMask[own_warp(), n % self.c.masks] = counts

    def _stage(self, m: Memory, fill: Int32) -> Int32:
        return m.ring_at + m.ring.slot(fill) * self.c.mma.stage_bytes

    def _lane_of_row(self, cta: CtaCoord, i: Any) -> Int32:
        """Lane of the warp whose row this lane copies in step i."""
        return cta.side * _EACH + i * self.rows_per_copy + cute.arch.lane_idx() // self.chunks

    def _key(self, cta: CtaCoord, i: Any) -> Int32:
        """Row of the tile that it is."""
        rest = cta.side * _HALF + own_warp() * _EACH + cute.arch.lane_idx() // self.chunks
        return rest + self._first_key(i)

    def _first_key(self, i: Any) -> Any:
        """First row of step i, known at compile time if unrolled."""
        first = i * self.rows_per_copy
        return first // _EACH * _HALF + first % _EACH

    def _chunk_at(self, stage: Int32, cta: CtaCoord, i: Any) -> Int32:
        """Swizzled address of this lane's chunk of step i."""
        chunk, key = cute.arch.lane_idx() % self.chunks, self._key(cta, i)
        block = stage + chunk // self.line * (KEYS * self.c.mma.row_bytes)
        return block + key * self.c.mma.row_bytes + ((chunk % self.line) ^ (key & 7)) * CHUNK

    @cute.jit
    def _finish_tile(self, peer: Peer, divisor: Any, m: Memory, n: Int32, after: cutlass.Constexpr):
        """Publish tile n to the MMA warp, and forward it, once ``after`` more parts are in flight."""
        for p in cutlass.range_constexpr(self.parts):
            cute.arch.cp_async_wait_group(self.parts - 1 - p + after)
            self._decode_part(peer, divisor, m, p, n)
            self._finish_part(peer, m, n * self.parts + p)

    def _decode_part(self, peer: Peer, divisor: Any, m: Memory, p: int, n: Int32) -> None:
        """16-bit rows need no dequantisation."""

    @cute.jit
    def _finish_part(self, peer: Peer, m: Memory, fill: Int32):
        """Publish this warp's keys of a part."""
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
