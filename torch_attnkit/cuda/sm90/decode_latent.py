"""Attention of one query token over latent vectors that are keys and values at once, as MLA has them when its
projections are absorbed (DeepSeek-V2, arXiv 2405.04434).

    2 value warpgroups: cp.async of tiles -> wait for P -> O += P K, a half of the columns each -> load the next tile
    score warpgroup:    wait for a tile -> S = Q K' -> online softmax -> P and the factors of O to shared memory

64 heads of 512 columns are too much for the registers of one warpgroup, and two that share the scores wait for each
other. Here the second product of one tile runs beside the first of the next. A value warpgroup reloads its columns as
soon as it has multiplied them: the score warpgroup was done with them before. Blocks with the other heads of a KV head
run next to each other, so that the keys come from memory once (``Scalars.beside``).

Measured on an H200 (bf16, 8192 keys, K past the L2, CUDA graph, us; FlashInfer 0.6.18's MLA beside it in the same run)
for B 1, 16, 128: 16 heads 18.0, 49.0, 289 (23.4, 44.1, 265); 64 heads 21.5, 58.4, 323 (24.7, 49.5, 276); 128 heads
23.0, 91.9, 617 (24.0, 72.1, 503); from run to run long cases differ by 15 %. Two warpgroups that shared the scores took
402 where this took 351. With 128 heads and B 128 ncu counts 51 % for tensor cores and shared memory and 41 % for
memory, which gives K once: a tile takes 4000 cycles, its products 2048. A buffer is on its way, multiplied, and
multiplied again, one after the other, and there is room for two. Tried: three tiles of 48 keys, up to 10 % slower, or
four of 32, 10 to 25 %; reloading a tile in 2 or 4 parts, each when it was used, 1 % slower or equal; tiles in the L2
ahead of time, 2 to 10 % slower; descriptors that the compiler does not know to be the same in all lanes, 4 to 6 %.

Rows that do not count arrive as zeros, as in ``decode.py``, which has the letters and the rest of the kernel.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from .. import warp_ops as op
from ..decode_schedule import place
from ..decode_types import Piece, Scalars, Tensors
from ..ring import Fixed, Ring
from . import prefill_softmax as softmax
from .decode_wide import Wide, _Work

_INF = float("inf")
_MAJOR = OperandMajorMode


class _Shared(Fixed):
    """What lies behind Q and the tiles: probabilities, factors of the output, and who waits for what."""

    def __init__(self, config: Any, shared: Int32):
        c = config
        self.weights = shared + (c.query_bytes + c.stages * c.buffer_bytes)
        self.factors = self.weights + c.turns * c.weight_bytes
        barriers = cute.make_ptr(
            cutlass.Int64, self.factors + c.turns * c.heads * 4, cute.AddressSpace.smem, assumed_align=8
        )
        self.query = barriers
        self.ready = Ring(barriers + 1 + c.stages, barriers + 1 + c.stages + c.turns, c.turns)  # probabilities
        self.tiles = Ring(barriers + 1, barriers + 1, c.stages)  # only ``full`` is used
        loaders = c.halves * c.loaders
        self.counts = [loaders] + [loaders] * c.stages + [4] * c.turns + [4 * c.halves] * c.turns

    def begin(self) -> None:
        for i, count in enumerate(self.counts):
            cute.arch.mbarrier_init(self.query + i, count)

    def end(self) -> None:
        for i in range(len(self.counts)):
            op.forget_barrier((self.query + i).toint())


class Latent(Wide):
    """Streams the tiles of a piece through one warpgroup of scores and two of values."""

    @cute.jit
    def _stream(self, tensors: Tensors, scalars: Scalars, keys: Any, piece: Piece, shared: Int32):
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
        # Known to be the same in all lanes, they take no registers of these.
        keys, piece = [type(x)(*map(cute.arch.make_warp_uniform, x)) for x in (keys, piece)]
        meet = _Shared(self.c, shared)
        if cute.arch.thread_idx()[0] == 0:
            meet.begin()
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        if group == 0:
            cute.arch.setmaxregister_decrease(120)
            self._score(scalars, keys, piece, shared, meet)
            cute.arch.setmaxregister_increase(168)
        else:
            cute.arch.setmaxregister_increase(192)
            self._sum_values(tensors, keys, piece, shared, meet, group - 1)
            cute.arch.setmaxregister_decrease(168)
        if cute.arch.thread_idx()[0] == 0:
            meet.end()
        cute.arch.barrier()

    @cute.jit
    def _score(self, scalars: Scalars, keys: Any, piece: Piece, shared: Int32, meet: Any):
        """One warpgroup: probabilities of every tile."""
        c = self.c
        thread = cute.arch.thread_idx()[0]
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
        row, lane = self._row(w), thread & 31
        count = piece.stop - piece.first
        cute.arch.mbarrier_wait(meet.query, Int32(0))
        for n in cutlass.range(count, unroll=1):
            meet.tiles.wait(n)
            cute.arch.fence_view_async_shared()
            buffer = meet.tiles.slot(n)
            # A sum for each half of the columns: shorter chains, as in ``decode.py``.
            rS, rS2 = [self._multiply_half(w, buffer, h) for h in range(2)]
            warpgroup.wait_group(0)
            for i in cutlass.range_constexpr(cute.size(rS)):
                rS[i] = rS[i] + rS2[i]
            scales = self._weights(scalars, w, rS, *place(keys, piece.first + n, c.keys))
            meet.ready.await_empty(n)
            turn = meet.ready.slot(n)
            sScale = self._factors(meet, turn)
            if (lane & 3) == 0:
                sScale[row] = scales[0]
                sScale[row + 8] = scales[1]
            self._put_weights(rS, meet.weights + turn * c.weight_bytes, row, lane)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(meet.ready.full + turn)
        cute.arch.barrier()
        self._put_sums(w, shared)

    def _multiply_half(self, w: Any, buffer: Int32, half: int) -> Any:
        """Issue the scores' sums over a half of the columns."""
        c = self.c
        rS = cute.make_rmem_tensor(w.qk_mma.partition_shape_C((c.heads, c.keys)), Float32)
        rQ, rK = w.tSrQ[None, None, None, half], w.tSrK[None, None, None, buffer * c.halves + half]
        self._multiply(w.qk_mma, rS, rQ, rK, clear=True)
        return rS

    def _put_weights(self, rS: Any, at: Int32, row: Int32, lane: Int32) -> None:
        """Probabilities (64, N) as pairs, rows of 128 bytes with their 16-byte chunks swizzled."""
        words = cute.make_tensor(
            cute.make_ptr(Int32, at + row * 128 + (lane & 3) * 4, cute.AddressSpace.smem, assumed_align=4),
            cute.make_layout((2, 8), stride=(256, 4)),
        )  # (8 rows, chunk)
        for i in range(self.c.keys // 8):
            for r in range(2):
                words[r, (row & 7) ^ i] = softmax.pack(rS[4 * i + 2 * r], rS[4 * i + 2 * r + 1], self.c.dtype)

    def _factors(self, meet: Any, turn: Int32) -> Any:
        at = cute.make_ptr(Float32, meet.factors + turn * (self.c.heads * 4), cute.AddressSpace.smem, assumed_align=4)
        return cute.make_tensor(at, cute.make_layout(self.c.heads))

    @cute.jit
    def _sum_values(self, tensors: Tensors, keys: Any, piece: Piece, shared: Int32, meet: Any, half: Int32):
        """One warpgroup: its half of the columns, loaded and multiplied."""
        c = self.c
        thread = cute.arch.thread_idx()[0] % 128
        w = self._values_work(shared, meet, thread, half)
        count = piece.stop - piece.first
        self._load_query(tensors, piece, shared, thread + half * 128, 128 * c.halves)
        cute.arch.cp_async_mbarrier_arrive_noinc(meet.query)
        for n in cutlass.range_constexpr(c.stages):
            if n < count:
                self._load_tile(tensors, keys, piece, w, tensors.k, piece.first + n, Int32(n))
                cute.arch.cp_async_mbarrier_arrive_noinc(meet.tiles.full + n)
        w.rO.fill(0.0)
        row = self._row(w)
        for n in cutlass.range(count, unroll=1):
            turn, buffer = meet.ready.slot(n), meet.tiles.slot(n)
            meet.ready.wait(n)
            sScale = self._factors(meet, turn)
            scales = (sScale[row], sScale[row + 8])
            if cute.arch.vote_any_sync((scales[0] != 1.0) | (scales[1] != 1.0)):
                softmax.rescale(w.rO, scales)
            meet.tiles.wait(n)
            cute.arch.fence_view_async_shared()
            rP, rV = w.tOrP[None, None, None, turn], w.tOrV[None, None, None, buffer * c.halves + half]
            self._multiply(w.pv_mma, w.rO, rP, rV, clear=False)
            warpgroup.wait_group(0)
            meet.ready.release(n)
            if n + c.stages < count:
                cute.arch.barrier(barrier_id=1 + half, number_of_threads=128)
                self._load_tile(tensors, keys, piece, w, tensors.k, piece.first + n + c.stages, buffer)
                cute.arch.cp_async_mbarrier_arrive_noinc(meet.tiles.full + buffer)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        self._put_columns(w, shared)

    def _values_work(self, shared: Int32, meet: Any, thread: Int32, half: Int32) -> _Work:
        c = self.c
        mma = hopper.make_trivial_tiled_mma(c.dtype, c.dtype, _MAJOR.K, _MAJOR.MN, Float32, (1, 1, 1), (64, c.part))
        mine = mma.get_slice(thread)
        sP = self._staged(meet.weights, (c.heads, 64, c.turns))  # (64, 64, turns), of which N columns are used
        return _Work(
            thread=thread,
            half=half,
            loader=thread,
            first_chunk=half * (c.part // 8),
            ring=shared + c.query_bytes,
            pv_mma=mma,
            tOrP=mine.make_fragment_A(mine.partition_A(sP)),
            tOrV=mine.make_fragment_B(mine.partition_B(self._tiles(shared)[1])),
            rO=cute.make_rmem_tensor(mine.partition_shape_C((c.heads, c.part)), Float32),
        )
