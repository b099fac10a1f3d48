"""What the loading warp brings for a work tile over pages: the queries, then K and V of its blocks, V one behind K,
pages looked up a block ahead.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.ring import Fixed

from ..key_blocks import KeyBlocks
from ..types import Inputs
from .paged_keys import Boxes, GatheredRows, Piece
from .types import CTAS, HALF, LANES, ROWS, Config, Loads, Mmas, OneCta, SharedMemory, TwoCta, WorkTile


def _heads_of_q(c: Config, loads: Loads, tile: WorkTile) -> cute.Tensor:
    """A work tile's head of Q, from its sequence's first token on: (T, D), or ((group, T), D)."""
    first = (tile.q0 if c.group == 1 else (0, tile.q0), 0)
    return cute.domain_offset(first, loads.q[None, None, tile.head])


def _kv_head_of(c: Config, ins: Inputs, tile: WorkTile) -> Int32:
    return tile.head // (Int32(ins.q.shape[1]) // Int32(ins.k.shape[2]) // c.group)


class OneCtaPagedLoad(Fixed):
    """For ``one_cta.py``: a stage is a block."""

    def __init__(self, config: OneCta, keys: Boxes | GatheredRows):
        self.c, self.keys = config, keys

    @cute.jit
    def load_tile(
        self,
        loads: Loads,
        ins: Inputs,
        mmas: Mmas,
        smem: SharedMemory,
        tile: WorkTile,
        visit: KeyBlocks,
        fills: Int32,
        n: Int32,
    ):
        c, keys, rings = self.c, self.keys, smem.rings
        kv_head = _kv_head_of(c, ins, tile)
        whole_k, whole_v = Piece(c.tile_n, c.dim, 0, 0), Piece(c.tile_n, c.dim_v, 0, 0)
        gQ = mmas.qk.get_slice(0).partition_A(cute.local_tile(_heads_of_q(c, loads, tile), (ROWS, c.dim), (None, 0)))
        tQsQ, tQgQ = copies.tma_partition(loads.q_atom, 0, 1, smem.sQ, gQ, 3)
        key_pages = keys.key_pages(ins, tile, visit.block(Int32(0)))
        for t in cutlass.range_constexpr(c.tiles):
            cute.arch.mbarrier_wait(rings.q.empty + t, (fills & 1) ^ 1)
            full = rings.q.full + t
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, c.nbytes(ROWS, c.dim))
            cute.copy(loads.q_atom, tQgQ[None, tile.row * c.tiles + t], tQsQ[None, t], tma_bar_ptr=full)
        ring_k, sK, ring_v, sV = rings.k, smem.sK, rings.v, smem.sV
        if const_expr(c.fp8_kv):
            ring_k, sK, ring_v, sV = rings.staged_k, smem.staged_k, rings.staged_v, smem.staged_v
        row_bytes = const_expr(c.tile_n if c.fp8_kv else c.nbytes(c.tile_n, 1))
        before = key_pages
        for i in cutlass.range(0, visit.steps + 1, unroll=1):
            following = keys.key_pages(ins, tile, visit.block(i + 1))
            if i < visit.steps:
                full = ring_k.acquire(n + i, row_bytes * c.dim)
                k, slot = (loads.k_atom, loads.k), ring_k.slot(n + i)
                keys.fill(k, sK, slot, full, whole_k, kv_head, key_pages, visit.block(i))
            if i > 0:
                full = ring_v.acquire(n + i - 1, row_bytes * c.dim_v)
                v, slot = (loads.v_atom, loads.v), ring_v.slot(n + i - 1)
                keys.fill(v, sV, slot, full, whole_v, kv_head, before, visit.block(i - 1))
            before, key_pages = key_pages, following


class TwoCtaPagedLoad(Fixed):
    """For ``two_cta.py``: a stage is a piece of a block, of which each CTA loads its half, of K half the keys and of V
    half the columns."""

    def __init__(self, config: TwoCta, keys: Boxes | GatheredRows):
        self.c, self.keys = config, keys

    @cute.jit
    def _expect(self, full: cute.Pointer, nbytes: cutlass.Constexpr, rank: Int32) -> None:
        """Announce bytes that each CTA loads, on the first one's barrier."""
        if rank == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, CTAS * nbytes)

    @cute.jit
    def load_tile(
        self,
        loads: Loads,
        ins: Inputs,
        mmas: Mmas,
        smem: SharedMemory,
        tile: WorkTile,
        visit: KeyBlocks,
        fills: Int32,
        n: Int32,
    ):
        c, keys, rings = self.c, self.keys, smem.rings
        kv_head, rank = _kv_head_of(c, ins, tile), cute.arch.block_idx()[0] % CTAS
        q_rows = cute.local_tile(_heads_of_q(c, loads, tile), (ROWS, c.piece), (tile.row, None))
        gQ = mmas.qk.get_slice(rank).partition_A(q_rows)
        tQsQ, tQgQ = copies.tma_partition(loads.q_atom, 0, 1, smem.sQ, gQ, 3)  # (box, pieces) both
        key_pages = keys.key_pages(ins, tile, visit.block(Int32(0)))
        full = rings.q.await_empty(fills)
        self._expect(full, c.nbytes(LANES, c.dim), rank)
        for part in cutlass.range_constexpr(c.k_pieces):
            cute.copy(loads.q_atom, tQgQ[None, part], tQsQ[None, part], tma_bar_ptr=full)
        before = key_pages
        for i in cutlass.range(0, visit.steps + 1, unroll=1):
            following = keys.key_pages(ins, tile, visit.block(i + 1))
            if i < visit.steps:
                self._load_k(loads, smem, kv_head, rank, key_pages, visit.block(i), n + i)
            if i > 0:
                self._load_v(loads, smem, kv_head, rank, before, visit.block(i - 1), n + i - 1)
            before, key_pages = key_pages, following

    @cute.jit
    def _load_k(
        self, loads: Loads, smem: SharedMemory, kv_head: Int32, rank: Int32, key_pages: tuple, block: Int32, n: Int32
    ):
        """Block ``block``, the n-th since the kernel's start."""
        c, ring, half = self.c, smem.rings.k, self.c.tile_n // CTAS
        for part in cutlass.range(0, c.k_pieces, unroll=1):
            k = n * c.k_pieces + part
            full = ring.await_empty(k)
            self._expect(full, c.nbytes(half, c.piece), rank)
            piece = Piece(half, c.piece, rank * half, part * c.piece, True)
            self.keys.fill((loads.k_atom, loads.k), smem.sK, ring.slot(k), full, piece, kv_head, key_pages, block)

    @cute.jit
    def _load_v(
        self, loads: Loads, smem: SharedMemory, kv_head: Int32, rank: Int32, key_pages: tuple, block: Int32, n: Int32
    ):
        c, ring, half = self.c, smem.rings.v, HALF // CTAS
        for part in cutlass.range(0, c.v_pieces, unroll=1):
            k = n * c.v_pieces + part
            full = ring.acquire(k, c.nbytes(c.part, half))
            piece = Piece(c.part, half, part % c.parts * c.part, part // c.parts * HALF + rank * half)
            self.keys.fill((loads.v_atom, loads.v), smem.sV, ring.slot(k), full, piece, kv_head, key_pages, block)
