"""Attention of one query token per sequence on Hopper: every key and value read once, at the speed of memory.

    each warp, for itself: cp.async ring of K and V tiles -> S' = K Q' -> online softmax -> O' += V' P'
    block: merge its warps -> a whole group: store; a part: workspace, where parts merge (``decode_merge.py``)

The query heads of a KV head are the N of ``mma.m16n8k16`` and keys (then V's columns) its M: eight heads fill a
product, so grouped heads cost no more than one, and a warp's accumulators stay small. More heads, and few of them over
caches so long that only bandwidth counts, are for ``decode_wide.py``. The probabilities, 8 x 8 tiles with a row per
key, become the second product's right side by a transpose in registers. Warps share nothing while they stream, so no
barrier ever empties the queue of loads. Rows in shared memory are 16 bytes longer than in the cache: eight rows of a
tile then lie in different banks.

Measured on an H200 (bf16, K and V past the L2, CUDA graph, us; the best of cuDNN, FA2 and FA3 beside it in the same
run): 32/8 heads, D 128, 1x1024 8.2 (cuDNN 7.5), 1x8192 15.6 (15.3); D 64, 1x8192 13.1 (10.8); 16/2 heads, D 256,
1x8192 16.0 (16.8), 16x8192 74.1 (FA3 72.5), 128x8192 509 (FA3 484); 64/8 heads, D 64, window 128 and a sink, S 8192,
B 1, 16, 128: 4.4, 5.5, 14.6 (FA3 10.2, 11.3, 52.4). Of 128x8192, 32/8 heads, D 128, which took 986 then, the loads
alone took 963: cp.async and bulk copies are equal there, copies of single rows are 5 % slower, and one stage more or
less in flight changes nothing. A tile keeps a warp busy for 1900 of the 3340 cycles that it has; the stalls are
shuffles and shared memory. Small items drawn from a counter, to even out SMs of unequal speed, cost more in merges than
they gain (1x131072: 180 us for 134). The lengths' way to the first load takes 1.2 us.

Letters: ``s`` shared memory addresses, ``r`` registers; a *group* is a KV head of a sequence with up to ``heads``
query heads, a *tile* ``keys`` keys of it; ``decode_schedule.py`` says which tiles a block has.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from . import warp_ops as op
from .decode_merge import Merging
from .decode_schedule import Lengths, find, place, share, visible
from .decode_types import COMBINERS, Numbers, Piece, Scalars, Tensors
from .partials import finite
from .warp_ops import exp2, tanh

_INF = float("inf")


class Decode(Merging):
    """One kernel for both kinds of cache; see the top of this file."""

    @cute.jit
    def __call__(self, tensors: Tensors, numbers: Numbers, blocks: Int32, stream: Any):
        n = numbers
        paged = const_expr(self.c.page > 0)
        size = Int32(tensors.table.shape[1]) * self.c.page if paged else Int32(tensors.k.shape[2])
        batch, kv_heads = Int32(tensors.q.shape[0]), Int32(tensors.k.shape[2 if paged else 1])
        group = Int32(tensors.q.shape[1]) // kv_heads
        lengths = Lengths(
            tensors.kv_len, tensors.kv_start, batch, size, n.window, n.sink_tokens, n.has_start, n.by_group
        )
        scalars = Scalars(n.scale, n.cap, n.has_sink, group, n.chunks, n.beside, n.least)
        self.kernel(tensors, self.loads(tensors), lengths, scalars).launch(
            grid=[blocks, 1, 1], block=[self.c.threads, 1, 1], smem=self.c.shared_bytes, stream=stream,
            min_blocks_per_mp=self.c.blocks_per_sm, preferred_smem_carveout=100,
        )  # fmt: skip
        if const_expr(self.c.combine):
            self.combine(tensors, lengths, scalars, blocks).launch(
                grid=[n.combiners, 1, 1], block=[COMBINERS, 1, 1], stream=stream, use_pdl=True,
                min_blocks_per_mp=1, preferred_smem_carveout=100,
            )  # fmt: skip

    def loads(self, tensors: Tensors) -> Any:
        """What the host makes for a kernel that loads by TMA; this one does not."""
        return None

    @cute.kernel
    def kernel(self, tensors: Tensors, loads: Any, lengths: Lengths, scalars: Scalars):
        smem = cutlass.memory.SmemAllocator()
        shared = smem.allocate(self.c.shared_bytes, 1024).toint()
        self._run(tensors, loads, lengths, scalars, shared)

    def _run(self, tensors: Tensors, loads: Any, lengths: Lengths, scalars: Scalars, shared: Int32) -> None:
        self._attend(tensors, loads, lengths, scalars, shared, None)

    @cute.jit
    def _attend(
        self, tensors: Tensors, loads: Any, lengths: Lengths, scalars: Scalars, shared: Int32, role: cutlass.Constexpr
    ):
        """All pieces of this block. Where warpgroups have roles, each goes through them for itself."""
        c = self.c
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        kv_heads = Int32(tensors.k.shape[2 if c.page else 1])
        beside = self._beside(scalars)
        groups = kv_heads * (scalars.chunks // beside)
        cut = share(lengths, groups, blocks // beside, scalars.least, c.keys)
        mine = block // beside
        at, stop = cut.start(mine), cut.start(mine + 1)
        if mine >= cut.blocks:
            at = stop
        sequence, before = find(lengths, groups, at, c.keys)
        if const_expr(c.combine):
            cute.arch.griddepcontrol_launch_dependents()  # its blocks then wait where this kernel's have left
        slot = block * 2  # of a block's first piece; of those after it only the last can be a part
        while at < stop:
            keys = visible(lengths, sequence, c.keys)
            group = (at - before) // keys.units
            group_start = before + group * keys.units
            first = at - group_start
            last = cutlass.min(keys.units, first + stop - at)
            at += last - first
            whole = last - first == keys.units
            last = cutlass.select_(whole, keys.tiles, last)
            each = scalars.chunks // beside
            kv_head, chunk = group // each, group % each * beside + block % beside
            head = chunk * c.heads
            heads = cutlass.min(scalars.group - head, c.heads)
            piece = Piece(sequence, kv_head, kv_head * scalars.group + head, heads, first, last)
            self._stream(tensors, loads, scalars, keys, piece, shared, role)
            self._finish(tensors, scalars, piece, shared, whole, slot)
            if const_expr(self.c.combine):
                pass
            elif not whole:
                self._meet(tensors, scalars, cut, piece, shared, group_start, keys.tiles)
            slot = block * 2 + 1
            if at == before + keys.units * groups:
                before = at
                sequence += 1

    @cute.jit
    def _stream(
        self, tensors: Tensors, loads: Any, scalars: Scalars, keys: Any, piece: Piece, shared: Int32,
        role: cutlass.Constexpr,
    ):  # fmt: skip
        """This warp's tiles of a piece, and its result into shared memory."""
        c = self.c
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        count = cutlass.max(piece.stop - piece.first - warp + (c.warps - 1), 0) // c.warps
        ring = shared + warp * (c.stages * c.stage_bytes)
        t = piece.first + warp
        sources = self._sources(tensors, piece) if const_expr(c.query_bytes == 0) else None
        for s in cutlass.range_constexpr(c.stages - 1):
            if s < count:
                self._load(tensors, keys, piece, sources, t, ring + s * c.stage_bytes)
            cute.arch.cp_async_commit_group()
            t += c.warps

        n_tiles = const_expr(c.heads // 8)
        rQ = self._query(tensors, piece, shared)  # (2, D / 16, heads / 8) pairs
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
                self._load(tensors, keys, piece, sources, t, ring + write)
            cute.arch.cp_async_commit_group()
            first, low, high = place(keys, t - (c.stages - 1) * c.warps, c.keys)
            rS = self._scores(scalars, rQ, ring + read + k_lane, first, low, high)
            rV = self._some_values(ring + read + v_lane, 0)
            rP = self._softmax(rS, rO, rMax, rSum)
            self._values(rP, rO, rV, ring + read + v_lane)
            t += c.warps
            read += c.stage_bytes
            read = cutlass.select_(read == c.stages * c.stage_bytes, Int32(0), read)
            write += c.stage_bytes
            write = cutlass.select_(write == c.stages * c.stage_bytes, Int32(0), write)
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        self._put(piece, shared, rO, rMax, rSum)
        cute.arch.barrier()

    @cute.jit
    def _sources(self, tensors: Tensors, piece: Piece):
        """Where this lane's 16 bytes of a row of K and of V are in the cache, and the bytes from row to row."""
        c = self.c
        found = []
        for which in cutlass.range_constexpr(2):
            cache, dim = (tensors.k, c.dim) if const_expr(which == 0) else (tensors.v, c.dim_v)
            head, row = const_expr((2, 1) if c.page else (1, 2))
            row_bytes = Int64(cache.stride[row]) * 2
            at = cache.iterator.toint() + Int64(cache.stride[head]) * piece.kv_head * 2
            if const_expr(c.page == 0):
                at += Int64(cache.stride[0]) * piece.b * 2
            first_row, chunk = self._chunk(dim, 0)
            found.append((at + row_bytes * first_row + chunk * 16, row_bytes))
        return found

    def _chunk(self, dim: int, i: int) -> tuple[Any, Any]:
        """The row and the 16-byte chunk of it that this lane copies i-th. Where lanes make up whole rows, or rows
        whole warps, both are a lane's constant plus a number known at compile time."""
        chunks, lane = dim // 8, cute.arch.lane_idx()
        if 32 % chunks == 0:
            return lane // chunks + i * (32 // chunks), lane % chunks
        if chunks % 32 == 0:
            return Int32(i // (chunks // 32)), lane + i % (chunks // 32) * 32
        return (i * 32 + lane) // chunks, (i * 32 + lane) % chunks

    @cute.jit
    def _load(self, tensors: Tensors, keys: Any, piece: Piece, sources: Any, t: Int32, stage: Int32):
        """Start the copy of tile t; rows that do not count become zeros, whatever the cache holds there."""
        c = self.c
        first, low, high = place(keys, t, c.keys)
        low, high = low - first, high - first
        page = Int32(0)
        if const_expr(c.page != 0):
            page = self._pages(tensors, piece, first, low, high)
        if const_expr(sources is None):
            # Made anew for each tile: beside O in 128 registers there is no room to keep them.
            sources = self._sources(tensors, piece._replace(kv_head=op.fresh(piece.kv_head)))
        one_page = const_expr(c.page > 0 and c.page % c.keys == 0)
        any_page = const_expr(c.page > 0 and not one_page)
        for which in cutlass.range_constexpr(2):
            cache, dim, pitch = (
                (tensors.k, c.dim, c.pitch) if const_expr(which == 0) else (tensors.v, c.dim_v, c.pitch_v)
            )
            row_bytes = sources[which][1]
            first_row, first_chunk = self._chunk(dim, 0)
            to = stage + first_row * pitch + first_chunk * 16 + const_expr(which * c.keys * c.pitch)
            at = sources[which][0]
            if const_expr(c.page == 0):
                at += row_bytes * first
            elif const_expr(one_page):
                at += Int64(cache.stride[0]) * 2 * page + row_bytes * (first % c.page)
            chunks = const_expr(dim // 8)
            aligned = const_expr(32 % chunks == 0 or chunks % 32 == 0)
            step = const_expr(max(1, 32 // chunks))
            for i in cutlass.range_constexpr(-(-c.keys * chunks // 32)):
                row, chunk = self._chunk(dim, i)
                target, source = to, at
                if const_expr(aligned):
                    down, right = (
                        const_expr(i * step if chunks <= 32 else i // (chunks // 32)),
                        const_expr(0 if chunks <= 32 else i % (chunks // 32) * 512),
                    )
                    target += down * pitch + right
                    source += row_bytes * down + right
                else:
                    target += (row - first_row) * pitch + (chunk - first_chunk) * 16
                    source += row_bytes * (row - first_row) + (chunk - first_chunk) * 16
                good = cutlass.Uint32(row - low) < cutlass.Uint32(high - low)
                if const_expr(any_page):
                    mine = cute.arch.shuffle_sync(page, row)
                    source += Int64(cache.stride[0]) * 2 * mine + row_bytes * ((first + row) % c.page - row)
                    good = good & (mine >= 0)
                elif const_expr(one_page):
                    good = good & (page >= 0)
                valid = cutlass.select_(good, Int32(16), Int32(0))
                if const_expr((i + 1) * 32 <= c.keys * chunks):
                    op.copy_16_async(target, source, valid)
                elif i * 32 + cute.arch.lane_idx() < c.keys * chunks:
                    op.copy_16_async(target, source, valid)

    @cute.jit
    def _pages(self, tensors: Tensors, piece: Piece, first: Int32, low: Int32, high: Int32):
        """The page of this lane's key of the tile, or -1 where there is none to read."""
        c = self.c
        row = cute.arch.lane_idx() % c.keys
        logical = first // c.page if const_expr(c.page % c.keys == 0) else (first + row) // c.page
        page = Int32(-1)
        inside = (row >= low) & (row < high)
        if const_expr(c.page % c.keys == 0):
            inside = (low < c.keys) & (high > 0)
        if inside & (logical < Int32(tensors.table.shape[1])):
            page = op.load_pair(
                tensors.table.iterator.toint() + (Int64(tensors.table.stride[0]) * piece.b + logical) * 4
            )
        known = (page >= 0) & (page < Int32(tensors.k.shape[0]))
        return cutlass.select_(known, page, Int32(-1))

    @cute.jit
    def _query(self, tensors: Tensors, piece: Piece, shared: Int32):
        """Q as the right side of a product; the heads that pad a group repeat its last."""
        c = self.c
        lane = cute.arch.lane_idx()
        if const_expr(c.query_bytes == 0):
            rQ = cute.make_rmem_tensor(cute.make_layout((2, c.dim // 16, c.heads // 8)), Int32)
        else:
            at = shared + c.query_offset + cute.arch.warp_idx() * (c.query_bytes // c.warps) + lane * 8
            rQ = cute.make_tensor(
                cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=8),
                cute.make_layout((2, c.dim // 16, c.heads // 8), stride=(1, 64, 4 * c.dim)),
            )
        for n in cutlass.range_constexpr(c.heads // 8):
            head = piece.head + cutlass.min(n * 8 + lane // 4, piece.heads - 1)
            row = tensors.q.iterator.toint() + Int64(tensors.q.stride[0]) * piece.b * 2
            row += Int64(tensors.q.stride[1]) * head * 2 + (lane & 3) * 4
            for k in cutlass.range_constexpr(c.dim // 16):
                rQ[0, k, n] = op.load_pair(row + k * 32)
                rQ[1, k, n] = op.load_pair(row + k * 32 + 16)
        return rQ

    @cute.jit
    def _scores(self, scalars: Scalars, rQ: Any, sK: Int32, first: Int32, low: Int32, high: Int32):
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
        for k0 in cutlass.range_constexpr(0, c.dim // 16, c.at_once):
            steps = const_expr(range(k0, min(k0 + c.at_once, c.dim // 16)))
            rK = [[op.ldmatrix_x4(sK + m * 16 * c.pitch + k * 32) for m in range(m_tiles)] for k in steps]
            for k in cutlass.range_constexpr(steps.start, steps.stop):
                j = const_expr(k % chains)
                for m in cutlass.range_constexpr(m_tiles):
                    for n in cutlass.range_constexpr(n_tiles):
                        new = op.mma_m16n8k16(
                            c.dtype,
                            rK[k - k0][m],
                            (rQ[0, k, n], rQ[1, k, n]),
                            tuple(rSum[i, j, m, n] for i in range(4)),
                        )
                        for i in cutlass.range_constexpr(4):
                            rSum[i, j, m, n] = new[i]
        for n in cutlass.range_constexpr(n_tiles):
            for m in cutlass.range_constexpr(m_tiles):
                for i in cutlass.range_constexpr(4):
                    both = rSum[i, 0, m, n] + rSum[i, 1, m, n]
                    if const_expr(chains == 4):
                        both += rSum[i, 2, m, n] + rSum[i, 3, m, n]
                    rS[i, m, n] = both * scalars.scale
        if scalars.cap > 0:
            for x in cutlass.range_constexpr(cute.size(rS)):
                rS[x] = scalars.cap * tanh(rS[x])
        row = first + cute.arch.lane_idx() // 4
        if (low > first) | (high < first + c.keys):
            for m in cutlass.range_constexpr(m_tiles):
                for half in cutlass.range_constexpr(2):
                    key = row + m * 16 + half * 8
                    good = (key >= low) & (key < high)
                    for n in cutlass.range_constexpr(n_tiles):
                        for x in cutlass.range_constexpr(2):
                            old = rS[half * 2 + x, m, n]
                            rS[half * 2 + x, m, n] = cutlass.select_(good, old, Float32(-_INF))
        return rS

    @cute.jit
    def _softmax(self, rS: Any, rO: Any, rMax: Any, rSum: Any):
        """Probabilities of a tile as the right side of a product; brings O and the sums to the new maxima."""
        c = self.c
        n_tiles, m_tiles = const_expr(c.heads // 8), const_expr(c.keys // 16)
        rNew = cute.make_rmem_tensor(cute.make_layout((2, n_tiles)), Float32)
        grown = Boolean(False)
        for n in cutlass.range_constexpr(n_tiles):
            for x in cutlass.range_constexpr(2):
                top = rMax[x, n]
                for m in cutlass.range_constexpr(m_tiles):
                    top = cute.arch.fmax(top, cute.arch.fmax(rS[x, m, n], rS[2 + x, m, n]))
                for step in cutlass.range_constexpr(2, 5):
                    top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1 << step))
                rNew[x, n] = top
                grown = grown | (top > rMax[x, n])
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
                    rP[half, m, n] = op.transpose_8x8(op.pack(c.dtype, p0, p1))
        return rP

    def _some_values(self, sV: Int32, first: int) -> list[list[Any]]:
        """V' of up to ``at_once`` column blocks, from column block ``first`` on."""
        c = self.c
        m_tiles = c.keys // 16
        blocks = range(first, min(first + c.at_once, c.dim_v // 16))
        return [
            [op.ldmatrix_x4(sV + m * 16 * c.pitch_v + d * 32, transposed=True) for m in range(m_tiles)] for d in blocks
        ]

    @cute.jit
    def _values(self, rP: Any, rO: Any, rV: Any, sV: Int32):
        """O' += V' P'; the first values are in registers."""
        c = self.c
        per = const_expr(c.at_once)
        for d0 in cutlass.range_constexpr(0, c.dim_v // 16, per):
            some = rV if const_expr(d0 == 0) else self._some_values(sV, d0)
            for d in cutlass.range_constexpr(d0, min(d0 + per, c.dim_v // 16)):
                for m in cutlass.range_constexpr(c.keys // 16):
                    for n in cutlass.range_constexpr(c.heads // 8):
                        new = op.mma_m16n8k16(
                            c.dtype, some[d - d0][m], (rP[0, m, n], rP[1, m, n]), tuple(rO[i, d, n] for i in range(4))
                        )
                        for i in cutlass.range_constexpr(4):
                            rO[i, d, n] = new[i]

    @cute.jit
    def _put(self, piece: Piece, shared: Int32, rO: Any, rMax: Any, rSum: Any):
        c = self.c
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        sO, sStat = self._results(shared)
        for n in cutlass.range_constexpr(c.heads // 8):
            for x in cutlass.range_constexpr(2):
                total = rSum[x, n]
                for step in cutlass.range_constexpr(2, 5):
                    total += cute.arch.shuffle_sync_bfly(total, 1 << step)
                head = n * 8 + (lane & 3) * 2 + x
                if head < piece.heads:
                    if lane < 4:
                        sStat[warp, head, 0] = rMax[x, n]
                        sStat[warp, head, 1] = total
                    for d in cutlass.range_constexpr(c.dim_v // 16):
                        sO[warp, head, d * 16 + lane // 4] = rO[x, d, n]
                        sO[warp, head, d * 16 + lane // 4 + 8] = rO[2 + x, d, n]
