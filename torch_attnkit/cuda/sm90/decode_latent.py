"""Attention of one query token over latent vectors that are keys and values at once, as MLA has them when its
projections are absorbed (DeepSeek-V2, arXiv 2405.04434).

    2 score warpgroups: wait for every second tile -> S = Q K' -> online softmax -> P and O's factors to shared memory
    2 value warpgroups: wait for P -> O += P K, a half of the columns each -> load these of the next tile by TMA

64 heads of 512 columns are too much for the registers of one warpgroup, and two that share the scores wait for each
other. Here the second product of a tile runs beside the first of the next, and that beside the softmax of either: the
score warpgroups pass each other the maxima, which are all that a tile needs of the one before. A value warpgroup
reloads its columns as soon as it has multiplied them: the scores were done with them before. Blocks with the other
heads of a KV head run next to each other, so that the keys come from memory once (``Scalars.beside``).

Measured on an H200 (bf16, 8192 keys, K past the L2, CUDA graph, us; FlashInfer 0.6.18's MLA beside it in the same run)
for B 1, 16, 128: 16 heads 16.7, 46.4, 277 (23.5, 44.3, 285); 64 heads 20.6, 57.1, 304 (24.8, 49.6, 299); 128 heads
22.2, 81.5, 540 (23.8, 72.6, 548); from run to run long cases differ by 15 %, of B 128 253, 300 and 515 were the best.
At B 16 much is not streaming. With 64 heads, from the start: 2.6 us to the first load, 9.2 to the first scores, 43 to
the last probabilities, 45 with the result in shared memory, 48 with the part in the workspace, 51 to the start of the
merge and 57 to its end. That was before Q came ahead of the second tile and rows without heads were left out, which
together took 58.1 to 56.4, and with 16 heads 48.4 to 46.3; stamps were not taken again.

Stamps of the clock led here, B 128, 128 heads, in cycles. One score warpgroup, 64 keys by cp.async, two buffers: a tile
3830, of which the scores took 2400 beside the other product and the softmax 840, while loads took 1350 to issue and
1250 more to come. TMA and three tiles of 48: a tile of 48 2830. Issuing the next scores ahead of the softmax gained
nothing, for 32 small products do not queue up: their issue takes the 1570 that they take. The second score warpgroup
brought 534 us to 467 alone on the GPU. Tiles of 32 keys in four buffers: 514. What is left may be shared memory: by
count Q, K, P and the loads move 220 KB of it for a tile of 48 keys, 1720 cycles.

Rows that do not count arrive with their tile and are overwritten with zeros before the second product; ``decode.py``
has the letters and the rest of the kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from .. import warp_ops as op
from ..decode_schedule import Lengths, place
from ..decode_types import Piece, Scalars, Tensors
from ..partials import finite
from ..ring import Fixed, Ring
from ..warp_ops import exp2
from . import prefill_softmax as softmax
from .decode_wide import Wide, _Work

_INF = float("inf")
_WARPS = 4  # of a warpgroup
_REGISTERS = (88, 168)  # of a thread for scores, and for values, 128 of which hold the output; 128 is the mean
_COLUMNS = 64  # of a box of TMA, 128 bytes: a warp of a value warpgroup loads as many of every row
_MAJOR = OperandMajorMode


class _Shared(Fixed):
    """What lies behind Q and the tiles: probabilities, factors of the output, and who waits for what."""

    def __init__(self, config: Any, shared: Int32):
        c = config
        self.weights = shared + (c.query_bytes + c.stages * c.buffer_bytes)
        self.factors = self.weights + c.turns * c.weight_bytes
        self.tops = self.factors + c.turns * c.heads * 4
        at = self.tops + (c.scorers + 2) * c.heads * 4
        self.query = cute.make_ptr(cutlass.Int64, at, cute.AddressSpace.smem, assumed_align=8)
        self.tiles = Ring(self.query + 1, self.query + 1, c.stages)  # only ``full`` is used
        full = self.tiles.full + c.stages
        self.ready = Ring(full, full + c.turns, c.turns)  # probabilities
        self.known = Ring(full + 2 * c.turns, full + 2 * c.turns, c.scorers)  # maxima; only ``full``
        both = _WARPS * c.halves
        self.counts = [c.threads] + [both] * c.stages + [_WARPS] * c.turns + [both] * c.turns + [_WARPS] * c.scorers

    def begin(self) -> None:
        for i, count in enumerate(self.counts):
            cute.arch.mbarrier_init(self.query + i, count)

    def end(self) -> None:
        for i in range(len(self.counts)):
            op.forget_barrier((self.query + i).toint())


class Loads(NamedTuple):
    """The cache for TMA, as boxes of keys and 64 columns."""

    atom: cute.CopyAtom
    rows: cute.Tensor  # (keys of a sequence or page, D, KV heads, sequences or pages)


class Latent(Wide):
    """Streams the tiles of a piece through two warpgroups of scores and two of values."""

    def loads(self, tensors: Tensors) -> Loads:
        c, cache = self.c, tensors.k
        atom = warpgroup.make_smem_layout_atom(
            hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, c.dtype, _COLUMNS), c.dtype
        )
        box = cute.tile_to_shape(atom, (c.box, _COLUMNS), order=(0, 1))
        modes = [1, 3, 2, 0] if c.page else [2, 3, 1, 0]
        rows = cute.make_tensor(cache.iterator, cute.select(cache.layout, mode=modes))
        return Loads(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), rows, box, (c.box, _COLUMNS)))

    @cute.jit
    def _run(self, tensors: Tensors, loads: Loads, lengths: Lengths, scalars: Scalars, shared: Int32):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp < self.c.scorers * _WARPS:
            cute.arch.setmaxregister_decrease(_REGISTERS[0])
            self._attend(tensors, loads, lengths, scalars, shared, "scores")
        else:
            if warp == self.c.scorers * _WARPS:
                cpasync.prefetch_descriptor(loads.atom)
            cute.arch.setmaxregister_increase(_REGISTERS[1])
            self._attend(tensors, loads, lengths, scalars, shared, "values")

    @cute.jit
    def _stream(
        self, tensors: Tensors, loads: Any, scalars: Scalars, keys: Any, piece: Piece, shared: Int32,
        role: cutlass.Constexpr,
    ):  # fmt: skip
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
        # Known to be the same in all lanes, they take no registers of these.
        keys, piece = [type(x)(*map(cute.arch.make_warp_uniform, x)) for x in (keys, piece)]
        meet = _Shared(self.c, shared)
        if cute.arch.thread_idx()[0] == 0:
            meet.begin()
        cute.arch.mbarrier_init_fence()
        cute.arch.fence_view_async_shared()  # the last piece's result was where tiles arrive now
        cute.arch.barrier()
        if const_expr(role == "scores"):
            self._load_all_queries(tensors, piece, shared, meet)
            self._score(scalars, keys, piece, shared, meet, group)
        else:
            self._sum_values(tensors, loads, keys, piece, shared, meet, group - self.c.scorers)
        if cute.arch.thread_idx()[0] == 0:
            meet.end()
        cute.arch.barrier()

    def _load_all_queries(self, tensors: Tensors, piece: Piece, shared: Int32, meet: Any) -> None:
        """This thread's share, all of the block have one."""
        self._load_query(tensors, piece, shared, cute.arch.thread_idx()[0], self.c.threads)
        cute.arch.cp_async_mbarrier_arrive_noinc(meet.query)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def _score(self, scalars: Scalars, keys: Any, piece: Piece, shared: Int32, meet: Any, group: Int32):
        """One warpgroup: probabilities of every second tile."""
        c = self.c
        thread = cute.arch.thread_idx()[0] % 128
        mma = hopper.make_trivial_tiled_mma(c.dtype, c.dtype, _MAJOR.K, _MAJOR.K, Float32, (1, 1, 1), (64, c.keys))
        mine = mma.get_slice(thread)
        w = _Work(
            thread=thread,
            qk_mma=mma,
            tSrQ=mine.make_fragment_A(mine.partition_A(self._staged(shared, (c.heads, c.part, c.halves)))),
            tSrK=mine.make_fragment_B(mine.partition_B(self._tiles(shared)[0])),
            top=cute.make_rmem_tensor(2, Float32),
            total=cute.make_rmem_tensor(2, Float32),
        )
        w.top.fill(-_INF)
        w.total.fill(0.0)
        cute.arch.mbarrier_wait(meet.query, Int32(0))
        cute.arch.fence_view_async_shared()
        for n in cutlass.range(group, piece.stop - piece.first, c.scorers, unroll=1):
            rS, more = self._multiply_scores_of(w, meet, n)
            warpgroup.wait_group(0)
            for i in cutlass.range_constexpr(cute.size(rS)):
                rS[i] = rS[i] + more[i]
            self._bound(scalars, w, rS, *place(keys, piece.first + n, c.keys))
            scales = self._probabilities(w, meet, rS, n)
            self._give(w, meet, rS, scales, n)
        self._join_sums(w, meet, shared, group)

    def _multiply_scores_of(self, w: Any, meet: Any, n: Int32) -> list[Any]:
        """Issue the scores of tile n, once it is there; a sum for each half of the columns, for shorter chains, as in
        ``decode.py``."""
        c, sums = self.c, []
        meet.tiles.wait(n)
        for half in range(c.halves):
            rS = cute.make_rmem_tensor(w.qk_mma.partition_shape_C((c.heads, c.keys)), Float32)
            rK = w.tSrK[None, None, None, meet.tiles.slot(n) * c.halves + half]
            self._multiply(w.qk_mma, rS, w.tSrQ[None, None, None, half], rK, clear=True)
            sums.append(rS)
        return sums

    @cute.jit
    def _probabilities(self, w: Any, meet: Any, rS: Any, n: Int32):
        """Scores to probabilities in place; returns the factors of the output so far.

        The maxima of the tile before come from the other warpgroup, and this tile's go there. A warpgroup's sums are in
        step with the maxima of its own last tile.
        """
        row, lane = self._row(w), w.thread & 31
        sTop = self._floats(meet.tops, self.c.scorers)
        old = cute.make_rmem_tensor(2, Float32)
        old.fill(-_INF)
        peaks = [softmax.peak(rS, r) for r in range(2)]
        if n > 0:
            meet.known.wait(n - 1)
            for r in cutlass.range_constexpr(2):
                old[r] = sTop[row + 8 * r, meet.known.slot(n - 1)]
        new = [cute.arch.fmax(old[r], peaks[r]) for r in range(2)]
        if (lane & 3) == 0:
            for r in cutlass.range_constexpr(2):
                sTop[row + 8 * r, meet.known.slot(n)] = new[r]
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(meet.known.full + meet.known.slot(n))
        scales = []
        for r in cutlass.range_constexpr(2):
            safe = finite(new[r])
            scales.append(exp2(old[r] - safe))
            w.total[r] = w.total[r] * exp2(w.top[r] - safe)
            w.top[r] = new[r]
            for i in cutlass.range_constexpr(cute.size(rS)):
                if const_expr(i // 2 % 2 == r):
                    rS[i] = exp2(rS[i] - safe)
                    w.total[r] = w.total[r] + rS[i]
        return scales

    @cute.jit
    def _join_sums(self, w: Any, meet: Any, shared: Int32, group: Int32):
        """The sums of both warpgroups, in step with the last maxima, to where the result goes."""
        row, lane = self._row(w), w.thread & 31
        sLast = self._floats(meet.tops + const_expr(self.c.scorers * self.c.heads * 4), 2)  # maxima and sums
        if group == 1:
            for r in cutlass.range_constexpr(2):
                total = w.total[r]
                for distance in (1, 2):
                    total += cute.arch.shuffle_sync_bfly(total, offset=distance)
                if (lane & 3) == 0:
                    sLast[row + 8 * r, 0] = w.top[r]
                    sLast[row + 8 * r, 1] = total
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        if group == 0:
            for r in cutlass.range_constexpr(2):
                other = sLast[row + 8 * r, 0]
                top = cute.arch.fmax(w.top[r], other)
                more = sLast[row + 8 * r, 1] * exp2(other - finite(top))
                w.total[r] = w.total[r] * exp2(w.top[r] - finite(top))
                w.total[r] += cutlass.select_((lane & 3) == 0, more, Float32(0.0))  # the four lanes' sums are added
                w.top[r] = top
            self._put_sums(w, shared)

    def _floats(self, at: Int32, columns: int) -> Any:
        """So many floats for each head."""
        pointer = cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=4)
        return cute.make_tensor(pointer, cute.make_layout((self.c.heads, columns)))

    @cute.jit
    def _give(self, w: Any, meet: Any, rS: Any, scales: Any, n: Int32):
        """The probabilities of tile n, and the factors of the output before it, to the value warpgroups."""
        c = self.c
        row, lane = self._row(w), w.thread & 31
        meet.ready.await_empty(n)
        turn = meet.ready.slot(n)
        sScale = self._floats(meet.factors, c.turns)
        if (lane & 3) == 0:
            for r in cutlass.range_constexpr(2):
                sScale[row + 8 * r, turn] = scales[r]
        self._put_weights(rS, meet.weights + turn * c.weight_bytes, row, lane)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(meet.ready.full + turn)

    def _put_weights(self, rS: Any, at: Int32, row: Int32, lane: Int32) -> None:
        """Probabilities (64, N) as pairs, rows of 128 bytes with their 16-byte chunks swizzled."""
        words = cute.make_tensor(
            cute.make_ptr(Int32, at + row * 128 + (lane & 3) * 4, cute.AddressSpace.smem, assumed_align=4),
            cute.make_layout((2, 8), stride=(256, 4)),
        )  # (8 rows, chunk)
        for i in range(self.c.keys // 8):
            for r in range(2):
                words[r, (row & 7) ^ i] = softmax.pack(rS[4 * i + 2 * r], rS[4 * i + 2 * r + 1], self.c.dtype)

    @cute.jit
    def _sum_values(
        self, tensors: Tensors, loads: Loads, keys: Any, piece: Piece, shared: Int32, meet: Any, half: Int32
    ):
        """One warpgroup: its half of the columns, loaded and multiplied."""
        c = self.c
        thread = cute.arch.thread_idx()[0] % 128
        w = self._values_work(shared, meet, thread, half)
        count = piece.stop - piece.first
        # The first tile and Q before the others, or they come last, when the ring has long been full.
        if count > 0:
            self._load_columns(tensors, loads, keys, piece, w, meet, Int32(0))
        self._load_all_queries(tensors, piece, shared, meet)
        for n in cutlass.range(1, cutlass.min(count, c.stages), unroll=1):
            self._load_columns(tensors, loads, keys, piece, w, meet, n)
        w.rO.fill(0.0)
        row, sScale = self._row(w), self._floats(meet.factors, c.turns)
        for n in cutlass.range(count, unroll=1):
            turn, buffer = meet.ready.slot(n), meet.tiles.slot(n)
            meet.ready.wait(n)
            scales = (sScale[row, turn], sScale[row + 8, turn])
            if cute.arch.vote_any_sync((scales[0] != 1.0) | (scales[1] != 1.0)):
                softmax.rescale(w.rO, scales)
            meet.tiles.wait(n)
            first, low, high = place(keys, piece.first + n, c.keys)
            if (low > first) | (high < first + c.keys):
                self._clear(w, buffer, low - first, high - first)
            rP, rV = w.tOrP[None, None, None, turn], w.tOrV[None, None, None, buffer * c.halves + half]
            self._multiply(w.pv_mma, w.rO, rP, rV, clear=False)
            warpgroup.wait_group(0)
            cute.arch.sync_warp()  # every lane has read its factors before one of them gives their place back
            meet.ready.release(n)
            if n + c.stages < count:
                cute.arch.barrier(barrier_id=1 + half, number_of_threads=128)
                self._load_columns(tensors, loads, keys, piece, w, meet, n + c.stages)
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        if w.thread // 32 * 16 < piece.heads:  # of a warp's 16 rows
            self._put_columns(w, shared)

    @cute.jit
    def _load_columns(self, tensors: Tensors, loads: Loads, keys: Any, piece: Piece, w: Any, meet: Any, n: Int32):
        """A warp's 64 columns of tile n. TMA gives zeros beyond the end of a sequence, and where there is no page, for
        which it is given one that is beyond the cache."""
        c = self.c
        first, low, high = place(keys, piece.first + n, c.keys)
        page = self._pages(tensors, piece, first, low, high) if const_expr(c.page) else Int32(0)
        buffer, column = meet.tiles.slot(n), w.half * (c.part // _COLUMNS) + cute.arch.make_warp_uniform(w.thread // 32)
        full = meet.tiles.full + buffer
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, c.keys * _COLUMNS * 2)
        for b in cutlass.range_constexpr(c.boxes):
            row, last = first // c.box + b, piece.b
            if const_expr(c.page):
                row = (first + b * c.box) % c.page // c.box
                last = cute.arch.shuffle_sync(page, b)
            gBox = cute.local_tile(loads.rows[None, None, piece.kv_head, last], (c.box, _COLUMNS), (row, column))
            to = (buffer * (c.dim // _COLUMNS) + column) * c.boxes + b
            sBox, gBox = cpasync.tma_partition(
                loads.atom, 0, cute.make_layout(1), cute.group_modes(w.boxes[None, None, to], 0, 2),
                cute.group_modes(gBox, 0, 2),
            )  # fmt: skip
            cute.copy(loads.atom, gBox, sBox, tma_bar_ptr=full)

    @cute.jit
    def _pages(self, tensors: Tensors, piece: Piece, first: Int32, low: Int32, high: Int32):
        """Lane l: the page of the tile's l-th box; -1, outside of any cache, where there is none to read."""
        c = self.c
        begin = first + cute.arch.lane_idx() * c.box
        logical, page = begin // c.page, Int32(-1)
        seen = (cute.arch.lane_idx() < c.boxes) & (begin < high) & (begin + c.box > low)
        if seen & (logical < Int32(tensors.table.shape[1])):
            row = tensors.table.iterator.toint() + Int64(tensors.table.stride[0]) * piece.b * 4
            page = op.load_pair(row + Int64(logical) * 4)
        known = (page >= 0) & (page < Int32(tensors.k.shape[0]))
        return cutlass.select_(known, page, Int32(-1))

    @cute.jit
    def _clear(self, w: Any, buffer: Int32, low: Int32, high: Int32):
        """Zeros for this half of the columns in the rows that do not count: their weight is zero, but what the cache
        holds there may be infinite. The scores have been read."""
        c = self.c
        lane = w.thread & 31
        at = w.ring + (buffer * c.halves + w.half) * const_expr(c.keys * c.part * 2)
        for i in cutlass.range_constexpr(c.keys // _WARPS):
            row = i * _WARPS + w.thread // 32
            if (row < low) | (row >= high):
                words = cute.make_ptr(
                    Int32, at + (lane // 8) * (c.keys * 128) + row * 128 + lane % 8 * 16, cute.AddressSpace.smem,
                    assumed_align=16,
                )  # fmt: skip
                cute.make_tensor(words, cute.make_layout(4)).fill(0)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=1 + w.half, number_of_threads=128)

    def _values_work(self, shared: Int32, meet: Any, thread: Int32, half: Int32) -> _Work:
        c = self.c
        # As 256 columns an instruction would have 128 registers to itself, which ptxas does not give to one of so many
        # threads, whatever ``setmaxnreg`` says.
        mma = hopper.make_trivial_tiled_mma(c.dtype, c.dtype, _MAJOR.K, _MAJOR.MN, Float32, (1, 1, 1), (64, 128))
        mine = mma.get_slice(thread)
        sP = self._staged(meet.weights, (c.heads, 64, c.turns))  # (64, 64, turns), of which N columns are used
        return _Work(
            thread=thread,
            half=half,
            ring=shared + c.query_bytes,
            boxes=self._staged(shared + c.query_bytes, (c.box, _COLUMNS, c.stages * c.dim // _COLUMNS * c.boxes)),
            pv_mma=mma,
            tOrP=mine.make_fragment_A(mine.partition_A(sP)),
            tOrV=mine.make_fragment_B(mine.partition_B(self._tiles(shared)[1])),
            rO=cute.make_rmem_tensor(mine.partition_shape_C((c.heads, c.part)), Float32),
        )
