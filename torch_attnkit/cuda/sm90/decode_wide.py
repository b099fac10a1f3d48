"""Attention of one query token with up to 64 query heads per KV head on Hopper: keys and values still read once.

    all threads: cp.async ring of K and V tiles -> S = Q K' -> online softmax -> O += P V, products by ``wgmma``

The heads of a group are the 64 rows of a product, so 9 heads cost what 64 do; that is less than memory takes. Up to
256 columns one warpgroup has a block, and other blocks on its SM compute while it waits. For 512 columns two warpgroups
have half of the columns each: each sums Q K' over its own, they exchange these sums through shared memory, and both go
on with the same scores and probabilities, so only the sums are ever exchanged. Where V is K, a tile is loaded once; for
512 columns ``decode_latent.py`` does that.

Measured on an H200 (bf16, K and V past the L2, CUDA graph, us; beside it in the same run the best of cuDNN, FA2, FA3)
at S 8192 for B 1, 16, 128: 64/4 heads, D 128, 14.4, 71.6, 481 (cuDNN 13.1, 67.7, 473); 64/1 heads, D 128, 12.7, 32.7,
148 (without FA3: cuDNN 11.2, FA2 30.1, 136); 64/1 heads, D 512, 22.8, 85.2, 487 (4.45 TB/s; from run to run 487 to
605). Few heads are in ``decode_plan.py``. Since the number of tiles is known to be the same in all lanes, 32/8 heads, D
128, 128x8192 take 940 for 969 in one run, and 64 sequences of 1 to 8192 keys 281 for 294.

Rows that do not count arrive as zeros, as in ``decode.py``, which has the letters and the rest of the kernel.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from .. import warp_ops as op
from ..decode import Decode
from ..decode_schedule import place
from ..decode_types import Piece, Scalars, Tensors
from ..ring import Fixed
from ..warp_ops import tanh
from . import prefill_softmax as softmax

_INF = float("inf")
_MAJOR = OperandMajorMode


class _Work(Fixed, SimpleNamespace):
    """A warpgroup's slices of the operands, and its accumulators."""


class Wide(Decode):
    """Streams the tiles of a piece through ``wgmma``."""

    @cute.jit
    def _stream(
        self, tensors: Tensors, loads: Any, scalars: Scalars, keys: Any, piece: Piece, shared: Int32,
        role: cutlass.Constexpr,
    ):  # fmt: skip
        c = self.c
        w = self._work(shared)
        # Known to be the same in all lanes, or every descriptor of ``wgmma`` would be computed in each of them.
        count = cute.arch.make_warp_uniform(piece.stop - piece.first) * const_expr(1 if c.same else 2)  # loads
        self._load_query(tensors, piece, shared, w.loader, c.threads)
        for s in cutlass.range_constexpr(c.stages - 1):
            self._load(tensors, keys, piece, w, Int32(0), s, count, Int32(s))
        w.rO.fill(0.0)
        w.top.fill(-_INF)
        w.total.fill(0.0)
        if const_expr(c.same):
            self._overlapped(tensors, scalars, keys, piece, w, count)
        else:
            self._in_turn(tensors, scalars, keys, piece, w, count)
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        self._put(w, shared)
        cute.arch.barrier()

    @cute.jit
    def _in_turn(self, tensors: Tensors, scalars: Scalars, keys: Any, piece: Piece, w: Any, count: Int32):
        """K and V in buffers of their own: one of them is in use, so as much as can be is on the way."""
        c = self.c
        read, free = Int32(0), Int32(c.stages - 1)  # buffers
        for n in cutlass.range(0, count, 2, unroll=1):
            self._arrive(c.stages - 2)
            rS = self._multiply_scores(w, read)
            self._load(tensors, keys, piece, w, n, c.stages - 1, count, free)
            warpgroup.wait_group(0)
            self._sum_halves(w, rS)
            scales = self._weights(scalars, w, rS, *place(keys, piece.first + n // 2, c.keys))
            self._take(w, rS, scales)
            free, read = read, self._after(read)
            self._arrive(c.stages - 2)
            self._multiply_values(w, read)
            self._load(tensors, keys, piece, w, n, c.stages, count, free)
            warpgroup.wait_group(0)
            free, read = read, self._after(read)

    @cute.jit
    def _overlapped(self, tensors: Tensors, scalars: Scalars, keys: Any, piece: Piece, w: Any, count: Int32):
        """V is K: a tile's second product is issued behind the next one's first, to run under the softmax of that."""
        c = self.c
        self._arrive(c.stages - 2)
        rS = self._multiply_scores(w, Int32(0))
        warpgroup.wait_group(0)
        scales = self._weights(scalars, w, rS, *place(keys, piece.first, c.keys))
        self._take(w, rS, scales)
        read, free = Int32(0), Int32(c.stages - 1)  # buffers
        for n in cutlass.range(1, count, unroll=1):
            self._arrive(c.stages - 3)
            rS = self._multiply_scores(w, self._after(read))
            self._multiply_values(w, read)
            self._load(tensors, keys, piece, w, n, c.stages - 2, count, free)
            warpgroup.wait_group(1)
            scales = self._weights(scalars, w, rS, *place(keys, piece.first + n, c.keys))
            warpgroup.wait_group(0)
            self._take(w, rS, scales)
            read, free = self._after(read), self._after(free)
        self._multiply_values(w, read)
        warpgroup.wait_group(0)

    def _after(self, buffer: Int32) -> Int32:
        return cutlass.select_(buffer == self.c.stages - 1, Int32(0), buffer + 1)

    def _arrive(self, pending: int) -> None:
        """Wait for all but ``pending`` loads, every thread for its own copies, and for all threads to be done with what
        came before."""
        cute.arch.cp_async_wait_group(pending)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier()

    def _staged(self, at: Int32, shape: tuple[int, int, int]) -> Any:
        """Rows of columns, a number of times, as ``wgmma`` reads them."""
        c = self.c
        atom = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, c.dtype, shape[1])
        layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(atom, c.dtype), shape, order=(0, 1, 2))
        pointer = cute.make_ptr(c.dtype, at, cute.AddressSpace.smem, assumed_align=1024)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=c.dtype), layout.outer)

    def _tiles(self, shared: Int32) -> tuple[Any, Any]:
        """The ring as the right side of either product: (N, part, stages * halves) and (part, N, stages * halves)."""
        c = self.c
        shape = (c.keys, c.part, c.stages * c.halves)
        sKV = self._staged(shared + c.query_bytes, shape)
        return sKV, cute.composition(sKV, cute.make_ordered_layout((c.part, c.keys, shape[2]), order=(1, 0, 2)))

    def _work(self, shared: Int32) -> _Work:
        c = self.c
        thread = cute.arch.thread_idx()[0]
        half = cute.arch.make_warp_uniform(thread // 128)
        qk_mma = hopper.make_trivial_tiled_mma(c.dtype, c.dtype, _MAJOR.K, _MAJOR.K, Float32, (1, 1, 1), (64, c.keys))
        pv_mma = hopper.make_trivial_tiled_mma(
            c.dtype, c.dtype, _MAJOR.K, _MAJOR.MN, Float32, (1, 1, 1), (64, c.part), warpgroup.OperandSource.RMEM
        )
        sQ = self._staged(shared, (c.heads, c.part, c.halves))
        sKV, sVt = self._tiles(shared)
        qk, pv = qk_mma.get_slice(thread % 128), pv_mma.get_slice(thread % 128)
        rP = pv.make_fragment_A(pv.partition_shape_A((c.heads, c.keys)))
        exchange = cute.make_ptr(
            Float32,
            shared + (c.query_bytes + c.stages * c.buffer_bytes),
            cute.AddressSpace.smem,
            assumed_align=16,
        )
        return _Work(
            thread=thread % 128,
            half=half,
            loader=thread,
            ring=shared + c.query_bytes,
            qk_mma=qk_mma,
            pv_mma=pv_mma,
            tSrQ=qk.make_fragment_A(qk.partition_A(sQ)),
            tSrK=qk.make_fragment_B(qk.partition_B(sKV)),
            tOrV=pv.make_fragment_B(pv.partition_B(sVt)),
            rP=rP,
            words=cute.recast_tensor(rP, Int32),
            rO=cute.make_rmem_tensor(pv.partition_shape_C((c.heads, c.part)), Float32),
            top=cute.make_rmem_tensor(2, Float32),
            total=cute.make_rmem_tensor(2, Float32),
            # (4, threads, sums of a thread / 4, halves)
            sums=cute.make_tensor(exchange, cute.make_layout((4, 128, c.keys // 8, 2))),
        )

    def _multiply(self, mma: Any, acc: Any, a: Any, b: Any, *, clear: bool) -> None:
        """Issue ``acc (+)= a b`` as one group of ``wgmma``, without waiting for it."""
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, not clear)
        for k in range(cute.size(b, mode=[2])):
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def _multiply_scores(self, w: Any, buffer: Int32) -> Any:
        c = self.c
        rS = cute.make_rmem_tensor(w.qk_mma.partition_shape_C((c.heads, c.keys)), Float32)
        rQ, rK = w.tSrQ[None, None, None, w.half], w.tSrK[None, None, None, buffer * c.halves + w.half]
        self._multiply(w.qk_mma, rS, rQ, rK, clear=True)
        return rS

    def _multiply_values(self, w: Any, buffer: Int32) -> None:
        self._multiply(w.pv_mma, w.rO, w.rP, w.tOrV[None, None, None, buffer * self.c.halves + w.half], clear=False)

    def _sum_halves(self, w: Any, rS: Any) -> None:
        """The sums over all columns in both warpgroups, bit for bit the same. The next barrier frees the exchange."""
        if self.c.halves == 1:
            return
        for i in range(self.c.keys // 8):
            mine = cute.make_tensor(rS.iterator + i * 4, cute.make_layout(4))
            cute.autovec_copy(mine, w.sums[None, w.thread, i, w.half])
        cute.arch.barrier()
        for i in range(self.c.keys // 8):
            other = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(w.sums[None, w.thread, i, 1 - w.half], other)
            for x in range(4):
                rS[i * 4 + x] = rS[i * 4 + x] + other[x]

    @cute.jit
    def _weights(self, scalars: Scalars, w: Any, rS: Any, first: Int32, low: Int32, high: Int32):
        """Scores to probabilities in place, 0 where a key does not count; returns the factors of the output so far."""
        self._bound(scalars, w, rS, first, low, high)
        return softmax.online(rS, w.top, w.total, Float32(1.0), first=False)

    @cute.jit
    def _bound(self, scalars: Scalars, w: Any, rS: Any, first: Int32, low: Int32, high: Int32):
        """Products to scores in powers of two, -inf where a key does not count."""
        c = self.c
        for i in cutlass.range_constexpr(cute.size(rS)):
            rS[i] = rS[i] * scalars.scale
        if scalars.cap > 0:
            for i in cutlass.range_constexpr(cute.size(rS)):
                rS[i] = scalars.cap * tanh(rS[i])
        if (low > first) | (high < first + c.keys):
            key = first + (w.thread & 3) * 2
            for i in cutlass.range_constexpr(cute.size(rS)):
                column = key + (i // 4 * 8 + i % 2)
                rS[i] = cutlass.select_((column >= low) & (column < high), rS[i], Float32(-_INF))

    @cute.jit
    def _take(self, w: Any, rS: Any, scales: Any):
        """Bring the output to the new maxima, and the probabilities to where the second product reads them."""
        if cute.arch.vote_any_sync((scales[0] != 1.0) | (scales[1] != 1.0)):
            softmax.rescale(w.rO, scales)
        softmax.pack_into(w.words, rS, self.c.dtype)

    @cute.jit
    def _load_query(self, tensors: Tensors, piece: Piece, shared: Int32, thread: Int32, threads: cutlass.Constexpr):
        """Start the copy of Q; rows beyond the group's heads become zeros."""
        c = self.c
        words = const_expr(c.dim // 2)  # of a row
        row_bytes = Int64(tensors.q.stride[1]) * 2
        start = tensors.q.iterator.toint() + Int64(tensors.q.stride[0]) * piece.b * 2 + row_bytes * piece.head
        if (start | row_bytes) % 16 == 0:
            for i in cutlass.range(c.heads * words // 4 // threads, unroll=8):
                row, chunk = (i * threads + thread) // (words // 4), (i * threads + thread) % (words // 4)
                at = shared + row * 128 + chunk // 8 * (c.heads * 128) + ((chunk % 8) ^ (row & 7)) * 16
                valid = cutlass.select_(row < piece.heads, Int32(16), Int32(0))
                op.copy_16_async(at, start + row_bytes * row + chunk * 16, valid)
        else:
            for i in cutlass.range(c.heads * words // threads, unroll=8):
                row, word = (i * threads + thread) // words, (i * threads + thread) % words
                at = shared + row * 128 + word // 32 * (c.heads * 128) + word % 4 * 4
                at += ((word // 4 % 8) ^ (row & 7)) * 16
                valid = cutlass.select_(row < piece.heads, Int32(4), Int32(0))
                op.copy_4_async(at, start + row_bytes * row + word * 4, valid)

    @cute.jit
    def _load(
        self, tensors: Tensors, keys: Any, piece: Piece, w: Any, n: Int32, ahead: cutlass.Constexpr, count: Int32,
        buffer: Int32,
    ):  # fmt: skip
        """Start load n + ahead of a piece, if there is one: tile n + ahead, or where V is not K, K's and V's in turn;
        n is then even."""
        c = self.c
        if n + ahead < count:
            if const_expr(c.same):
                self._load_tile(tensors, keys, piece, w, tensors.k, piece.first + n + ahead, buffer)
            else:
                cache = tensors.v if const_expr(ahead % 2 == 1) else tensors.k
                self._load_tile(tensors, keys, piece, w, cache, piece.first + n // 2 + ahead // 2, buffer)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def _load_tile(
        self, tensors: Tensors, keys: Any, piece: Piece, w: Any, cache: cute.Tensor, t: Int32, buffer: Int32
    ):
        """Rows of 128 bytes in columns of blocks, their 16-byte chunks as ``wgmma`` wants them (128B swizzle);
        rows that do not count become zeros, whatever the cache holds there."""
        c = self.c
        first, low, high = place(keys, t, c.keys)
        low, high = low - first, high - first
        paged = const_expr(c.page > 0)
        row_bytes = Int64(cache.stride[1 if paged else 2]) * 2
        at = cache.iterator.toint() + Int64(cache.stride[2 if paged else 1]) * piece.kv_head * 2
        page = Int32(0)
        if const_expr(paged):
            page = self._pages(tensors, piece, first, low, high)
        else:
            at += Int64(cache.stride[0]) * piece.b * 2 + row_bytes * first
        chunks = const_expr(c.dim // 8)  # of a row; they divide the number of threads
        first_row, chunk = w.loader // chunks, w.loader % chunks
        target = w.ring + buffer * c.buffer_bytes + chunk // 8 * (c.keys * 128)
        for i in cutlass.range_constexpr(c.keys * chunks // c.threads):
            row = first_row + i * (c.threads // chunks)
            good = cutlass.Uint32(row - low) < cutlass.Uint32(high - low)
            if const_expr(paged):
                mine = cute.arch.shuffle_sync(page, (first + row) // c.page - first // c.page)
                source = at + Int64(cache.stride[0]) * 2 * mine + row_bytes * ((first + row) % c.page)
                good = good & (mine >= 0)
            else:
                source = at + row_bytes * row
            valid = cutlass.select_(good, Int32(16), Int32(0))
            op.copy_16_async(target + row * 128 + ((chunk % 8) ^ (row & 7)) * 16, source + chunk * 16, valid)

    @cute.jit
    def _pages(self, tensors: Tensors, piece: Piece, first: Int32, low: Int32, high: Int32):
        """Lane l: the l-th page of the tile, or -1 where there is none to read."""
        c = self.c
        logical = first // c.page + cute.arch.lane_idx()
        begin = logical * c.page - first
        page = Int32(-1)
        if (begin < high) & (begin + c.page > low) & (logical < Int32(tensors.table.shape[1])):
            page = op.load_pair(
                tensors.table.iterator.toint() + (Int64(tensors.table.stride[0]) * piece.b + logical) * 4
            )
        known = (page >= 0) & (page < Int32(tensors.k.shape[0]))
        return cutlass.select_(known, page, Int32(-1))

    @cute.jit
    def _put(self, w: Any, shared: Int32):
        """This warpgroup's columns of the result into shared memory, and with the first the maxima and sums."""
        self._put_columns(w, shared)
        if w.half == 0:
            self._put_sums(w, shared)

    def _row(self, w: Any) -> Any:
        """The first of the two rows of an accumulator that a lane has; the other is 8 below it."""
        return w.thread // 32 * 16 + (w.thread & 31) // 4

    @cute.jit
    def _put_columns(self, w: Any, shared: Int32):
        c = self.c
        sO = self._results(shared)[0]
        row, column = self._row(w), w.half * c.part + (w.thread & 3) * 2
        for r in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(c.part // 4):
                sO[0, row + 8 * r, column + (i // 2 * 8 + i % 2)] = w.rO[i // 2 * 4 + 2 * r + i % 2]

    @cute.jit
    def _put_sums(self, w: Any, shared: Int32):
        sStat, row = self._results(shared)[1], self._row(w)
        for r in cutlass.range_constexpr(2):
            total = w.total[r]
            for distance in (1, 2):
                total += cute.arch.shuffle_sync_bfly(total, offset=distance)
            if (w.thread & 3) == 0:
                sStat[0, row + 8 * r, 0] = w.top[r]
                sStat[0, row + 8 * r, 1] = total
