"""Decode on Hopper for up to 64 query heads a KV head: keys and values read once, products by ``wgmma``.

    out, lse = softmax(scale Q K') V      D = Dv a multiple of 64 up to 512, bf16 or fp16, contiguous or paged caches

Persistent CTAs (``schedule.py``) of one warpgroup, or two for D 512, without roles:

    all threads    cp.async ring of K and V tiles -> S = Q K' -> online softmax -> O += P V, P and O in registers

The heads of a group are M of a product, so 9 heads cost what 64 do, which is less than memory takes. The ring has no
mbarriers: every thread waits for its own copies (cp.async.wait_group), then a CTA barrier hands the stage to ``wgmma``
and frees the one read before. Two CTAs an SM (one for D 512) hide what the barriers expose. For D 512 each warpgroup
has half of the columns: it computes partial scores over its half, both exchange them through shared memory, and go on
with the same P. Where V is K (``same``) a tile is loaded once, and P V of a tile is issued behind the next tile's S.

Rows that do not count arrive as zeros. Splits: ``combine.py``. docs/lab/decode.md has what limits it.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from torch_attnkit.cuda import paging
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm90 import softmax, wgmma
from torch_attnkit.cuda.sm90.warpgroup import ROW_BYTES, ROWS, THREADS
from torch_attnkit.cuda.smem import CHUNK
from torch_attnkit.cuda.warp_ops import tanh

from ..arguments import Scalars, Tensors
from ..combine import Combine, result_tensors
from ..schedule import Decode, Visible, WorkTile, tile_bounds
from .config import WgmmaConfig

_INF = float("inf")


def decode_wgmma(config: WgmmaConfig) -> Decode:
    """The kernel: scheduler, mainloop of a block, epilogue."""
    return Decode(config, WgmmaMainloop(config), Combine(config))


@dataclass
class Fragments(Fixed):
    """A warpgroup's slices of the operands, and its accumulators."""

    thread: Int32  # of the warpgroup
    half: Int32  # the warpgroup, and its part of the columns
    loader: Int32  # thread of the block
    ring: Int32  # address
    qk_mma: cute.TiledMma
    pv_mma: cute.TiledMma
    tSrQ: cute.Tensor  # (1, 1, part / 16, halves)
    tSrK: cute.Tensor  # (1, 1, part / 16, stages * halves)
    tOrV: cute.Tensor  # (1, 1, N / 16, stages * halves)
    rP: cute.Tensor  # (64, N) as a left side
    rWords: cute.Tensor  # the same in pairs
    rO: cute.Tensor  # (64, part)
    rMax: cute.Tensor  # (2) rows
    rSum: cute.Tensor  # (2), this lane's share
    sSums: cute.Tensor  # (4, threads, sums of a thread / 4, halves)


class WgmmaLoader:
    """All threads' copies of tiles by ``cp.async``."""

    def __init__(self, config: WgmmaConfig):
        self.c = config

    @cute.jit
    def load(
        self, tensors: Tensors, keys: Visible, tile: WorkTile, w: Fragments, n: Int32, ahead: cutlass.Constexpr,
        count: Int32, stage: Int32,
    ):  # fmt: skip
        """Start load n + ahead of a work tile, if there is one: tile n + ahead, or where V is not K, K's and V's in
        turn; n is then even."""
        c = self.c
        if n + ahead < count:
            if const_expr(c.same):
                self._load_tile(tensors, keys, tile, w, tensors.k, tile.first + n + ahead, stage)
            else:
                cache = tensors.v if const_expr(ahead % 2 == 1) else tensors.k
                self._load_tile(tensors, keys, tile, w, cache, tile.first + n // 2 + ahead // 2, stage)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def _load_tile(
        self,
        tensors: Tensors,
        keys: Visible,
        tile: WorkTile,
        w: Fragments,
        cache: cute.Tensor,
        t: Int32,
        stage: Int32,
    ):
        """Rows that do not count become zeros, whatever the cache holds there."""
        c = self.c
        first, low, high = tile_bounds(keys, t, c.keys)
        low, high = low - first, high - first
        paged = const_expr(c.page > 0)
        row_bytes = Int64(cache.stride[1 if paged else 2]) * c.itemsize
        at = cache.iterator.toint() + Int64(cache.stride[2 if paged else 1]) * tile.kv_head * c.itemsize
        page = Int32(0)
        if const_expr(paged):
            page = paging.of_tile(tensors, tile.b, first, low, high, c.page)
        else:
            at += Int64(cache.stride[0]) * tile.b * c.itemsize + row_bytes * first
        chunks = const_expr(c.dim * c.itemsize // CHUNK)  # of a row; they divide the number of threads
        row_of_thread, chunk = w.loader // chunks, w.loader % chunks
        target = w.ring + stage * c.ring.stage_bytes + chunk // 8 * (c.keys * ROW_BYTES)
        for i in cutlass.range_constexpr(c.keys * chunks // c.threads):
            row = row_of_thread + i * (c.threads // chunks)
            valid = cutlass.Uint32(row - low) < cutlass.Uint32(high - low)
            if const_expr(paged):
                own_page = cute.arch.shuffle_sync(page, (first + row) // c.page - first // c.page)
                source = at + Int64(cache.stride[0]) * c.itemsize * own_page + row_bytes * ((first + row) % c.page)
                valid = valid & (own_page >= 0)
            else:
                source = at + row_bytes * row
            nbytes = cutlass.select_(valid, Int32(CHUNK), Int32(0))
            op.copy_16_async(
                target + row * ROW_BYTES + ((chunk % 8) ^ (row & 7)) * CHUNK, source + chunk * CHUNK, nbytes
            )


class WgmmaMainloop:
    """Streams the tiles of a work tile through ``wgmma``."""

    def __init__(self, config: WgmmaConfig):
        self.c, self.loader = config, WgmmaLoader(config)

    @cute.jit
    def run(self, tensors: Tensors, loads: None, scalars: Scalars, keys: Visible, tile: WorkTile, shared: Int32):
        c = self.c
        w = self._fragments(shared)
        # Warp-uniform, or every lane computes every descriptor of ``wgmma``. H200, 32/8 heads, D 128, 128x8192: 3 %.
        count = cute.arch.make_warp_uniform(tile.stop - tile.first) * const_expr(1 if c.same else 2)  # loads
        load_query(tensors, tile, c.shared.query.at(shared), w.loader, c.threads, c.dim, c.itemsize)
        for s in cutlass.range_constexpr(c.stages - 1):
            self.loader.load(tensors, keys, tile, w, Int32(0), s, count, Int32(s))
        w.rO.fill(0.0)
        w.rMax.fill(-_INF)
        w.rSum.fill(0.0)
        if const_expr(c.same):
            self._shared_kv(tensors, scalars, keys, tile, w, count)
        else:
            self._separate_kv(tensors, scalars, keys, tile, w, count)
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        store_columns(c.shared.results, shared, w.rO, w.thread, w.half, c.ring.part)
        if w.half == 0:
            store_stats(c.shared.results, shared, w.rMax, w.rSum, w.thread)
        cute.arch.barrier()

    @cute.jit
    def _separate_kv(
        self, tensors: Tensors, scalars: Scalars, keys: Visible, tile: WorkTile, w: Fragments, count: Int32
    ):
        """K and V in stages of their own: one is in use at a time, all others are in flight."""
        c = self.c
        read, free = Int32(0), Int32(c.stages - 1)  # stages
        for n in cutlass.range(0, count, 2, unroll=1):
            self._await_loads(c.stages - 2)
            rS = self._multiply_scores(w, read)
            self.loader.load(tensors, keys, tile, w, n, c.stages - 1, count, free)
            warpgroup.wait_group(0)
            self._sum_halves(w, rS)
            scales = self._probabilities(scalars, w, rS, *tile_bounds(keys, tile.first + n // 2, c.keys))
            self._rescale_and_pack(w, rS, scales)
            free, read = read, self._after(read)
            self._await_loads(c.stages - 2)
            self._multiply_values(w, read)
            self.loader.load(tensors, keys, tile, w, n, c.stages, count, free)
            warpgroup.wait_group(0)
            free, read = read, self._after(read)

    @cute.jit
    def _shared_kv(self, tensors: Tensors, scalars: Scalars, keys: Visible, tile: WorkTile, w: Fragments, count: Int32):
        """V is K: a tile's P V is issued behind the next tile's Q K', and runs under the softmax of that."""
        c = self.c
        self._await_loads(c.stages - 2)
        rS = self._multiply_scores(w, Int32(0))
        warpgroup.wait_group(0)
        scales = self._probabilities(scalars, w, rS, *tile_bounds(keys, tile.first, c.keys))
        self._rescale_and_pack(w, rS, scales)
        read, free = Int32(0), Int32(c.stages - 1)  # stages
        for n in cutlass.range(1, count, unroll=1):
            self._await_loads(c.stages - 3)
            rS = self._multiply_scores(w, self._after(read))
            self._multiply_values(w, read)
            self.loader.load(tensors, keys, tile, w, n, c.stages - 2, count, free)
            warpgroup.wait_group(1)
            scales = self._probabilities(scalars, w, rS, *tile_bounds(keys, tile.first + n, c.keys))
            warpgroup.wait_group(0)
            self._rescale_and_pack(w, rS, scales)
            read, free = self._after(read), self._after(free)
        self._multiply_values(w, read)
        warpgroup.wait_group(0)

    def _after(self, stage: Int32) -> Int32:
        return cutlass.select_(stage == self.c.stages - 1, Int32(0), stage + 1)

    def _await_loads(self, pending: int) -> None:
        """All but ``pending`` loads are visible to ``wgmma``, and all threads are done with what came before."""
        cute.arch.cp_async_wait_group(pending)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier()

    def _fragments(self, shared: Int32) -> Fragments:
        c = self.c
        K, MN = OperandMajorMode.K, OperandMajorMode.MN
        thread = cute.arch.thread_idx()[0]
        half = cute.arch.make_warp_uniform(thread // THREADS)
        qk_mma = hopper.make_trivial_tiled_mma(c.dtype, c.dtype, K, K, Float32, (1, 1, 1), (ROWS, c.keys))
        pv_mma = hopper.make_trivial_tiled_mma(
            c.dtype, c.dtype, K, MN, Float32, (1, 1, 1), (ROWS, c.ring.part), warpgroup.OperandSource.RMEM
        )
        sQ = wgmma.staged(c.dtype, c.shared.query.at(shared), (ROWS, c.ring.part, c.halves))
        sKV = wgmma.keys_by_columns(c.ring, c.shared.ring.at(shared))
        sVt = wgmma.columns_by_keys(c.ring, sKV)
        qk, pv = qk_mma.get_slice(thread % THREADS), pv_mma.get_slice(thread % THREADS)
        rP = pv.make_fragment_A(pv.partition_shape_A((ROWS, c.keys)))
        sums = cute.make_ptr(Float32, c.shared.sums.at(shared), cute.AddressSpace.smem, assumed_align=16)
        return Fragments(
            thread=thread % THREADS,
            half=half,
            loader=thread,
            ring=c.shared.ring.at(shared),
            qk_mma=qk_mma,
            pv_mma=pv_mma,
            tSrQ=qk.make_fragment_A(qk.partition_A(sQ)),
            tSrK=qk.make_fragment_B(qk.partition_B(sKV)),
            tOrV=pv.make_fragment_B(pv.partition_B(sVt)),
            rP=rP,
            rWords=cute.recast_tensor(rP, Int32),
            rO=cute.make_rmem_tensor(pv.partition_shape_C((ROWS, c.ring.part)), Float32),
            rMax=cute.make_rmem_tensor(2, Float32),
            rSum=cute.make_rmem_tensor(2, Float32),
            sSums=cute.make_tensor(sums, cute.make_layout((4, THREADS, c.keys // 8, 2))),
        )

    def _multiply_scores(self, w: Fragments, stage: Int32) -> cute.Tensor:
        """Issue the scores of a tile over this warpgroup's columns."""
        c = self.c
        rS = cute.make_rmem_tensor(w.qk_mma.partition_shape_C((ROWS, c.keys)), Float32)
        sQ, sK = w.tSrQ[None, None, None, w.half], w.tSrK[None, None, None, stage * c.halves + w.half]
        wgmma.multiply(w.qk_mma, rS, sQ, sK, clear=True)
        return rS

    def _multiply_values(self, w: Fragments, stage: Int32) -> None:
        sV = w.tOrV[None, None, None, stage * self.c.halves + w.half]
        wgmma.multiply(w.pv_mma, w.rO, w.rP, sV, clear=False)

    def _sum_halves(self, w: Fragments, rS: cute.Tensor) -> None:
        """The sums over all columns in both warpgroups, bit for bit the same. The next barrier frees ``sSums``."""
        if self.c.halves == 1:
            return
        for i in range(self.c.keys // 8):
            own = cute.make_tensor(rS.iterator + i * 4, cute.make_layout(4))
            cute.autovec_copy(own, w.sSums[None, w.thread, i, w.half])
        cute.arch.barrier()
        for i in range(self.c.keys // 8):
            rOther = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(w.sSums[None, w.thread, i, 1 - w.half], rOther)
            for x in range(4):
                rS[i * 4 + x] = rS[i * 4 + x] + rOther[x]

    @cute.jit
    def _probabilities(self, scalars: Scalars, w: Fragments, rS: cute.Tensor, first: Int32, low: Int32, high: Int32):
        """Scores to probabilities in place, 0 where a key does not count; returns the factors of the output so far."""
        to_scores(scalars, rS, w.thread, first, low, high, self.c.keys)
        return softmax.online(rS, w.rMax, w.rSum, Float32(1.0), first=False)

    @cute.jit
    def _rescale_and_pack(self, w: Fragments, rS: cute.Tensor, scales: list[Float32]):
        """Rescale O to the new maxima; P to where the second product reads it."""
        if cute.arch.vote_any_sync((scales[0] != 1.0) | (scales[1] != 1.0)):
            softmax.rescale(w.rO, scales)
        softmax.pack_into(w.rWords, rS, self.c.dtype)


@cute.jit
def to_scores(
    scalars: Scalars, rS: cute.Tensor, thread: Int32, first: Int32, low: Int32, high: Int32, keys: cutlass.Constexpr
):
    """Products to scores in powers of two, in place: scale, soft cap, -inf where a key of the tile does not count."""
    for i in cutlass.range_constexpr(cute.size(rS)):
        rS[i] = rS[i] * scalars.scale
    if scalars.cap > 0:
        for i in cutlass.range_constexpr(cute.size(rS)):
            rS[i] = scalars.cap * tanh(rS[i])
    if (low > first) | (high < first + keys):
        key = first + (thread & 3) * 2
        for i in cutlass.range_constexpr(cute.size(rS)):
            column = key + (i // 4 * 8 + i % 2)
            rS[i] = cutlass.select_((column >= low) & (column < high), rS[i], Float32(-_INF))


@cute.jit
def load_query(
    tensors: Tensors, tile: WorkTile, address: Int32, thread: Int32, threads: cutlass.Constexpr, dim: cutlass.Constexpr,
    size: cutlass.Constexpr,
):  # fmt: skip
    """Start this thread's part of the copy of Q, in elements of ``size`` bytes; rows beyond the group's heads become
    zeros."""
    words = const_expr(dim * size // 4)  # of a row
    row_bytes = Int64(tensors.q.stride[1]) * size
    start = tensors.q.iterator.toint() + Int64(tensors.q.stride[0]) * tile.b * size + row_bytes * tile.head
    if (start | row_bytes) % CHUNK == 0:
        for i in cutlass.range(ROWS * words // 4 // threads, unroll=8):
            row, chunk = (i * threads + thread) // (words // 4), (i * threads + thread) % (words // 4)
            at = address + row * ROW_BYTES + chunk // 8 * (ROWS * ROW_BYTES) + ((chunk % 8) ^ (row & 7)) * CHUNK
            valid = cutlass.select_(row < tile.heads, Int32(CHUNK), Int32(0))
            op.copy_16_async(at, start + row_bytes * row + chunk * CHUNK, valid)
    else:
        for i in cutlass.range(ROWS * words // threads, unroll=8):
            row, word = (i * threads + thread) // words, (i * threads + thread) % words
            at = address + row * ROW_BYTES + word // 32 * (ROWS * ROW_BYTES) + word % 4 * 4
            at += ((word // 4 % 8) ^ (row & 7)) * CHUNK
            valid = cutlass.select_(row < tile.heads, Int32(4), Int32(0))
            op.copy_4_async(at, start + row_bytes * row + word * 4, valid)


@cute.jit
def store_columns(
    results: cutlass.Constexpr, shared: Int32, rO: cute.Tensor, thread: Int32, half: Int32, part: cutlass.Constexpr
):
    """A warpgroup's ``part`` columns of O into shared memory."""
    sO = result_tensors(results, shared)[0]
    row, column = wgmma.first_row(thread), half * part + (thread & 3) * 2
    for r in cutlass.range_constexpr(2):
        for i in cutlass.range_constexpr(part // 4):
            sO[0, row + 8 * r, column + (i // 2 * 8 + i % 2)] = rO[i // 2 * 4 + 2 * r + i % 2]


@cute.jit
def store_stats(results: cutlass.Constexpr, shared: Int32, rMax: cute.Tensor, rSum: cute.Tensor, thread: Int32):
    """row_max and row_sum into shared memory."""
    sStat, row = result_tensors(results, shared)[1], wgmma.first_row(thread)
    for r in cutlass.range_constexpr(2):
        row_sum = softmax.quad_sum(rSum[r])
        if (thread & 3) == 0:
            sStat[0, row + 8 * r, 0] = rMax[r]
            sStat[0, row + 8 * r, 1] = row_sum
