"""Decode for many query heads a KV head on Blackwell: ``tcgen05`` products, keys by TMA, clusters that share keys.

    out, lse = softmax(scale Q K') V      D/Dv 64 to 512, 576/512; bf16, fp16, all of E4M3; contiguous or paged

Persistent clusters of up to 8 CTAs of 320 threads. Warp roles of a CTA:

    warps 0-7   softmax (``softmax_warps.py``)   S' -> P' in shared memory; O' *= factor when a maximum moved far
    warp 8      products   S' = K Q', O' += V' P', issued S(0) | S(1) O(0) | S(2) O(1) | ..., both in tensor memory
    warp 9      loads      K and V by TMA into the ring, in the order of use

mbarriers, with the arrivals that complete a phase (``memory.py``):

    query           softmax -> products                          1
    ring.full       TMA -> products                              1, and the bytes
    ring.empty      tcgen05.commit of all sides -> loads         ``sides``
    scores (2)      tcgen05.commit -> softmax                    1
    values          products: V is there -> softmax zeroes rows  1, unless V is K
    probabilities   softmax's warps: P', O' rescaled -> products 8
    output          tcgen05.commit -> softmax                    1

Keys are the 128 rows of a product and query heads its columns, so 16 heads cost no more than they are, and 64 leave
room in tensor memory for 512 columns of O', a row a column of V. V' is the ring's stage read along the other axis, so a
tensor that is both caches is loaded once.

A cluster has one work tile. Its CTAs are ``sides``, with other heads and the same keys, of which each loads its share
for all by multicast (128 heads read keys once; of 576 columns four sides of 32 heads), times ``splits``, shares of the
keys of a work tile where the batch is too small to fill the chip. These are combined through distributed shared memory;
where clusters share a group, the last one to arrive combines their splits: always one launch.

Rows that do not count are loaded with their tile and zeroed where V is read. A box of 16 keys or more lies in one page;
for a missing page TMA is given one out of bounds: zeros, nothing read.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import blackwell_helpers as blackwell

from torch_attnkit.cuda import paging
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import finite
from torch_attnkit.cuda.ring import Ring
from torch_attnkit.cuda.sm100 import tmem
from torch_attnkit.cuda.sm100.peers import sync_cluster
from torch_attnkit.cuda.smem import Region
from torch_attnkit.cuda.warp_ops import exp2, thread_index

from ..arguments import LaunchScalars, Scalars, Tensors, kv_heads_of, scalars_of
from ..combine import LastCta, Output, Splits
from ..config import FLAG_BYTES
from ..schedule import Lengths, Visible, lengths_of, partition, sequence_of, tile_bounds, visible
from .config import CLUSTER, KEYS, LOAD_WARP, PRODUCT_WARP, THREADS, Tcgen05Config
from .memory import Cta, CtaTile, Layouts, Loads, Memory, NextTile, TiledMmas, allocate, key_fill, value_fill
from .softmax_warps import SoftmaxWarps

_ONE = tcgen05.CtaGroup.ONE
_IN_FLIGHT = 4  # splits that a thread has in flight while it combines


class DecodeTcgen05:
    """The kernel, for both kinds of cache: scheduler, three roles of warps, epilogue."""

    def __init__(self, config: Tcgen05Config):
        self.c = config
        self.loader, self.products, self.softmax = LoadWarp(config), ProductWarp(config), SoftmaxWarps(config)
        self.epilogue = ClusterEpilogue(config)

    @cute.jit
    def __call__(self, tensors: Tensors, numbers: LaunchScalars, clusters: Int32, stream: Any):
        c = self.c
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
        lengths, scalars = lengths_of(tensors, numbers, c.page), scalars_of(tensors, numbers, c.page)
        ctas = numbers.combine_blocks * c.sides
        self.kernel(tensors, Loads(k_atom, k, v_atom, v), lengths, scalars, layouts, TiledMmas(qk, pv)).launch(
            grid=[clusters * ctas, 1, 1], block=[THREADS, 1, 1], cluster=[ctas, 1, 1], stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, tensors: Tensors, loads: Loads, lengths: Lengths, scalars: Scalars, layouts: Layouts, products: TiledMmas
    ):
        c = self.c
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        m = allocate(c, layouts, warp)
        if warp == LOAD_WARP:
            cpasync.prefetch_descriptor(loads.k_atom)
            cpasync.prefetch_descriptor(loads.v_atom)
        cute.arch.mbarrier_init_fence()
        tmem.before_sync()
        sync_cluster()
        tmem.after_sync()
        rank, ctas = cute.arch.block_in_cluster_idx()[0], cute.arch.block_in_cluster_dim()[0]
        cluster, clusters = cute.arch.block_idx()[0] // ctas, cute.arch.grid_dim()[0] // ctas
        groups = kv_heads_of(tensors, c.page) * scalars.head_blocks
        cut = partition(lengths, groups, clusters, scalars.least_tiles, KEYS)
        at, stop = cut.start(cluster), cut.start(cluster + 1)
        if cluster >= cut.blocks:
            at = stop
        sequence, before = sequence_of(lengths, groups, at, KEYS)
        m.cta.put(Cta(rank % c.sides, rank // c.sides, ctas // c.sides, rank, cluster, clusters, *cut))
        n, with_tiles = Int32(0), Int32(0)  # tiles so far, and work tiles that had one
        # A cluster's first work tile has its even slot in the workspace; of later ones only the last can be a split.
        odd = Int32(0)
        while at < stop:
            cta = m.cta.get()
            keys = visible(lengths, sequence, KEYS)
            group = (at - before) // keys.units
            start = before + group * keys.units
            units = cutlass.min(start + keys.units, stop) - at
            tile = cta_tile(c, scalars, keys, cta, sequence, group, at - start, units)
            last = at + units == before + keys.units * groups
            upcoming = NextTile(
                at + units, stop, cutlass.select_(last, at + units, before), sequence + Int32(last), n + tile.tiles,
                with_tiles + Int32(tile.tiles > 0), odd, Int32(units == keys.units), start, keys.tiles,
            )  # fmt: skip
            m.keys.put(keys)
            m.tile.put(tile)
            m.next.put(upcoming)
            if warp < PRODUCT_WARP:
                self.softmax.run(tensors, scalars, m, n)
            elif warp == PRODUCT_WARP:
                self.products.run(products, cta, m, n, tile.tiles, with_tiles)
            else:
                self.loader.run(tensors, loads, keys, tile, cta, m, n)
            self.epilogue.finish(tensors, scalars, m)
            upcoming = m.next.get()
            at, stop, before = upcoming.at, upcoming.stop, upcoming.before
            sequence, n, with_tiles = upcoming.sequence, upcoming.n, upcoming.with_tiles
            odd = Int32(1)
        if warp == LOAD_WARP:
            # The other side's last releases arrive here, so not before them may this CTA be gone.
            for s in cutlass.range_constexpr(c.stages):
                m.ring.await_empty(n * c.fills + s)
        tmem.after_sync()
        if warp == PRODUCT_WARP:
            cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.dealloc_tmem(tmem.pointer(Float32, 0), tmem.COLUMNS)


def sides_of(config: Tcgen05Config, at: Cta) -> cutlass.Int16:
    """The CTAs of the cluster that have this one's share of the keys, as a mask."""
    return cutlass.Int16(((1 << config.sides) - 1) << (at.split * config.sides))


def cta_tile(
    config: Tcgen05Config, scalars: Scalars, keys: Visible, at: Cta, sequence: Int32, group: Int32, first: Int32,
    units: Int32,
) -> CtaTile:  # fmt: skip
    """What of ``units`` units of a group, from ``first`` on, this CTA has: every ``splits``-th tile, and all rows
    of its side for these; of the combined rows a share."""
    c = config
    tiles = cutlass.select_(keys.units == units, keys.tiles, units)
    nothing = (keys.end <= keys.low) & (keys.sinks_end <= keys.start)
    tiles = cutlass.select_(nothing, Int32(0), tiles)
    kv_head, head_block = group // scalars.head_blocks, group % scalars.head_blocks
    head = (head_block * c.sides + at.side) * c.heads
    heads = cutlass.max(cutlass.min(scalars.group - head, c.heads), 0)
    row = heads * at.split // at.splits
    return CtaTile(
        sequence, kv_head, kv_head * scalars.group + head, heads, first + at.split, at.splits,
        cutlass.max(tiles - at.split + at.splits - 1, 0) // at.splits, row,
        heads * (at.split + 1) // at.splits - row,
    )  # fmt: skip


class LoadWarp:
    """The load role: K and V by TMA."""

    def __init__(self, config: Tcgen05Config):
        self.c = config

    @cute.jit
    def run(self, tensors: Tensors, loads: Loads, keys: Visible, tile: CtaTile, at: Cta, m: Memory, n: Int32):
        """One warp: all tiles of the CTA's share of a work tile."""
        c = self.c
        more = const_expr(0 if c.same else 1)
        for i in cutlass.range(tile.tiles + more, unroll=1):
            if i < tile.tiles:
                self._load_tile(tensors, loads.k_atom, loads.k, keys, tile, at, m, i, key_fill(c, n, i), c.parts)
            if const_expr(not c.same):
                if i > 0:
                    fill = value_fill(c, n, i - 1, tile.tiles)
                    self._load_tile(tensors, loads.v_atom, loads.v, keys, tile, at, m, i - 1, fill, c.value_parts)

    @cute.jit
    def _load_tile(
        self, tensors: Tensors, atom: cute.CopyAtom, cache: cute.Tensor, keys: Visible, tile: CtaTile, at: Cta,
        m: Memory, i: Int32, fill: Int32, parts: cutlass.Constexpr,
    ):  # fmt: skip
        """This CTA's share of a tile, multicast to all sides; TMA zero-fills beyond the cache's columns."""
        c = self.c
        first, low, high = tile_bounds(keys, tile.first + i * tile.step, KEYS)
        mask = {"mcast_mask": sides_of(c, at)} if c.sides > 1 else {}
        own = const_expr(c.boxes // c.sides)
        begin = at.side * own  # the first box
        page = Int32(0)
        if const_expr(c.page):
            page = paging.of_boxes(tensors, tile.b, first, low, high, c.box, c.boxes, c.page)
        for p in cutlass.range(parts, unroll=1):
            full = m.ring.acquire(fill + p, c.stage_bytes)
            for b in cutlass.range(own, unroll=1):
                box = begin + b
                row, last = first // c.box + box, tile.b
                if const_expr(c.page):
                    row = (first + box * c.box) % c.page // c.box
                    last = cute.arch.shuffle_sync(page, box)
                gKV = cute.local_tile(cache[None, None, tile.kv_head, last], (c.box, c.columns), (row, None))
                for x in cutlass.range_constexpr(c.part // c.columns):
                    to = (m.ring.slot(fill + p) * (c.part // c.columns) + x) * c.boxes + box
                    sBox, gBox = cpasync.tma_partition(
                        atom, 0, cute.make_layout(1), cute.group_modes(m.sBoxes[None, None, to], 0, 2),
                        cute.group_modes(gKV[None, None, p * (c.part // c.columns) + x], 0, 2),
                    )  # fmt: skip
                    cute.copy(atom, gBox, sBox, tma_bar_ptr=full, **mask)


class ProductWarp:
    """The product role: S' and O' by ``tcgen05``."""

    def __init__(self, config: Tcgen05Config):
        self.c = config

    @cute.jit
    def run(self, products: TiledMmas, at: Cta, m: Memory, n: Int32, tiles: Int32, with_tiles: Int32):
        """One warp: issues the products of a work tile, in the order that the top of this file shows."""
        c = self.c
        if tiles > 0:
            cute.arch.mbarrier_wait(m.query, with_tiles & 1)
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
    def _scores_of(self, products: TiledMmas, at: Cta, m: Memory, n: Int32, i: Int32):
        c = self.c
        qk = products.scores.get_slice(0)
        tSrK, tSrQ = qk.make_fragment_A(m.sK), qk.make_fragment_B(m.sQ)
        shape = qk.make_fragment_C(products.scores.partition_shape_C((KEYS, c.heads))).layout
        tS = cute.make_tensor(tmem.pointer(Float32, c.tensor_memory.scores((n + i) & 1)), shape)
        fill = key_fill(c, n, i)
        for p in cutlass.range(c.parts, unroll=1):
            m.ring.wait(fill + p)
            slot = m.ring.slot(fill + p)
            self._product(products.scores, tS, tSrK[None, None, None, slot], tSrQ[None, None, None, p], p > 0)
            if const_expr(not c.same):
                self._release(m.ring, slot, at)
            elif const_expr(c.parts > c.value_parts):
                if p >= c.value_parts:
                    self._release(m.ring, slot, at)
        with cute.arch.elect_one():
            tcgen05.commit(m.scores + ((n + i) & 1))

    @cute.jit
    def _output_of(self, products: TiledMmas, at: Cta, m: Memory, n: Int32, i: Int32, tiles: Int32):
        """O' += V' P', once P' is full and O' rescaled to it."""
        c = self.c
        pv = products.output.get_slice(0)
        tOrV, tOrP = pv.make_fragment_A(m.sV), pv.make_fragment_B(m.sP)
        shape = pv.make_fragment_C(products.output.partition_shape_C((c.part, c.heads))).layout
        fill = value_fill(c, n, i, tiles)
        if const_expr(not c.same):
            for p in cutlass.range(c.value_parts, unroll=1):
                m.ring.wait(fill + p)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(m.values)
        cute.arch.mbarrier_wait(m.probabilities, (n + i) & 1)
        tmem.after_sync()
        for p in cutlass.range(c.value_parts, unroll=1):
            slot = m.ring.slot(fill + p)
            tO = cute.make_tensor(tmem.pointer(Float32, c.tensor_memory.output + p * c.heads), shape)
            self._product(products.output, tO, tOrV[None, None, None, slot], tOrP[None, None, None, 0], i > 0)
            self._release(m.ring, slot, at)
        with cute.arch.elect_one():
            tcgen05.commit(m.output)

    def _release(self, ring: Ring, slot: Int32, at: Cta) -> None:
        """Once the products so far are done; on all sides, for each fills its share of a stage on all."""
        with cute.arch.elect_one():
            tcgen05.commit(ring.empty + slot, sides_of(self.c, at) if self.c.sides > 1 else None)

    def _product(
        self, mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: Boolean
    ) -> None:
        atom = cute.make_mma_atom(mma.op)
        atom.set(tcgen05.Field.ACCUMULATE, accumulate)
        for k in range(cute.size(a, mode=[2])):
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
            atom.set(tcgen05.Field.ACCUMULATE, True)


class ClusterEpilogue:
    """Combine within the cluster, and where clusters share a group, by the last of them to arrive."""

    def __init__(self, config: Tcgen05Config):
        self.c = config
        self.output, self.splits = Output(config.dtype), Splits(config.split, _IN_FLIGHT)
        self.last = LastCta(Region(0, FLAG_BYTES), lambda scalars: 1, self._rows)

    @cute.jit
    def finish(self, tensors: Tensors, scalars: Scalars, m: Memory):
        """Combine what the CTAs of this side have of this CTA's rows: a group's result goes out, a split into the
        workspace."""
        c = self.c
        sync_cluster()
        tile, at, upcoming = m.tile.get(), m.cta.get(), m.next.get()
        slot = Int64(at.cluster * 2 + upcoming.odd)
        split = own_workspace(c, tensors, at).splits.iterator.toint() + slot * c.split.nbytes
        lanes = const_expr(min(c.dim_v // 4, 32))  # that have a row
        thread = thread_index()
        for r in cutlass.range(thread // lanes, tile.rows, THREADS // lanes, unroll=1):
            row = tile.row + r
            stat_at = m.sStat.iterator.toint() + row * 8
            valid = [cutlass.select_(i < at.splits, Int32(1), Int32(0)) for i in range(CLUSTER // c.sides)]
            peers = [i * on * c.sides + at.side for i, on in enumerate(valid)]
            stats = [
                op.load_cluster_floats(2, op.cluster_address(stat_at, peer), on)
                for peer, on in zip(peers, valid, strict=True)
            ]
            maxima = [cutlass.select_(on != 0, x[0], -Float32.inf) for x, on in zip(stats, valid, strict=True)]
            row_max = functools.reduce(cute.arch.fmax, maxima)
            weights = [exp2(x - finite(row_max)) for x in maxima]
            row_sum = functools.reduce(operator.add, [w * x[1] for w, x in zip(weights, stats, strict=True)])
            for x in cutlass.range(0, c.dim_v, lanes * 4, unroll=1):
                column = x + thread % lanes * 4
                o_at = m.sO.iterator.toint() + (row * c.dim_v + column) * 4
                rO = cute.make_rmem_tensor(4, Float32)
                rO.fill(0.0)
                for first in cutlass.range_constexpr(0, len(peers), _IN_FLIGHT):
                    if at.splits > first:
                        for i in cutlass.range_constexpr(first, min(first + _IN_FLIGHT, len(peers))):
                            new = op.load_cluster_floats(4, op.cluster_address(o_at, peers[i]), valid[i])
                            for y in cutlass.range_constexpr(4):
                                rO[y] = rO[y] + weights[i] * new[y]
                sums = [rO[y] for y in range(4)]
                if upcoming.whole != 0:
                    self.output.store(tensors, scalars, tile, row, column, sums, row_max, row_sum)
                else:
                    op.store_4_floats(split + c.split.output_at(row, column), sums)
                    if column == 0:
                        stat = split + c.split.stat_at(row)
                        op.store_float(stat, row_max)
                        op.store_float(stat + 4, row_sum)
        # The next work tile's loads, which the tensor cores' side of memory makes, overwrite what was read here.
        cute.arch.fence_view_async_shared()
        sync_cluster()
        upcoming = m.next.get()
        if upcoming.whole == 0:
            tile, at = m.tile.get(), m.cta.get()
            own = own_workspace(c, tensors, at)
            self.last.run(own, scalars, at.cut, tile, m.flag_at, upcoming.start, upcoming.tiles)

    @cute.jit
    def _rows(self, tensors: Tensors, scalars: Scalars, tile: CtaTile, slot: Int32, rest: Int32, more: Int32):
        """Of all clusters' splits of a group, this CTA's rows."""
        c = self.c
        vectors = const_expr(c.dim_v // 4)
        for index in cutlass.range(thread_index(), tile.rows * vectors, THREADS, unroll=1):
            row, column = tile.row + index // vectors, index % vectors * 4
            rO, row_max, row_sum = self.splits.add(tensors, row, column, slot, rest, more, 1, Int32(-1), 1)
            self.output.store(tensors, scalars, tile, row, column, [rO[x] for x in range(4)], row_max, row_sum)


def own_workspace(config: Tcgen05Config, tensors: Tensors, cta: Cta) -> Tensors:
    """The splits of the CTA's side, and counters of its own: CTAs of a cluster end their groups independently."""
    splits = tensors.splits.iterator + Int64(cta.side) * (2 * config.split.floats) * cta.clusters
    count = tensors.count.iterator + cta.rank * cta.clusters
    return tensors._replace(
        splits=cute.make_tensor(splits, tensors.splits.layout), count=cute.make_tensor(count, tensors.count.layout)
    )
