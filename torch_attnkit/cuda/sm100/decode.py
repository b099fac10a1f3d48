"""Attention of one query token with many query heads per KV head on Blackwell: ``tcgen05`` products, keys by TMA.

    loads --K, V--> ring          products: S' = K Q', O' += V' P', one warp, both in tensor memory
    softmax, two warpgroups: S' -> P' in shared memory, O' *= factor when a maximum moved far; then O -> the cluster

Keys are the 128 rows of a product and query heads its columns, so 16 heads cost no more than they are, and up to 64 of
them leave room in tensor memory for 512 columns of output: O' takes a row a column of V, D / 128 times the heads. V' is
the ring's buffer read along the other axis, so a tensor that is both caches is loaded once.

A cluster works on one piece. Its CTAs are up to two ``sides``, which have 64 heads each and the same keys, half of
which each loads for both by TMA multicast: 128 heads read the keys once. And they are ``splits`` shares of the piece's
tiles, of which a batch too small to fill the chip gets several; they merge through the cluster's shared memory, every
CTA some of the heads. What is left to merge, where clusters share a group, has thereby as many CTAs to do it as a
cluster has, each with those that have the same heads in other clusters (``decode_merge.py``): one launch, always.

Products are issued in this order, where K's or both tiles' buffers allow it, else one tile after the other:

    S(0) | S(1) O(0) | S(2) O(1) | ...

Rows that do not count are loaded with the rest of their tile and overwritten with zeros where V is read. A box of 16
keys or more lies in one page; for a page that there is none, TMA is given one beyond the cache: zeros, nothing read.
"""

from __future__ import annotations

import functools
import operator
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import blackwell_helpers as blackwell

from .. import warp_ops as op
from ..decode_merge import Merging
from ..decode_schedule import Lengths, Share, Visible, find, place, share, visible
from ..decode_types import Numbers, Scalars, Tensors
from ..partials import finite
from ..ring import Fixed, Ring
from ..warp_ops import exp2
from . import tmem
from .decode_rows import Rows, thread_index
from .decode_types import KEYS, ROWS, Layouts, Loads, Products, Site, TallConfig, Turn, Work

_ONE = tcgen05.CtaGroup.ONE
_CLUSTER = 8  # most CTAs of one
_AT_ONCE = 4  # parts that a thread has on the way while it merges


class _Memory(Fixed, SimpleNamespace):
    """Barriers, the ring, and addresses and tensors in shared memory."""


class Tall(Rows, Merging):
    """One kernel for both kinds of cache; see the top of this file."""

    c: TallConfig
    at_once = _AT_ONCE

    @cute.jit
    def __call__(self, tensors: Tensors, numbers: Numbers, clusters: Int32, stream: Any):
        c, n = self.c, numbers
        K, MN = OperandMajorMode.K, OperandMajorMode.MN
        tiler_qk, tiler_pv = (KEYS, c.heads, c.part), (c.part, c.heads, KEYS)
        qk = blackwell.make_trivial_tiled_mma(c.dtype, c.dtype, K, K, Float32, _ONE, tiler_qk[:2])
        pv = blackwell.make_trivial_tiled_mma(c.dtype, c.dtype, MN, MN, Float32, _ONE, tiler_pv[:2])
        swizzle = getattr(tcgen05.SmemLayoutAtomKind, f"K_SW{c.row_bytes}")
        atom = blackwell.make_smem_layout_atom(swizzle, c.dtype)
        boxes = c.stages * c.part // c.columns * c.boxes
        layouts = Layouts(
            blackwell.make_smem_layout_b(qk, tiler_qk, c.dtype, c.parts),
            blackwell.make_smem_layout_a(qk, tiler_qk, c.dtype, c.stages),
            blackwell.make_smem_layout_a(pv, tiler_pv, c.dtype, c.stages),
            blackwell.make_smem_layout_b(pv, tiler_pv, c.dtype, 1),
            cute.tile_to_shape(atom, (c.box, c.columns, boxes), order=(0, 1, 2)),
        )
        load = cpasync.CopyBulkTensorTileG2SMulticastOp(_ONE) if c.sides > 1 else cpasync.CopyBulkTensorTileG2SOp(_ONE)
        modes = [1, 3, 2, 0] if c.page else [2, 3, 1, 0]

        def loaded(cache: cute.Tensor) -> Any:
            rows = cute.make_tensor(
                cute.recast_ptr(cache.iterator, dtype=c.dtype), cute.select(cache.layout, mode=modes)
            )
            return cpasync.make_tiled_tma_atom(load, rows, cute.select(layouts.boxes, mode=[0, 1]), (c.box, c.columns))

        k_atom, k = loaded(tensors.k)
        v_atom, v = (k_atom, k) if const_expr(c.same) else loaded(tensors.v)
        size = Int32(tensors.table.shape[1]) * c.page if c.page else Int32(tensors.k.shape[2])
        lengths = Lengths(
            tensors.kv_len, tensors.kv_start, Int32(tensors.q.shape[0]), size, n.window, n.sink_tokens, n.has_start,
            n.by_group,
        )  # fmt: skip
        group = Int32(tensors.q.shape[1]) // Int32(tensors.k.shape[2 if c.page else 1])
        scalars = Scalars(n.scale, n.cap, n.has_sink, group, n.chunks, n.beside, n.least)
        ctas = n.combiners * c.sides
        self.kernel(tensors, Loads(k_atom, k, v_atom, v), lengths, scalars, layouts, Products(qk, pv)).launch(
            grid=[clusters * ctas, 1, 1], block=[c.threads, 1, 1], cluster=[ctas, 1, 1], stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, tensors: Tensors, loads: Loads, lengths: Lengths, scalars: Scalars, layouts: Layouts, products: Products
    ):
        c = self.c
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        m = self._memory(layouts, warp)
        if warp == c.load_warp:
            cpasync.prefetch_descriptor(loads.k_atom)
            cpasync.prefetch_descriptor(loads.v_atom)
        cute.arch.mbarrier_init_fence()
        tmem.before_sync()
        self._meet_cluster()
        tmem.after_sync()
        rank, ctas = cute.arch.block_in_cluster_idx()[0], cute.arch.block_in_cluster_dim()[0]
        cluster, clusters = cute.arch.block_idx()[0] // ctas, cute.arch.grid_dim()[0] // ctas
        groups = Int32(tensors.k.shape[2 if c.page else 1]) * scalars.chunks
        cut = share(lengths, groups, clusters, scalars.least, KEYS)
        at, stop = cut.start(cluster), cut.start(cluster + 1)
        if cluster >= cut.blocks:
            at = stop
        sequence, before = find(lengths, groups, at, KEYS)
        self.keep(m.site, Site(rank % c.sides, rank // c.sides, ctas // c.sides, rank, cluster, clusters, *cut))
        n, pieces = Int32(0), Int32(0)  # tiles so far, and pieces that had one
        # A cluster's first piece has its even slot of the workspace; of those after it only the last can be a part.
        odd = Int32(0)
        while at < stop:
            site = self.kept(m.site, Site)
            keys = visible(lengths, sequence, KEYS)
            group = (at - before) // keys.units
            start = before + group * keys.units
            units = cutlass.min(start + keys.units, stop) - at
            work = self._work(scalars, keys, site, sequence, group, at - start, units)
            last = at + units == before + keys.units * groups
            turn = Turn(
                at + units, stop, cutlass.select_(last, at + units, before), sequence + Int32(last), n + work.tiles,
                pieces + Int32(work.tiles > 0), odd, Int32(units == keys.units), start, keys.tiles,
            )  # fmt: skip
            self.keep(m.keys, keys)
            self.keep(m.work, work)
            self.keep(m.turn, turn)
            if warp < c.product_warp:
                self.attend(tensors, scalars, m, n)
            elif warp == c.product_warp:
                self.multiply(products, site, m, n, work.tiles, pieces)
            else:
                self.load(tensors, loads, keys, work, site, m, n)
            self._finish_piece(tensors, scalars, m)
            turn = self.kept(m.turn, Turn)
            at, stop, before, sequence, n, pieces = turn[:6]
            odd = Int32(1)
        if warp == c.load_warp:
            # The other side's last releases arrive here, so not before them may this CTA be gone.
            for s in cutlass.range_constexpr(c.stages):
                m.ring.await_empty(n * c.fills + s)
        tmem.after_sync()
        if warp == c.product_warp:
            cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.dealloc_tmem(tmem.pointer(Float32, 0), tmem.COLUMNS)

    def _meet_cluster(self) -> None:
        """All threads of the cluster."""
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def _memory(self, layouts: Layouts, warp: Int32):
        """Lay out shared memory, set up the barriers and take tensor memory; the caller meets the cluster then."""
        c = self.c
        memory = cutlass.memory.SmemAllocator()
        large = memory.allocate(c.shared_bytes, 1024).toint()
        sQ, sP, sKV = large, large + c.query_bytes, large + (c.query_bytes + c.weights_bytes)

        def staged(at: Int32, layout: cute.ComposedLayout) -> cute.Tensor:
            pointer = cute.make_ptr(c.dtype, at, cute.AddressSpace.smem, assumed_align=1024)
            return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=c.dtype), layout.outer)

        def floats(count: int) -> cute.Tensor:
            return memory.allocate_tensor(Float32, cute.make_layout(count), 16)

        kept = {
            name: memory.allocate_tensor(Int32, cute.make_layout((len(kind._fields), c.threads // 32)), 16)
            for name, kind in (("site", Site), ("turn", Turn), ("work", Work), ("keys", Visible))
        }

        counts = {"query": (1, 1), "scores": (2, 1), "values": (1, 1), "weights": (1, ROWS // 32), "output": (1, 1)}
        single = {name: memory.allocate_array(cutlass.Int64, stages) for name, (stages, _) in counts.items()}
        ring = Ring(*(memory.allocate_array(cutlass.Int64, c.stages) for _ in range(2)), c.stages)
        word, base = memory.allocate(16, 16).toint(), memory.allocate(4, 4)
        if warp == 0:
            with cute.arch.elect_one():
                for name, (stages, arrivals) in counts.items():
                    for i in range(stages):
                        cute.arch.mbarrier_init(single[name] + i, arrivals)
                for i in range(c.stages):
                    cute.arch.mbarrier_init(ring.full + i, 1)
                    cute.arch.mbarrier_init(ring.empty + i, c.sides)
        if warp == c.product_warp:
            cute.arch.alloc_tmem(tmem.COLUMNS, cute.recast_ptr(base, dtype=Int32))
        rows = cute.make_ptr(Float32, sKV, cute.AddressSpace.smem, assumed_align=16)
        return _Memory(
            **single,
            **kept,
            ring=ring,
            word=word,
            sP=sP,
            sQ=sQ,
            sKV=sKV,
            tQ=staged(sQ, layouts.q),
            tK=staged(sKV, layouts.k),
            tV=staged(sKV, layouts.v),
            tP=staged(sP, layouts.p),
            boxes=staged(sKV, layouts.boxes),
            shift=floats(c.heads),  # what is added to a head's scores, in powers of two
            change=floats(c.heads),  # of the shift, in this tile
            factor=floats(c.heads),  # two to that
            warps=floats(c.heads * 4),  # maxima or sums of the four warps
            result=floats(c.heads * 2),  # a piece's maximum and sum; read by the cluster
            rows=cute.make_tensor(rows, cute.make_layout(c.heads * c.dim)),  # O of a piece; read by the cluster
        )

    def _word(self, shared: Int32) -> Any:
        at = cute.make_ptr(Int32, shared, cute.AddressSpace.smem, assumed_align=16)
        return cute.make_tensor(at, cute.make_layout(1))

    def _own_workspace(self, tensors: Tensors, site: Site) -> Tensors:
        """The parts of the CTA's side, and counters of its own: CTAs of a cluster end their groups independently."""
        parts = tensors.parts.iterator + Int64(site.side) * (2 * self.c.part_floats) * site.clusters
        count = tensors.count.iterator + site.rank * site.clusters
        return tensors._replace(
            parts=cute.make_tensor(parts, tensors.parts.layout), count=cute.make_tensor(count, tensors.count.layout)
        )

    def _work(
        self, scalars: Scalars, keys: Any, at: Site, sequence: Int32, group: Int32, first: Int32, units: Int32
    ) -> Work:
        """What of ``units`` units of a group, from ``first`` on, this CTA has: every ``splits``-th tile, and all rows
        of its side for these; of the merged rows a share."""
        c = self.c
        tiles = cutlass.select_(keys.units == units, keys.tiles, units)
        nothing = (keys.end <= keys.low) & (keys.sinks_end <= keys.start)
        tiles = cutlass.select_(nothing, Int32(0), tiles)
        kv_head, chunk = group // scalars.chunks, group % scalars.chunks
        head = (chunk * c.sides + at.side) * c.heads
        heads = cutlass.max(cutlass.min(scalars.group - head, c.heads), 0)
        row = heads * at.split // at.splits
        return Work(
            sequence, kv_head, kv_head * scalars.group + head, heads, first + at.split, at.splits,
            cutlass.max(tiles - at.split + at.splits - 1, 0) // at.splits, row,
            heads * (at.split + 1) // at.splits - row,
        )  # fmt: skip

    # Fills of the ring are in the order of use, K and V of a tile apart by the next tile's K. ``n`` tiles were before
    # the piece, which has tile i.
    def key_fill(self, n: Int32, i: Any) -> Any:
        c = self.c
        return c.parts * (n + i) if c.same else c.parts * (2 * n + cutlass.max(2 * i - 1, 0))

    def value_fill(self, n: Int32, i: Int32, tiles: Int32) -> Any:
        c = self.c
        return c.parts * (n + i) if c.same else c.parts * (2 * n + cutlass.min(2 * i + 2, 2 * tiles - 1))

    @cute.jit
    def load(self, tensors: Tensors, loads: Loads, keys: Any, work: Work, at: Site, m: Any, n: Int32):
        """One warp: all tiles of a piece."""
        c = self.c
        more = const_expr(0 if c.same else 1)
        for i in cutlass.range(work.tiles + more, unroll=1):
            if i < work.tiles:
                self._load_tile(tensors, loads.k_atom, loads.k, keys, work, at, m, i, self.key_fill(n, i))
            if const_expr(not c.same):
                if i > 0:
                    fill = self.value_fill(n, i - 1, work.tiles)
                    self._load_tile(tensors, loads.v_atom, loads.v, keys, work, at, m, i - 1, fill)

    @cute.jit
    def _load_tile(
        self, tensors: Tensors, atom: Any, cache: Any, keys: Any, work: Work, at: Site, m: Any, i: Int32, fill: Int32
    ):
        """This CTA's half of a tile, or all, to whom it belongs."""
        c = self.c
        first, low, high = place(keys, work.first + i * work.step, KEYS)
        mask = {"mcast_mask": cutlass.Int16(3 << (at.split * 2))} if c.sides > 1 else {}
        own = const_expr(c.boxes // c.sides)
        begin = at.side * own  # the first box
        page = self._pages(tensors, work, first, low, high) if const_expr(c.page) else Int32(0)
        for p in cutlass.range(c.parts, unroll=1):
            full = m.ring.acquire(fill + p, c.buffer_bytes)
            for b in cutlass.range(own, unroll=1):
                box = begin + b
                row, last = first // c.box + box, work.b
                if const_expr(c.page):
                    row = (first + box * c.box) % c.page // c.box
                    last = cute.arch.shuffle_sync(page, box)
                gKV = cute.local_tile(cache[None, None, work.kv_head, last], (c.box, c.columns), (row, None))
                for x in cutlass.range_constexpr(c.part // c.columns):
                    to = (m.ring.slot(fill + p) * (c.part // c.columns) + x) * c.boxes + box
                    sBox, gBox = cpasync.tma_partition(
                        atom, 0, cute.make_layout(1), cute.group_modes(m.boxes[None, None, to], 0, 2),
                        cute.group_modes(gKV[None, None, p * (c.part // c.columns) + x], 0, 2),
                    )  # fmt: skip
                    cute.copy(atom, gBox, sBox, tma_bar_ptr=full, **mask)

    @cute.jit
    def _pages(self, tensors: Tensors, work: Work, first: Int32, low: Int32, high: Int32):
        """Lane l: the page of the tile's l-th box; -1, outside of any cache, where there is none to read."""
        c = self.c
        begin = first + cute.arch.lane_idx() * c.box
        logical, page = begin // c.page, Int32(-1)
        seen = (cute.arch.lane_idx() < c.boxes) & (begin < high) & (begin + c.box > low)
        if seen & (logical < Int32(tensors.table.shape[1])):
            row = tensors.table.iterator.toint() + Int64(tensors.table.stride[0]) * work.b * 4
            page = op.load_pair(row + Int64(logical) * 4)
        known = (page >= 0) & (page < Int32(tensors.k.shape[0]))
        return cutlass.select_(known, page, Int32(-1))

    @cute.jit
    def multiply(self, products: Products, at: Site, m: Any, n: Int32, tiles: Int32, pieces: Int32):
        """One warp: issues the products of a piece, in the order that the top of this file shows."""
        c = self.c
        if tiles > 0:
            cute.arch.mbarrier_wait(m.query, pieces & 1)
            tmem.after_sync()
            self._scores_of(products, at, m, n, Int32(0))
        for i in cutlass.range(1, tiles + 1, unroll=1):
            if const_expr(c.ahead):
                if i < tiles:
                    self._scores_of(products, at, m, n, i)
            self._output_of(products, at, m, n, i - 1, tiles)
            if const_expr(not c.ahead):
                if i < tiles:
                    self._scores_of(products, at, m, n, i)

    @cute.jit
    def _scores_of(self, products: Products, at: Site, m: Any, n: Int32, i: Int32):
        c = self.c
        qk = products.scores.get_slice(0)
        tK, tQ = qk.make_fragment_A(m.tK), qk.make_fragment_B(m.tQ)
        shape = qk.make_fragment_C(products.scores.partition_shape_C((KEYS, c.heads))).layout
        tS = cute.make_tensor(tmem.pointer(Float32, ((n + i) & 1) * c.heads), shape)
        fill = self.key_fill(n, i)
        for p in cutlass.range(c.parts, unroll=1):
            m.ring.wait(fill + p)
            slot = m.ring.slot(fill + p)
            self._product(products.scores, tS, tK[None, None, None, slot], tQ[None, None, None, p], p > 0)
            if const_expr(not c.same):
                self._release(m.ring, slot, at)
        with cute.arch.elect_one():
            tcgen05.commit(m.scores + ((n + i) & 1))

    @cute.jit
    def _output_of(self, products: Products, at: Site, m: Any, n: Int32, i: Int32, tiles: Int32):
        """Once the weights are there, and the output so far is in step with them."""
        c = self.c
        pv = products.output.get_slice(0)
        tV, tP = pv.make_fragment_A(m.tV), pv.make_fragment_B(m.tP)
        shape = pv.make_fragment_C(products.output.partition_shape_C((c.part, c.heads))).layout
        fill = self.value_fill(n, i, tiles)
        if const_expr(not c.same):
            for p in cutlass.range(c.parts, unroll=1):
                m.ring.wait(fill + p)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(m.values)
        cute.arch.mbarrier_wait(m.weights, (n + i) & 1)
        tmem.after_sync()
        for p in cutlass.range(c.parts, unroll=1):
            slot = m.ring.slot(fill + p)
            tO = cute.make_tensor(tmem.pointer(Float32, c.output + p * c.heads), shape)
            self._product(products.output, tO, tV[None, None, None, slot], tP[None, None, None, 0], i > 0)
            self._release(m.ring, slot, at)
        with cute.arch.elect_one():
            tcgen05.commit(m.output)

    def _release(self, ring: Ring, slot: Int32, at: Site) -> None:
        """Once the products so far are done; on both sides, for either fills half of a buffer on both."""
        with cute.arch.elect_one():
            tcgen05.commit(ring.empty + slot, cutlass.Int16(3 << (at.split * 2)) if self.c.sides > 1 else None)

    def _product(self, mma: cute.TiledMma, acc: Any, a: Any, b: Any, accumulate: Boolean) -> None:
        atom = cute.make_mma_atom(mma.op)
        atom.set(tcgen05.Field.ACCUMULATE, accumulate)
        for k in range(cute.size(a, mode=[2])):
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
            atom.set(tcgen05.Field.ACCUMULATE, True)

    @cute.jit
    def _finish_piece(self, tensors: Tensors, scalars: Scalars, m: Any):
        """Merge what the CTAs of this side have of this CTA's rows: a group's result goes out, a part into the
        workspace."""
        c = self.c
        self._meet_cluster()
        work, at, turn = self.kept(m.work, Work), self.kept(m.site, Site), self.kept(m.turn, Turn)
        slot = Int64(at.cluster * 2 + turn.odd)
        part = self._own_workspace(tensors, at).parts.iterator.toint() + slot * (c.part_floats * 4)
        lanes = const_expr(min(c.dim // 4, 32))  # that have a row
        thread = thread_index()
        for r in cutlass.range(thread // lanes, work.rows, c.threads // lanes, unroll=1):
            row = work.row + r
            stat_at = m.result.iterator.toint() + row * 8
            there = [cutlass.select_(i < at.splits, Int32(1), Int32(0)) for i in range(_CLUSTER // c.sides)]
            peers = [i * on * c.sides + at.side for i, on in enumerate(there)]
            stats = [
                op.load_cluster_floats(2, op.cluster_address(stat_at, peer), on)
                for peer, on in zip(peers, there, strict=True)
            ]
            tops = [cutlass.select_(on != 0, x[0], -Float32.inf) for x, on in zip(stats, there, strict=True)]
            top = functools.reduce(cute.arch.fmax, tops)
            weights = [exp2(x - finite(top)) for x in tops]
            total = functools.reduce(operator.add, [w * x[1] for w, x in zip(weights, stats, strict=True)])
            for x in cutlass.range(0, c.dim, lanes * 4, unroll=1):
                column = x + thread % lanes * 4
                o_at = m.rows.iterator.toint() + (row * c.dim + column) * 4
                rO = cute.make_rmem_tensor(4, Float32)
                rO.fill(0.0)
                for first in cutlass.range_constexpr(0, len(peers), _AT_ONCE):
                    if at.splits > first:
                        for i in cutlass.range_constexpr(first, min(first + _AT_ONCE, len(peers))):
                            new = op.load_cluster_floats(4, op.cluster_address(o_at, peers[i]), there[i])
                            for y in cutlass.range_constexpr(4):
                                rO[y] = rO[y] + weights[i] * new[y]
                sums = [rO[y] for y in range(4)]
                if turn.whole != 0:
                    self._store(tensors, scalars, work, row, column, sums, top, total)
                else:
                    op.store_4_floats(part + (row * c.dim + column) * 4, sums)
                    if column == 0:
                        stat = part + (c.heads * c.dim + row * 2) * 4
                        op.store_float(stat, top)
                        op.store_float(stat + 4, total)
        # The next piece's loads, which the tensor cores' side of memory makes, take the place of what was read here.
        cute.arch.fence_view_async_shared()
        self._meet_cluster()
        turn = self.kept(m.turn, Turn)
        if turn.whole == 0:
            work, at = self.kept(m.work, Work), self.kept(m.site, Site)
            cut = Share(at.total, at.blocks, at.each, at.extra)
            self._meet(self._own_workspace(tensors, at), scalars, cut, work, m.word, turn.start, turn.tiles)

    @cute.jit
    def _merge(self, tensors: Tensors, scalars: Scalars, piece: Work, slot: Int32, rest: Int32, more: Int32):
        """Of all clusters' parts of a group, this CTA's rows."""
        c = self.c
        vectors = const_expr(c.dim // 4)
        for index in cutlass.range(thread_index(), piece.rows * vectors, c.threads, unroll=1):
            row, column = piece.row + index // vectors, index % vectors * 4
            rO, top, total = self._add_parts(tensors, row, column, slot, rest, more, 1, Int32(-1), 1)
            self._store(tensors, scalars, piece, row, column, [rO[x] for x in range(4)], top, total)
