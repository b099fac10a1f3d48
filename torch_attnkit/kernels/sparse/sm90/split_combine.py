"""Split-KV reduction over the CTAs that share a work tile: DSMEM within a cluster, then a workspace between clusters.

    each CTA       O, normalised and rounded to the call's dtype, row_max and row_sum behind it, one bulk copy a row to
                   the CTA that owns the row (row % ctas)
    each cluster   the owner reduces its rows -> result, or a float32 split in the workspace
    all clusters   the CTAs with the same rows count in; the last one reduces the splits, in order: deterministic

Normalised partials keep float16 in range for any number of keys.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda import copies, memory_ops
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.asm import asm
from torch_attnkit.cuda.partials import finite, join
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm90 import wgmma
from torch_attnkit.cuda.sm90.warpgroup import ROWS as HEADS
from torch_attnkit.cuda.smem import CHUNK
from torch_attnkit.cuda.warp_ops import exp2

from ..arguments import Scalars, Tensors
from ..epilogue import factor_beside, inverse, sink_of
from ..token_keys import WorkTile
from .barriers import Barriers, peer, rank, sync_consumers
from .config import CONSUMER_THREADS, CONSUMERS, LANES, Config
from .epilogue import DenseOutput, Epilogue
from .epilogue_fp4 import Fp4Output
from .mainloop import Fragments
from .plan import MOST_CTAS


@dsl_user_op
def load_shared_floats(count: int, address: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Float32, ...]:
    """Load 2 or 4 aligned floats of shared memory."""
    outs = ",".join(f"${i}" for i in range(count))
    text = f"ld.shared.v{count}.f32 {{{outs}}}, [${count}];"
    return asm([Float32] * count, [address], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def _send(target: Int32, source: Int32, nbytes: int, barrier: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Bulk copy of ``nbytes``, a multiple of 16, to a peer's shared memory; completes on its mbarrier ``barrier``.
    Needs a proxy fence after generic writes to ``source``."""
    text = f"cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [$0], [$1], {nbytes}, [$2];"
    asm(None, [target, source, barrier], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def _store_tiles(address: Int32, words: list[Int32], *, loc: Any = None, ip: Any = None) -> None:
    """``stmatrix`` x4: lane l gives the address of row l % 8 of matrix l // 8."""
    text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1,$2,$3,$4};"
    asm(None, [address, *words], text, memory=True, loc=loc, ip=ip)


class SplitBuffers(Fixed):
    """Shared-memory buffers for the intra-cluster split-KV reduction: this CTA's partials and the receive buffer for
    its peers'. Partials alias the K/V ring. The receive buffer aliases sQ: nothing is sent before every
    consumer of the cluster has arrived on ``Barriers.read``; no CTA exits before all incoming copies completed."""

    def __init__(self, config: Config, scalars: Scalars, shared: Int32):
        self.c, self.shared, self.ctas = config, shared, scalars.ctas
        self.rank = rank(config)
        self.rows_each = (HEADS - 1 + self.ctas) // self.ctas  # from each peer, at most

    def owner(self, row: Int32) -> Int32:
        return Int32(Uint32(row) % Uint32(self.ctas))

    def index(self, row: Int32) -> Int32:
        """Index of a row among its owner's."""
        return Int32(Uint32(row) // Uint32(self.ctas))

    def rows(self, tile: WorkTile) -> Int32:
        """How many of the work tile's rows this CTA reduces."""
        return self.index(tile.heads - self.rank + (self.ctas - 1))

    def row(self, own_row: Int32) -> Int32:
        """The ``own_row``-th of them."""
        return own_row * self.ctas + self.rank

    def partial(self, row: Int32) -> Int32:
        """Address of this CTA's partial of a row."""
        return self.c.shared.partials.at(self.shared) + row * self.c.pitch

    @cute.jit
    def send(self, barriers: Barriers, row: Int32):
        """Send this CTA's partial of a row to its owner; one thread."""
        owner = self.owner(row)
        if owner != self.rank:
            cta, at = peer(self.c, owner), self._at(self.rank, owner, self.index(row))
            target, full = op.cluster_address(at, cta), op.cluster_address(barriers.received.toint(), cta)
            _send(target, self.partial(row), self.c.pitch, full)

    def source(self, sender: Int32, own_row: Int32) -> Int32:
        """Address of ``sender``'s partial of the ``own_row``-th own row."""
        return cutlass.select_(
            sender == self.rank, self.partial(self.row(own_row)), self._at(sender, self.rank, own_row)
        )

    def expected_bytes(self, tile: WorkTile) -> Int32:
        """Bytes that peers send."""
        return self.rows(tile) * (self.ctas - 1) * self.c.pitch

    def _at(self, sender: Int32, owner: Int32, own_row: Int32) -> Int32:
        """Address in the receive buffer of ``owner``, which has no slot for its own partials."""
        before = sender - cutlass.select_(sender > owner, Int32(1), Int32(0))
        return self.c.shared.receive.at(self.shared) + (before * self.rows_each + own_row) * self.c.pitch


_INF = float("inf")
_IN_FLIGHT = 4  # splits in flight


def _warp() -> Int32:
    """Index among the consumer warps."""
    return cute.arch.thread_idx()[0] // LANES


class SplitCombine:
    """Run by all consumers of a CTA; ``part``: index of the CTA within the work tile."""

    def __init__(self, config: Config, epilogues: list[Epilogue], output: DenseOutput | Fp4Output):
        self.c, self.epilogues, self.output = config, epilogues, output
        self.chunks = config.dim * config.itemsize // CHUNK  # of a row

    @cute.jit
    def send(
        self,
        half: cutlass.Constexpr,
        tile: WorkTile,
        shared: Int32,
        barriers: Barriers,
        buffers: SplitBuffers,
        w: Fragments,
    ):
        """Send this warpgroup's columns of the partial O to the owners of the rows."""
        self.send_sums(half, tile, barriers, buffers, w, self.epilogues[half].sums(shared, w))

    @cute.jit
    def send_sums(
        self, half: cutlass.Constexpr, tile: WorkTile, barriers: Barriers, buffers: SplitBuffers, w: Any, known: Any
    ):
        """The same with ``known`` maxima, sums and factors that rescale O to them."""
        c, (maxima, sums, factors) = self.c, known
        thread, lane = cute.arch.thread_idx()[0], w.thread & 31
        factors = [inverse(sums[r], sums[r]) * factors[r] for r in range(2)]
        # Two by two 8 x 8 matrices.
        row = w.thread // 32 * 16 + (lane & 15)
        at = buffers.partial(row) + (half * c.ring.part + lane // 16 * 8) * c.itemsize
        for g in cutlass.range_constexpr(0, c.ring.part // 8, 2):
            pairs = [(4 * (g + j) + 2 * r, factors[r]) for j in range(2) for r in range(2)]
            words = [op.pack(c.dtype, w.rO[i] * factor, w.rO[i + 1] * factor) for i, factor in pairs]
            _store_tiles(at + g * (8 * c.itemsize), words)
        if const_expr(half == 0):
            if (lane & 3) == 0:
                for r in cutlass.range_constexpr(2):
                    stats = [maxima[r].bitcast(Int32), sums[r].bitcast(Int32), Int32(0), Int32(0)]
                    behind = buffers.partial(wgmma.first_row(w.thread) + 8 * r) + const_expr(c.dim * c.itemsize)
                    copies.store_words(behind, stats, cute.AddressSpace.smem)
        cute.arch.fence_view_async_shared()
        sync_consumers()
        if thread < tile.heads:
            barriers.wait_query_read()
            buffers.send(barriers, thread)

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, index: Int32, part: Int32, buffers: SplitBuffers,
        shared: Int32, barriers: Barriers,
    ):  # fmt: skip
        """Reduce work tile ``index``, of which this CTA has sent its partials."""
        first = tensors.splits.iterator.toint() + Int64(index * scalars.groups) * self.c.split.nbytes
        if cute.arch.thread_idx()[0] == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barriers.received, buffers.expected_bytes(tile))
        # Loaded while the peers' partials arrive.
        sink = sink_of(tensors, scalars, tile.head + cutlass.min(buffers.row(_warp()), tile.heads - 1))
        cute.arch.mbarrier_wait(barriers.received, 0)
        cute.arch.cluster_arrive_relaxed()
        split = first + Int64(part // scalars.ctas) * self.c.split.nbytes
        for own_row in cutlass.range(_warp(), buffers.rows(tile), CONSUMERS, unroll=1):
            self._row(tensors, scalars, tile, buffers, own_row, sink, split)
            sink = sink_of(tensors, scalars, tile.head + cutlass.min(buffers.row(own_row + CONSUMERS), tile.heads - 1))
        if scalars.groups > 1:
            self._count(tensors, scalars, index, buffers, shared, barriers)
            if barriers.info(shared)[1] != 0:
                self._splits(tensors, scalars, tile, buffers, first)

    def _first(self) -> Int32:
        """This thread's first chunk of the CTA's rows, the same in every cluster."""
        return cute.arch.thread_idx()[0] % CONSUMER_THREADS

    def _end(self, buffers: SplitBuffers, tile: WorkTile) -> Int32:
        """Chunks of all threads, rounded up to whole warps, since FP4 stores are warp-wide."""
        return (buffers.rows(tile) * self.chunks + (LANES - 1)) // LANES * LANES

    def _chunk(self, buffers: SplitBuffers, tile: WorkTile, index: Int32) -> tuple[Int32, Int32, Boolean]:
        """(row, chunk, whether there is such a row) of chunk ``index``; past the end the last row."""
        own_row, rows = index // self.chunks, buffers.rows(tile)
        valid = Boolean(True) if self.chunks % LANES == 0 else own_row < rows
        return cutlass.min(own_row, rows - 1), index % self.chunks, valid

    @cute.jit
    def _row(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, buffers: SplitBuffers, own_row: Int32, sink: Float32,
        split: Int64,
    ):  # fmt: skip
        """Reduce one row over the cluster, by a warp, 8 columns a lane; to ``split`` if valid are more clusters. Lane i
        has the weight of CTA i."""
        c, lane, row = self.c, cute.arch.lane_idx(), buffers.row(own_row)
        columns, steps = const_expr(CHUNK // c.itemsize), const_expr(-(-self.chunks // LANES))
        at = buffers.source(cutlass.min(lane, scalars.ctas - 1), own_row)
        top, part_sum = load_shared_floats(2, at + c.dim * c.itemsize)
        top = cutlass.select_(lane < scalars.ctas, top, Float32(-_INF))
        row_max = top
        for distance in cutlass.range_constexpr(3):
            row_max = cute.arch.fmax(row_max, cute.arch.shuffle_sync_bfly(row_max, offset=1 << distance))
        row_max = cute.arch.shuffle_sync(row_max, 0)
        weight, row_sum = exp2(top - finite(row_max)) * part_sum, Float32(0.0)
        chunks = [cutlass.min(lane + i * LANES, self.chunks - 1) for i in range(steps)]
        sums = [cute.make_rmem_tensor(columns, Float32) for _ in range(steps)]
        for rSum in sums:
            rSum.fill(0.0)
        rPart = cute.make_rmem_tensor(4, Float32)
        rValues = cute.recast_tensor(rPart, c.dtype)
        for i in cutlass.range(scalars.ctas, unroll=1):
            factor, source = cute.arch.shuffle_sync(weight, i), cute.arch.shuffle_sync(at, i)
            row_sum += factor
            parts = [load_shared_floats(4, source + chunk * CHUNK) for chunk in chunks]
            for rSum, part in zip(sums, parts, strict=True):
                for x in cutlass.range_constexpr(4):
                    rPart[x] = part[x]
                for x in cutlass.range_constexpr(columns):
                    rSum[x] = rSum[x] + factor * rValues[x].to(Float32)
        for rSum, i in zip(sums, range(steps), strict=True):
            chunk, values = chunks[i], [rSum[x] for x in range(columns)]
            valid = Boolean(True) if const_expr(self.chunks % LANES == 0) else lane < self.chunks
            if scalars.groups == 1:
                self._store(tensors, scalars, tile, row, valid, chunk, values, sink, row_max, row_sum)
            elif valid:
                for x in cutlass.range_constexpr(0, columns, 4):
                    op.store_4_floats(split + c.split.output_at(row, chunk * columns + x), values[x : x + 4])
                if chunk == 0:
                    # ``join`` skips splits whose maximum is -inf; a row of NaN must not be skipped.
                    known = cutlass.select_(row_sum == row_sum, row_max, row_sum)
                    memory_ops.store_2_floats(split + c.split.stat_at(row), [known, row_sum])

    @cute.jit
    def _store(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, row: Int32, valid: Boolean, chunk: Int32,
        sums: list[Float32], sink: Float32, row_max: Float32, row_sum: Float32,
    ):  # fmt: skip
        """Store 8 columns of a head's result, if ``valid``."""
        head = tile.head + row
        factor = factor_beside(scalars, sink, row_max, row_sum)
        words = [op.pack(self.c.dtype, sums[x] * factor, sums[x + 1] * factor) for x in range(0, len(sums), 2)]
        self.output.store_chunk(tensors, tile, row, valid, chunk, words)
        if valid & (chunk == 0):
            self.output.store_stats(tensors, scalars, tile.token, head, row_max, row_sum)

    @cute.jit
    def _count(
        self, tensors: Tensors, scalars: Scalars, index: Int32, buffers: SplitBuffers, shared: Int32, barriers: Barriers
    ):
        """Set ``info[1]``: whether this CTA is the last of the clusters to arrive."""
        count, info = tensors.count, barriers.info(shared)
        sync_consumers()  # all threads' stores before the release by the atomic
        if cute.arch.thread_idx()[0] % CONSUMER_THREADS == 0:
            at = index * MOST_CTAS + buffers.rank
            arrived = op.add_acq_rel(count.iterator.toint() + Int64(at) * 4, Int32(1))
            last = arrived == scalars.groups - 1
            if last:
                count[at] = Int32(0)
            info[1] = cutlass.select_(last, Int32(1), Int32(0))
        sync_consumers()

    @cute.jit
    def _splits(self, tensors: Tensors, scalars: Scalars, tile: WorkTile, buffers: SplitBuffers, first: Int64):
        """Reduce the splits of all clusters."""
        c = self.c
        columns, size = const_expr(CHUNK // c.itemsize), const_expr(c.split.nbytes)
        for index in cutlass.range(self._first(), self._end(buffers, tile), CONSUMER_THREADS, unroll=1):
            own_row, chunk, valid = self._chunk(buffers, tile, index)
            row = buffers.row(own_row)
            sums = [cute.make_rmem_tensor(4, Float32) for _ in range(columns // 4)]
            for rO in sums:
                rO.fill(0.0)
            row_max, row_sum = Float32(-_INF), Float32(0.0)
            for n in cutlass.range(0, scalars.groups, _IN_FLIGHT, unroll=1):
                # Past the end the last split again, with weight 0.
                at = [first + Int64(cutlass.min(n + i, scalars.groups - 1)) * size for i in range(_IN_FLIGHT)]
                stats = [op.load_2_floats(a + c.split.stat_at(row)) for a in at]
                news = [
                    [op.load_4_floats(a + c.split.output_at(row, chunk * columns + 4 * x)) for a in at]
                    for x in range(columns // 4)
                ]
                valid_splits = [n + i < scalars.groups for i in range(_IN_FLIGHT)]
                maxima = [cutlass.select_(t, s[0], Float32(-_INF)) for t, s in zip(valid_splits, stats, strict=True)]
                old_max, old_sum = row_max, row_sum
                for rO, new in zip(sums, news, strict=True):
                    row_max, row_sum = join(rO, old_max, old_sum, maxima, [s[1] for s in stats], new)
            values = [rO[x] for rO in sums for x in range(4)]
            sink = sink_of(tensors, scalars, tile.head + row)
            self._store(tensors, scalars, tile, row, valid, chunk, values, sink, row_max, row_sum)
