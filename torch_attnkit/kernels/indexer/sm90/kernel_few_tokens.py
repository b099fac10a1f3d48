"""Indexer scores on Hopper, few tokens a request: queries stay in shared memory, keys stream past them by TMA.

    1 warp         keys, 128 at a time: two boxes by TMA, in a ring
    1 warp         k scales by cp.async, in the same ring
    1 warp         Q and head weights of a request's tokens, in a ring of two
    2 warpgroups   64 keys each: products with all heads of each token, relu, weighted sum over heads

Persistent: the visible tiles of 128 keys of all requests are split evenly over one or two CTAs per SM, which each scan
the lengths for their share. Tiles that no token sees are split likewise, and filled with -inf while the first keys are
in flight.

    ring      full                                       empty
    keys      1 and the bytes; 32 more with k scales     8 consumer warps
    queries   1 and the bytes                            8 consumer warps
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from torch_attnkit.cuda import copies, fake, l2
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed, Ring, rings

from ..arguments import Tensors
from . import head_reduce
from .load_keys import QUAD, from_shared, operand
from .plan import BOX, CONSUMERS, MOST_REQUESTS, TILE, StreamConfig

_LANES = 32
_PAGES = l2.LINE // 4  # of a line of a table
QUERIES = 2  # requests whose queries have arrived or are in flight


@dataclass
class StreamMemory(Fixed):
    """Rings of keys and queries; of each request the first of its tiles among all, and the most entries that its tokens
    see."""

    keys: Ring
    queries: Ring
    sK: cute.Tensor  # (BOX, elements of a key, boxes of all stages)
    sScale: cute.Tensor | None  # (TILE, stages), four bytes a key
    sQ: cute.Tensor  # (columns, D, tokens of all stages)
    weights: head_reduce.Weights  # of all tokens of all stages
    sStart: cute.Tensor  # (MOST_REQUESTS + 1)
    sLongest: cute.Tensor  # (MOST_REQUESTS)
    sShare: cute.Tensor  # (4, 2): this block's Share of the tiles that are seen, and of those that are not


@dataclass
class Share(Fixed):
    """A CTA's tiles [begin, end) of all, of requests [first, last)."""

    begin: Int32
    end: Int32
    first: Int32
    last: Int32


@dataclass
class Guess(Fixed):
    """Block-table entries loaded before lengths are known, as if all entries were visible: lane l has the page of box l
    of the CTA's tiles, which begin at ``row`` of ``request``."""

    request: Int32
    row: Int32
    page: Int32


class FewTokens(Fixed):
    def __init__(self, config: StreamConfig):
        self.c = config
        self.dtype = fake.dtype(config.dtype)
        self.decodes = config.stored != config.dtype
        self.stored = Uint8 if self.decodes else self.dtype

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (T, H, D)
        mK: cute.Tensor,  # (R, S, elements of a key), or in pages
        mWeight: cute.Tensor,  # (T, H)
        mLength: cute.Tensor,  # (T,)
        mTable: cute.Tensor | None,  # (R, M)
        mQScale: cute.Tensor | None,  # (T, H, 1)
        mKScale: cute.Tensor | None,  # (R, S, 1), of MXFP4 (R, S, D/32)
        mScores: cute.Tensor,  # (T, S), contiguous
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        c = self.c
        requests = Int32(mK.shape[0] if const_expr(mTable is None) else mTable.shape[0])
        queries, keys, atoms = self.by_tma(mQ, mK)
        tensors = (mK, mWeight, mLength, None, mTable, mQScale, mKScale, mScores)
        self.kernel(*atoms[0], *atoms[1], queries, keys, tensors, requests).launch(
            grid=(blocks, 1, 1),
            block=(c.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=c.blocks,
            preferred_smem_carveout=100,
        )

    def by_tma(self, mQ: cute.Tensor, mK: cute.Tensor) -> tuple:
        """Shared-memory layouts of queries and keys, and their TMA atoms."""
        c = self.c
        queries, keys = self.layout(c.columns, QUERIES * c.tokens), self.layout(BOX, c.stages * CONSUMERS)
        if self.decodes:  # read by threads, a row after the other
            keys = cute.make_layout(
                (BOX, c.row_bytes, c.stages * CONSUMERS), stride=(c.row_bytes, 1, BOX * c.row_bytes)
            )
            keys = cute.make_composed_layout(cute.make_swizzle(0, 4, 3), 0, keys)
        rows = self.rows(mQ, self.dtype), self.rows(mK, self.stored)
        return queries, keys, [copies.tma_atom(t, at) for t, at in zip(rows, (queries, keys), strict=True)]

    def layout(self, rows: int, stages: int) -> cute.ComposedLayout:
        atom = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, self.c.dim)
        shape = (rows, self.c.dim, stages)
        return cute.tile_to_shape(warpgroup.make_smem_layout_atom(atom, self.dtype), shape, order=(0, 1, 2))

    def rows(self, t: cute.Tensor, dtype: Any) -> cute.Tensor:
        """As TMA takes it: the first axis last; E4M3 as bytes."""
        return cute.make_tensor(cute.recast_ptr(t.iterator, dtype=dtype), cute.select(t.layout, mode=[1, 2, 0]))

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        q_rows: cute.Tensor,
        k_atom: cute.CopyAtom,
        k_rows: cute.Tensor,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        tensors: tuple,
        requests: Int32,
    ):
        c = self.c
        t = Tensors(*tensors)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.shared(q_layout, k_layout, warp)
        cute.arch.mbarrier_init_fence()
        guess = self.begin(t, shared, k_atom, q_atom, warp, requests)
        seen = self.share(shared, 0)
        if warp == c.loader:
            self.load_keys(t, shared, k_atom, k_rows, seen, guess)
        elif warp == c.loader + 1:
            self.load_queries(t, shared, q_atom, q_rows, seen)
        elif warp == c.loader + 2:
            if const_expr(c.scales):  # else there is no such warp
                self.load_tiles(t, shared, seen, guess, None)
        else:
            self.clear(t, shared, self.share(shared, 1))
            self.consume(t, shared, seen)

    @cute.jit
    def shared(self, q_layout: cute.ComposedLayout, k_layout: cute.ComposedLayout, warp: Int32):
        c = self.c
        memory = cutlass.memory.SmemAllocator()
        arrivals = const_expr(1 + (_LANES if c.scales else 0))
        table = (("keys", c.stages, arrivals, CONSUMERS * 4), ("queries", QUERIES, 1, CONSUMERS * 4))
        named = rings(memory, warp - 1, table)  # warp 1 initialises them, for everybody waits for warp 0's lengths
        vector = lambda kind, *shape: memory.allocate_tensor(kind, cute.make_layout(shape), byte_alignment=16)
        return StreamMemory(
            keys=named["keys"],
            queries=named["queries"],
            sK=memory.allocate_tensor(self.stored, k_layout.outer, 1024, swizzle=k_layout.inner),
            sScale=vector(Float32 if c.k_scale else Int32, TILE, c.stages) if const_expr(c.scales) else None,
            sQ=memory.allocate_tensor(self.dtype, q_layout.outer, 1024, swizzle=q_layout.inner),
            weights=head_reduce.shared_weights(c, memory, QUERIES * c.tokens),
            sStart=vector(Int32, MOST_REQUESTS + 1),
            sLongest=vector(Int32, MOST_REQUESTS),
            sShare=vector(Int32, 4, 2),
        )

    @cute.jit
    def begin(
        self,
        t: Tensors,
        shared: StreamMemory,
        k_atom: cute.CopyAtom,
        q_atom: cute.CopyAtom,
        warp: Int32,
        requests: Int32,
    ) -> Guess:
        """Until all warps know the CTA's shares; what does not depend on lengths overlaps their load."""
        c = self.c
        if warp == 0:
            self.count(t, shared, requests)
        elif warp == c.loader:
            cpasync.prefetch_descriptor(k_atom)
        elif warp == c.loader + 1:
            cpasync.prefetch_descriptor(q_atom)
        page, at, row = Int32(-1), Int32(-1), Int32(0)
        if const_expr(c.paged):
            if warp >= c.loader:
                page, at, row = self.guess(t, requests)
            if warp == c.loader + 1:
                self.prefetch_table(t, requests)
        cute.arch.barrier()
        return Guess(at, row, page)

    def tiles(self, t: Tensors) -> Int32:
        """Tiles of a request, visible or not."""
        return (Int32(t.mScores.shape[1]) + (TILE - 1)) // TILE

    def part(self, total: Int32, block: Int32) -> Int32:
        """First of a CTA's share of ``total`` tiles; the first CTAs have one more if uneven. Unsigned division is
        shorter."""
        blocks, tiles = Uint32(cute.arch.grid_dim()[0]), Uint32(total)
        return Int32(tiles // blocks) * block + cutlass.min(block, Int32(tiles % blocks))

    @cute.jit
    def share(self, shared: StreamMemory, kind: int) -> Share:
        """This CTA's share of the visible tiles (kind 0), or of the others (1)."""
        return Share(*(shared.sShare[i, kind] for i in range(4)))

    @cute.jit
    def guess(self, t: Tensors, requests: Int32):
        """(page, request, row) of a ``Guess``."""
        tiles, page = self.tiles(t), Int32(-1)
        begin = self.part(tiles * requests, cute.arch.block_idx()[0])
        request = Int32(Uint32(begin) // Uint32(tiles))
        row = (begin - request * tiles) * TILE
        lane_row = row + cute.arch.lane_idx() * BOX
        if (request < requests) & (lane_row < t.mScores.shape[1]):
            page = Int32(t.mTable[request, lane_row // Int32(t.mK.shape[1])])
        return page, request, row

    @cute.jit
    def prefetch_table(self, t: Tensors, requests: Int32):
        """One warp: prefetch this CTA's share of the block table to L2, before lengths say which of it is needed."""
        columns = Int32(t.mTable.shape[1])
        lines = (columns + (_PAGES - 1)) // _PAGES  # of a request
        line = cute.arch.lane_idx() * cute.arch.grid_dim()[0] + cute.arch.block_idx()[0]
        if line // lines < requests:
            l2.prefetch(t.mTable[line // lines, None].iterator.toint() + line % lines * l2.LINE)

    @cute.jit
    def count(self, t: Tensors, shared: StreamMemory, requests: Int32):
        """One warp: prefix sum of the requests' tiles, and the requests of this CTA."""
        c = self.c
        lane = cute.arch.lane_idx()
        entries = Int32(t.mScores.shape[1])
        total = Int32(0)
        for base in cutlass.range(0, requests, _LANES, unroll=4):
            request = cutlass.min(base + lane, requests - 1)
            longest = Int32(0)
            for i in cutlass.range_constexpr(c.tokens):
                longest = cutlass.max(longest, Int32(t.mLength[request * c.tokens + i]))
            longest = cutlass.min(longest, entries)
            num_tiles = cutlass.select_(base + lane < requests, (longest + (TILE - 1)) // TILE, Int32(0))
            upto = num_tiles
            for step in (1, 2, 4, 8, 16):
                below = cute.arch.shuffle_sync_up(upto, step)
                upto += cutlass.select_(lane >= step, below, Int32(0))
            if base + lane < requests:
                shared.sStart[request] = total + upto - num_tiles
                shared.sLongest[request] = longest
            total += cute.arch.shuffle_sync(upto, _LANES - 1)
        if lane == 0:
            shared.sStart[requests] = total
        cute.arch.sync_warp()
        tiles, block = self.tiles(t), cute.arch.block_idx()[0]
        totals = (total, tiles * requests - total)
        bounds = [(self.part(all, block), self.part(all, block + 1)) for all in totals]
        counts = [Int32(0) for _ in range(4)]
        for base in cutlass.range(0, requests, _LANES, unroll=1):
            request = base + lane
            valid = request < requests
            request = cutlass.min(request, requests - 1)
            start, end = shared.sStart[request], shared.sStart[request + 1]
            starts, ends = (start, tiles * request - start), (end, tiles * (request + 1) - end)
            for kind in cutlass.range_constexpr(2):
                before, begun = valid & (ends[kind] <= bounds[kind][0]), valid & (starts[kind] < bounds[kind][1])
                counts[2 * kind] += Int32(cute.arch.popc(cute.arch.vote_ballot_sync(before)))
                counts[2 * kind + 1] += Int32(cute.arch.popc(cute.arch.vote_ballot_sync(begun)))
        if lane == 0:
            for kind in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(2):
                    shared.sShare[i, kind], shared.sShare[2 + i, kind] = bounds[kind][i], counts[2 * kind + i]

    @cute.jit
    def load_keys(
        self, t: Tensors, shared: StreamMemory, atom: cute.CopyAtom, rows: cute.Tensor, share: Share, guess: Guess
    ):
        """One warp: the CTA's key tiles."""
        boxes = cute.local_tile(rows, (BOX, self.c.row_bytes * 8 // self.stored.width), (None, 0, None))
        # (box, boxes of all stages), (box, boxes of a page or request, pages or requests)
        self.load_tiles(t, shared, share, guess, (atom, *copies.tma_partition(atom, 0, 1, shared.sK, boxes)))

    @cute.jit
    def load_tiles(self, t: Tensors, shared: StreamMemory, share: Share, guess: Guess, keys: tuple | None):
        """One warp: the CTA's tiles: ``keys`` by TMA, or, if None, their scales."""
        c = self.c
        ring, lane = shared.keys, cute.arch.lane_idx()
        for request in cutlass.range(share.first, share.last, unroll=1):
            start, longest = shared.sStart[request], shared.sLongest[request]
            first, last = cutlass.max(start, share.begin), cutlass.min(shared.sStart[request + 1], share.end)
            page_or_request, entry = Int32(-1), Int32(0)
            for tile in cutlass.range(first, last, unroll=1):
                n, row = tile - share.begin, (tile - start) * TILE
                slot = ring.slot(n)
                # Every lane looks a box up, so that a table's latency comes once in 16 tiles.
                box = (tile - first) * CONSUMERS % _LANES
                if box == 0:
                    known = (request == guess.request) & (row == guess.row)
                    page_or_request, entry = self.locate(t, request, row + lane * BOX, longest, known, guess.page)
                box_coords = [
                    [cute.arch.shuffle_sync(x, box + i) for x in (page_or_request, entry)] for i in range(CONSUMERS)
                ]
                if const_expr(keys is not None):
                    atom, tKs, tKg = keys
                    full = ring.acquire(n, TILE * c.row_bytes)
                    for i in cutlass.range_constexpr(CONSUMERS):
                        source = tKg[None, box_coords[i][1] // BOX, box_coords[i][0]]
                        cute.copy(atom, source, tKs[None, slot * CONSUMERS + i], tma_bar_ptr=full)
                else:
                    full = ring.await_empty(n)
                    for i in cutlass.range_constexpr(CONSUMERS):
                        self.load_scales(t, shared, slot, i, row + i * BOX, longest, *box_coords[i])
                    cute.arch.cp_async_mbarrier_arrive_noinc(full)

    @cute.jit
    def locate(self, t: Tensors, request: Int32, row: Int32, longest: Int32, known: cutlass.Boolean, page: Int32):
        """(page or request, entry) of a box of keys; out of range, for which TMA writes zeros, if it is invisible or
        its page invalid."""
        page_or_request, entry = request, row
        if const_expr(self.c.paged):
            size = Int32(t.mK.shape[1])
            page_or_request, entry = page, row % size
            if (row < longest) & ~known:
                page_or_request = Int32(t.mTable[request, row // size])
        missing = (row >= longest) | (page_or_request < 0) | (page_or_request >= t.mK.shape[0])
        return cutlass.select_(missing, Int32(-1), page_or_request), entry

    @cute.jit
    def load_scales(
        self, t: Tensors, shared: StreamMemory, slot: Int32, box: cutlass.Constexpr, row: Int32, longest: Int32,
        page_or_request: Int32, entry: Int32,
    ):  # fmt: skip
        """Scales of a box of keys; 0 for invisible ones."""
        for i in cutlass.range_constexpr(BOX // _LANES):
            key = cute.arch.lane_idx() + i * _LANES
            valid = (page_or_request >= 0) & (row + key < longest)
            source = t.mKScale[
                cutlass.max(page_or_request, 0), cutlass.select_(valid, entry + key, Int32(0)), None
            ].iterator
            target = shared.sScale.iterator + (slot * TILE + box * BOX + key)
            op.copy_4_async(Int32(target.toint()), source.toint(), cutlass.select_(valid, Int32(4), Int32(0)))

    @cute.jit
    def load_queries(self, t: Tensors, shared: StreamMemory, atom: cute.CopyAtom, rows: cute.Tensor, share: Share):
        """One warp: Q and weights of the tokens of the CTA's requests."""
        c = self.c
        ring = shared.queries
        tQs, tQg = copies.tma_partition(
            atom, 0, 1, shared.sQ, cute.local_tile(rows, (c.columns, c.dim), (0, 0, None))
        )  # (box, tokens of all stages), (box, tokens)
        local_weights = [head_reduce.of_lane(c) for _ in range(c.tokens)]
        for request in cutlass.range(share.first, share.last, unroll=1):
            n = request - share.first
            slot = ring.slot(n)
            for i in cutlass.range_constexpr(c.tokens):
                head_reduce.fetch(c, t, request * c.tokens + i, local_weights[i])
            full = ring.await_empty(n)
            # Queries do not wait for weights, which the warp arrives for when it has stored them.
            with cute.arch.elect_one():
                cute.arch.mbarrier_expect_tx(full, c.tokens * c.columns * c.dim * c.itemsize)
            for i in cutlass.range_constexpr(c.tokens):
                cute.copy(
                    atom, tQg[None, request * c.tokens + i], tQs[None, slot * c.tokens + i], tma_bar_ptr=full
                )  # fmt: skip
            for i in cutlass.range_constexpr(c.tokens):
                head_reduce.share(c, local_weights[i], shared.weights, slot * c.tokens + i)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(full)

    @cute.jit
    def clear(self, t: Tensors, shared: StreamMemory, share: Share):
        """Consumers: -inf for the CTA's tiles that no token sees."""
        c = self.c
        tiles, entries = self.tiles(t), Int32(t.mScores.shape[1])
        thread, _, _ = cute.arch.thread_idx()
        for request in cutlass.range(share.first, share.last, unroll=1):
            seen = shared.sStart[request + 1] - shared.sStart[request]
            start = tiles * request - shared.sStart[request]  # of the request's tiles among all that are not seen
            first, last = cutlass.max(start, share.begin), cutlass.min(start + tiles - seen, share.end)
            begin, end = (seen + first - start) * TILE, cutlass.min((seen + last - start) * TILE, entries)
            for i in cutlass.range_constexpr(c.tokens):
                for j in cutlass.range(begin + thread, end, CONSUMERS * 128, unroll=1):
                    t.mScores[request * c.tokens + i, j] = -Float32.inf

    @cute.jit
    def consume(self, t: Tensors, shared: StreamMemory, share: Share):
        """One warpgroup: scores of its 64 keys of every tile, for all tokens of the request."""
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        mma = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (64, c.columns),
            warpgroup.OperandSource.RMEM if self.decodes else warpgroup.OperandSource.SMEM,
        )  # fmt: skip
        group = cute.arch.make_warp_uniform(thread // 128)
        thr_mma = mma.get_slice(thread % 128)
        tB = thr_mma.make_fragment_B(thr_mma.partition_B(shared.sQ))
        tA = None if const_expr(self.decodes) else thr_mma.make_fragment_A(thr_mma.partition_A(shared.sK))
        accs = [cute.make_rmem_tensor(mma.partition_shape_C((64, c.columns)), Float32) for _ in range(c.tokens)]
        lane = cute.arch.lane_idx() % QUAD
        key = group * BOX + thread // 32 % 4 * 16 + cute.arch.lane_idx() // QUAD  # and 8 below it
        entries = Int32(t.mScores.shape[1])
        for request in cutlass.range(share.first, share.last, unroll=1):
            start, q = shared.sStart[request], request - share.first
            first, last = cutlass.max(start, share.begin), cutlass.min(shared.sStart[request + 1], share.end)
            stage = shared.queries.slot(q) * c.tokens
            shared.queries.wait(q)
            lengths = [Int32(t.mLength[request * c.tokens + i]) for i in range(c.tokens)]
            for tile in cutlass.range(first, last, unroll=1):
                n = tile - share.begin
                slot = shared.keys.slot(n)
                shared.keys.wait(n)
                box_stage = slot * CONSUMERS + group
                if const_expr(self.decodes):
                    rows = [
                        from_shared(
                            shared.sK[key - group * BOX + 8 * r, None, box_stage], shared.sScale[key + 8 * r, slot]
                        )
                        for r in range(2)
                    ]
                    tA_tile = operand(c, mma, rows).rA
                else:
                    tA_tile = tA[None, None, None, box_stage]
                for i in cutlass.range_constexpr(c.tokens):
                    head_reduce.multiply(mma, tA_tile, tB[None, None, None, stage + i], accs[i])
                factors = None
                if const_expr(c.k_scale):
                    factors = [shared.sScale[key + 8 * r, slot] for r in range(2)]
                row = (tile - start) * TILE + key + lane % 2 * 8
                for i in cutlass.range_constexpr(c.tokens):
                    weights = head_reduce.of_columns(c, shared.weights, stage + i)
                    warpgroup.wait_group(c.tokens - 1 - i)
                    if const_expr(i == c.tokens - 1):
                        shared.keys.release(n)
                    value = head_reduce.over_quad(head_reduce.sums(c, accs[i], weights, factors))
                    if (lane < 2) & (row < entries):
                        t.mScores[request * c.tokens + i, row] = cutlass.select_(row < lengths[i], value, -Float32.inf)
            shared.queries.release(q)


def trace_stream(arch: str, config: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    c = StreamConfig(*config)
    scores = fake.tensor("f32", (fake.dim32(), fake.dim32()), align=4)
    return FewTokens(c), [*stream_arguments(c), scores, Int32(0), fake.stream()]


def stream_arguments(c: StreamConfig) -> list[Any]:
    """Fake arguments that both kernels for few tokens read."""
    T, requests = fake.dim32(), fake.dim32()

    def rows(name: str, row_bytes: int, *shape: Any) -> Any:
        name = "u8" if name in ("mxfp4", "f8e4m3") else name  # not every torch hands E4M3 over
        size = fake.dtype(name).width // 8
        step = 16 // size  # TMA takes multiples of 16 bytes
        return fake.tensor(name, (*shape, row_bytes // size), (fake.dim(step), fake.dim(step), 1))

    scale = None
    if c.scales:
        four = c.stored == "mxfp4"
        steps = (fake.dim(4), fake.dim(4), 1) if four else None
        scale = fake.tensor("u8" if four else "f32", (fake.dim32(), fake.dim32(), 4 if four else 1), steps, align=4)
    return [
        rows(c.dtype, c.dim * c.itemsize, T, c.heads),
        rows(c.stored, c.row_bytes, fake.dim32(), fake.dim32()),
        fake.tensor(c.weights, (T, c.heads), align=fake.dtype(c.weights).width // 8),
        fake.tensor("i32", (T,), (None,), align=4),
        fake.tensor("i32", (requests, fake.dim32()), align=4) if c.paged else None,
        fake.tensor("f32", (T, c.heads, 1), align=4) if c.q_scale else None,
        scale,
    ]
