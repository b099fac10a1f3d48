"""Decode for few query heads a KV head, by ``mma.sync`` on Hopper and Blackwell: every key and value read once.

    out, lse = softmax(scale Q K') V      D, Dv multiples of 16 up to 512, bf16 or fp16, or an fp8 cache (``fp8_kv.py``)

Persistent CTAs (``schedule.py``) of 1 to 12 warps without roles; warps share nothing while they stream:

    each warp    cp.async ring of K and V tiles, every ``warps``-th -> S' = K Q' -> online softmax -> O' += V' P'
    CTA          combine its warps in shared memory -> output, or a split to the workspace (``combine.py``)

A warp fills and empties its own ring of ``stages`` tiles: cp.async.wait_group and a warp barrier are all that guards
it, and no CTA barrier drains the queue of loads. Keys (then V's columns) are M of ``mma.m16n8k16`` and the query heads
of a KV head its N: eight heads fill an instruction, and fewer cost the same. P, 8 x 8 tiles with a row a key, becomes
the second product's B operand by a transpose in registers (``movmatrix``). Rows in shared memory are padded by 16
bytes: eight rows of a tile lie in different banks. docs/lab/decode.md has what limits it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import paging
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import finite
from torch_attnkit.cuda.smem import CHUNK
from torch_attnkit.cuda.warp_ops import exp2, tanh

from .arguments import Scalars, Tensors
from .combine import Combine, result_tensors
from .config import MmaConfig
from .fp8_kv import Fragment, elements
from .schedule import Decode, Visible, WorkTile, tile_bounds

_INF = float("inf")


def decode_mma(config: MmaConfig) -> Decode:
    """The kernel: scheduler, mainloop of a warp, epilogue."""
    return Decode(config, MmaMainloop(config), Combine(config))


class Source(NamedTuple):
    """Where a lane copies its chunks of a cache from."""

    at: Int64  # its first chunk of the first row
    row_bytes: Int64  # from row to row


class MmaLoader:
    """A warp's copies by ``cp.async`` from the caches."""

    def __init__(self, config: MmaConfig):
        self.c = config

    @cute.jit
    def sources(self, tensors: Tensors, tile: WorkTile):
        """Where this lane copies K from, and V."""
        c = self.c
        sources = []
        for which in cutlass.range_constexpr(2):
            cache, dim = (tensors.k, c.dim) if const_expr(which == 0) else (tensors.v, c.dim_v)
            head, row = const_expr((2, 1) if c.page else (1, 2))
            row_bytes = Int64(cache.stride[row]) * c.itemsize
            at = cache.iterator.toint() + Int64(cache.stride[head]) * tile.kv_head * c.itemsize
            if const_expr(c.page == 0):
                at += Int64(cache.stride[0]) * tile.b * c.itemsize
            first_row, chunk = self._chunk(dim, 0)
            sources.append(Source(at + row_bytes * first_row + chunk * CHUNK, row_bytes))
        return sources

    def _chunks(self, dim: int) -> int:
        """Of a row."""
        return dim * self.c.itemsize // CHUNK

    def _chunk(self, dim: int, i: int) -> tuple[Int32, Int32]:
        """The row and the 16-byte chunk of it that this lane copies i-th. Where lanes make up whole rows, or rows
        whole warps, both are a lane's constant plus a number known at compile time."""
        chunks, lane = self._chunks(dim), cute.arch.lane_idx()
        if 32 % chunks == 0:
            return lane // chunks + i * (32 // chunks), lane % chunks
        if chunks % 32 == 0:
            return Int32(i // (chunks // 32)), lane + i % (chunks // 32) * 32
        return (i * 32 + lane) // chunks, (i * 32 + lane) % chunks

    def _keys_in_one_page(self) -> int:
        """Keys of a tile that lie in one page wherever it begins: all, or so many that a copy's rows do, else 0."""
        c = self.c
        keys = math.gcd(c.page, c.keys)
        if keys == c.keys:
            return keys
        for chunks in (self._chunks(c.dim), self._chunks(c.dim_v)):
            whole_rows = 32 % chunks == 0 or chunks % 32 == 0
            keys = keys if whole_rows and keys % max(1, 32 // chunks) == 0 else 0
        return keys

    @cute.jit
    def load(
        self, tensors: Tensors, keys: Visible, tile: WorkTile, sources: list[Source] | None, t: Int32, stage: Int32
    ):
        """Start the copy of tile t; rows that do not count become zeros, whatever the cache holds there."""
        c = self.c
        first, low, high = tile_bounds(keys, t, c.keys)
        page, run = Int32(0), const_expr(self._keys_in_one_page())
        if const_expr(c.page != 0 and 0 < run < c.keys):
            page = paging.of_boxes(tensors, tile.b, first, low, high, run, c.keys // run, c.page)
        low, high = low - first, high - first
        if const_expr(c.page != 0 and not 0 < run < c.keys):
            page = paging.of_keys(tensors, tile.b, first, low, high, c.keys, c.page)
        if const_expr(sources is None):
            # Recomputed for each tile: beside O in 128 registers there is no room to keep them.
            sources = self.sources(tensors, tile._replace(kv_head=op.fresh(tile.kv_head)))
        for which in cutlass.range_constexpr(2):
            cache, dim, pitch = (
                (tensors.k, c.dim, c.pitch) if const_expr(which == 0) else (tensors.v, c.dim_v, c.pitch_v)
            )
            at, row_bytes = sources[which]
            first_row, first_chunk = self._chunk(dim, 0)
            to = stage + first_row * pitch + first_chunk * CHUNK + const_expr(which * c.keys * c.pitch)
            if const_expr(c.page == 0):
                at += row_bytes * first
            chunks = const_expr(self._chunks(dim))
            aligned = const_expr(32 % chunks == 0 or chunks % 32 == 0)
            step = const_expr(max(1, 32 // chunks))
            begin, has_page = at, Boolean(True)
            for i in cutlass.range_constexpr(-(-c.keys * chunks // 32)):
                row, chunk = self._chunk(dim, i)
                down = const_expr(i * step if chunks <= 32 else i // (chunks // 32))
                right = const_expr(0 if chunks <= 32 else i % (chunks // 32) * 32 * CHUNK)
                another = const_expr(i == 0 if run == c.keys else right == 0 and down % max(run, 1) == 0)
                if const_expr(c.page > 0 and run > 0 and another):
                    own = page
                    if const_expr(run < c.keys):
                        own = cute.arch.shuffle_sync(page, down // run)
                    begin = at + Int64(cache.stride[0]) * c.itemsize * own
                    start = const_expr(0 if run == c.keys else down)
                    begin += row_bytes * ((first + start) % c.page - start)
                    has_page = own >= 0
                target, source = to, begin
                if const_expr(aligned):
                    target += down * pitch + right
                    source += row_bytes * down + right
                else:
                    target += (row - first_row) * pitch + (chunk - first_chunk) * CHUNK
                    source += row_bytes * (row - first_row) + (chunk - first_chunk) * CHUNK
                inside = cutlass.Uint32(row - low) < cutlass.Uint32(high - low)
                if const_expr(c.page > 0 and run > 0):
                    inside = inside & has_page
                elif const_expr(c.page > 0):
                    own = cute.arch.shuffle_sync(page, row)
                    source += Int64(cache.stride[0]) * c.itemsize * own + row_bytes * ((first + row) % c.page - row)
                    inside = inside & (own >= 0)
                nbytes = cutlass.select_(inside, Int32(CHUNK), Int32(0))
                if const_expr((i + 1) * 32 <= c.keys * chunks):
                    op.copy_16_async(target, source, nbytes)
                elif i * 32 + cute.arch.lane_idx() < c.keys * chunks:
                    op.copy_16_async(target, source, nbytes)


class MmaMainloop:
    """A warp's tiles of a work tile: every ``warps``-th."""

    def __init__(self, config: MmaConfig):
        self.c, self.loader, self.elements = config, MmaLoader(config), elements(config)

    @cute.jit
    def run(self, tensors: Tensors, loads: None, scalars: Scalars, keys: Visible, tile: WorkTile, shared: Int32):
        """This warp's tiles, and its result into shared memory."""
        c = self.c
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        count = cutlass.max(tile.stop - tile.first - warp + (c.warps - 1), 0) // c.warps
        ring = c.shared.ring.at(shared) + warp * (c.stages * c.stage_bytes)
        t = tile.first + warp
        sources = self.loader.sources(tensors, tile) if const_expr(c.shared.query.nbytes == 0) else None
        for s in cutlass.range_constexpr(c.stages - 1):
            if s < count:
                self.loader.load(tensors, keys, tile, sources, t, ring + s * c.stage_bytes)
            cute.arch.cp_async_commit_group()
            t += c.warps

        n_tiles = const_expr(c.heads // 8)
        rQ = self.elements.query(tensors, tile, shared)  # (2, D / 16, heads / 8) pairs
        factors = self.elements.factors(tensors, scalars, tile, rQ)
        rO = cute.make_rmem_tensor(cute.make_layout((4, c.dim_v // 16, n_tiles)), Float32)
        rMax = cute.make_rmem_tensor(cute.make_layout((2, n_tiles)), Float32)
        rSum = cute.make_rmem_tensor(cute.make_layout((2, n_tiles)), Float32)
        rO.fill(0.0)
        rMax.fill(-_INF)
        rSum.fill(0.0)

        # Lane l addresses row l % 8 of the 8 x 8 tile l // 8; K's tiles go down the keys first, V's along its columns.
        k_lane = ((lane & 7) + ((lane >> 3) & 1) * 8) * c.pitch + (lane >> 4) * 16
        v_lane = ((lane & 7) + (lane >> 4) * 8) * c.pitch_v + ((lane >> 3) & 1) * 16 + c.keys * c.pitch
        read, write = Int32(0), Int32((c.stages - 1) * c.stage_bytes)
        for i in cutlass.range(count, unroll=1):
            cute.arch.cp_async_wait_group(c.stages - 2)
            cute.arch.sync_warp()
            if i + (c.stages - 1) < count:
                self.loader.load(tensors, keys, tile, sources, t, ring + write)
            cute.arch.cp_async_commit_group()
            first, low, high = tile_bounds(keys, t - (c.stages - 1) * c.warps, c.keys)
            rS = self._scores(scalars, factors, rQ, ring + read + k_lane, first, low, high)
            rV = self._load_values(ring + read + v_lane, 0)
            rP = self._softmax(rS, rO, rMax, rSum)
            self._add_values(rP, rO, rV, ring + read + v_lane)
            t += c.warps
            read += c.stage_bytes
            read = cutlass.select_(read == c.stages * c.stage_bytes, Int32(0), read)
            write += c.stage_bytes
            write = cutlass.select_(write == c.stages * c.stage_bytes, Int32(0), write)
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        self._store_result(tensors, tile, shared, rO, rMax, rSum)
        cute.arch.barrier()

    @cute.jit
    def _scores(
        self, scalars: Scalars, factors: list[list[Float32]], rQ: cute.Tensor, sK: Int32, first: Int32, low: Int32,
        high: Int32,
    ):  # fmt: skip
        """K Q' of a tile in powers of two, -inf where a key does not count.

        In two or four sums: shorter chains of products, and of the tensor cores' roundings, which are coarser than
        those of an addition and show in the LSE of 512 columns.
        """
        c = self.c
        n_tiles, m_tiles = const_expr(c.heads // 8), const_expr(c.keys // 16)
        chains = const_expr(2 if c.dim <= 256 else 4)
        rS = cute.make_rmem_tensor(cute.make_layout((4, m_tiles, n_tiles)), Float32)
        rSum = cute.make_rmem_tensor(cute.make_layout((4, chains, m_tiles, n_tiles)), Float32)
        rSum.fill(0.0)
        count = const_expr(c.dim // 16 // self.elements.blocks)
        for k0 in cutlass.range_constexpr(0, count, c.prefetch):
            steps = const_expr(range(k0, min(k0 + c.prefetch, count)))
            rK = [[op.ldmatrix_x4(sK + m * 16 * c.pitch + k * 32) for m in range(m_tiles)] for k in steps]
            for k in cutlass.range_constexpr(steps.start, steps.stop):
                for m in cutlass.range_constexpr(m_tiles):
                    for i, rBlock in enumerate(self.elements.keys(rK[k - k0][m])):
                        self._multiply_block(rBlock, rQ, rSum, k * self.elements.blocks + i, m)
        for n in cutlass.range_constexpr(n_tiles):
            for m in cutlass.range_constexpr(m_tiles):
                for i in cutlass.range_constexpr(4):
                    both = rSum[i, 0, m, n] + rSum[i, 1, m, n]
                    if const_expr(chains == 4):
                        both += rSum[i, 2, m, n] + rSum[i, 3, m, n]
                    rS[i, m, n] = both * factors[n][i % 2]
        if const_expr(self.elements.capped is None):
            if scalars.cap > 0:
                self._cap(scalars, rS)
        elif const_expr(self.elements.capped):
            self._cap(scalars, rS)
        row = first + cute.arch.lane_idx() // 4
        if (low > first) | (high < first + c.keys):
            for m in cutlass.range_constexpr(m_tiles):
                for half in cutlass.range_constexpr(2):
                    key = row + m * 16 + half * 8
                    inside = (key >= low) & (key < high)
                    for n in cutlass.range_constexpr(n_tiles):
                        for x in cutlass.range_constexpr(2):
                            old = rS[half * 2 + x, m, n]
                            rS[half * 2 + x, m, n] = cutlass.select_(inside, old, Float32(-_INF))
        return rS

    def _cap(self, scalars: Scalars, rS: cute.Tensor) -> None:
        for x in range(cute.size(rS)):
            rS[x] = scalars.cap * tanh(rS[x])

    def _multiply_block(self, rBlock: Fragment, rQ: cute.Tensor, rSum: cute.Tensor, k: int, m: int) -> None:
        """Add the products of columns ``16 k`` to ``16 k + 15`` to one of the sums."""
        j = k % rSum.shape[1]
        for n in range(self.c.heads // 8):
            old = tuple(rSum[i, j, m, n] for i in range(4))
            new = op.mma_m16n8k16(self.elements.dtype, rBlock, (rQ[0, k, n], rQ[1, k, n]), old)
            for i in range(4):
                rSum[i, j, m, n] = new[i]

    @cute.jit
    def _softmax(self, rS: cute.Tensor, rO: cute.Tensor, rMax: cute.Tensor, rSum: cute.Tensor):
        """P of a tile as a B operand; rescales O and the sums to the new maxima."""
        c = self.c
        n_tiles, m_tiles = const_expr(c.heads // 8), const_expr(c.keys // 16)
        rNew = cute.make_rmem_tensor(cute.make_layout((2, n_tiles)), Float32)
        grown = Boolean(False)
        for n in cutlass.range_constexpr(n_tiles):
            for x in cutlass.range_constexpr(2):
                row_max = rMax[x, n]
                for m in cutlass.range_constexpr(m_tiles):
                    row_max = cute.arch.fmax(row_max, cute.arch.fmax(rS[x, m, n], rS[2 + x, m, n]))
                for step in cutlass.range_constexpr(2, 5):
                    row_max = cute.arch.fmax(row_max, cute.arch.shuffle_sync_bfly(row_max, 1 << step))
                rNew[x, n] = row_max
                grown = grown | (row_max > rMax[x, n])
        if cute.arch.vote_any_sync(grown):
            for n in cutlass.range_constexpr(n_tiles):
                for x in cutlass.range_constexpr(2):
                    weight = exp2(rMax[x, n] - finite(rNew[x, n]))
                    rMax[x, n] = rNew[x, n]
                    rSum[x, n] = rSum[x, n] * weight
                    for d in cutlass.range_constexpr(c.dim_v // 16):
                        rO[x, d, n] = rO[x, d, n] * weight
                        rO[2 + x, d, n] = rO[2 + x, d, n] * weight
        rP = cute.make_rmem_tensor(cute.make_layout((2, m_tiles, n_tiles)), Int32)
        for n in cutlass.range_constexpr(n_tiles):
            low, high = finite(rMax[0, n]), finite(rMax[1, n])
            for m in cutlass.range_constexpr(m_tiles):
                for half in cutlass.range_constexpr(2):
                    p0 = exp2(rS[half * 2, m, n] - low)
                    p1 = exp2(rS[half * 2 + 1, m, n] - high)
                    rSum[0, n] = rSum[0, n] + p0
                    rSum[1, n] = rSum[1, n] + p1
                    rP[half, m, n] = op.transpose_8x8(self.elements.pair(p0, p1))
        return rP

    def _load_values(self, sV: Int32, first: int) -> list[list[tuple[Int32, ...]]]:
        """V' of up to ``prefetch`` steps along its columns, from step ``first`` on."""
        c = self.c
        m_tiles = c.keys // 16
        steps = range(first, min(first + c.prefetch, c.dim_v // 16 // self.elements.blocks))
        return [
            [op.ldmatrix_x4(sV + m * 16 * c.pitch_v + d * 32, transposed=True) for m in range(m_tiles)] for d in steps
        ]

    @cute.jit
    def _add_values(self, rP: cute.Tensor, rO: cute.Tensor, rV: list[list[tuple[Int32, ...]]], sV: Int32):
        """O' += V' P'; the first values are in registers."""
        c = self.c
        per, count = const_expr(c.prefetch), const_expr(c.dim_v // 16 // self.elements.blocks)
        for d0 in cutlass.range_constexpr(0, count, per):
            rSome = rV if const_expr(d0 == 0) else self._load_values(sV, d0)
            for d in cutlass.range_constexpr(d0, min(d0 + per, count)):
                for m in cutlass.range_constexpr(c.keys // 16):
                    for i, rBlock in enumerate(self.elements.values(rSome[d - d0][m])):
                        self._add_block(rBlock, rP, rO, d * self.elements.blocks + i, m)

    def _add_block(self, rBlock: Fragment, rP: cute.Tensor, rO: cute.Tensor, d: int, m: int) -> None:
        """Add the products of 16 keys and columns to O'."""
        for n in range(self.c.heads // 8):
            old = tuple(rO[i, d, n] for i in range(4))
            new = op.mma_m16n8k16(self.elements.dtype, rBlock, (rP[0, m, n], rP[1, m, n]), old)
            for i in range(4):
                rO[i, d, n] = new[i]

    @cute.jit
    def _store_result(
        self, tensors: Tensors, tile: WorkTile, shared: Int32, rO: cute.Tensor, rMax: cute.Tensor, rSum: cute.Tensor
    ):
        c = self.c
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        sO, sStat = result_tensors(c.shared.results, shared)
        weight = self.elements.weight(tensors, tile)
        for n in cutlass.range_constexpr(c.heads // 8):
            for x in cutlass.range_constexpr(2):
                row_sum = rSum[x, n]
                for step in cutlass.range_constexpr(2, 5):
                    row_sum += cute.arch.shuffle_sync_bfly(row_sum, 1 << step)
                if const_expr(weight is not None):  # of a sequence without keys a scale may be nan
                    by = cutlass.select_(row_sum == 0.0, Float32(1.0), weight)
                    for d in cutlass.range_constexpr(c.dim_v // 16):
                        rO[x, d, n], rO[2 + x, d, n] = rO[x, d, n] * by, rO[2 + x, d, n] * by
                head = n * 8 + (lane & 3) * 2 + x
                if head < tile.heads:
                    if lane < 4:
                        sStat[warp, head, 0] = rMax[x, n]
                        sStat[warp, head, 1] = row_sum
                    for d in cutlass.range_constexpr(c.dim_v // 16):
                        sO[warp, head, self.elements.column(d, 0)] = rO[x, d, n]
                        sO[warp, head, self.elements.column(d, 1)] = rO[2 + x, d, n]
