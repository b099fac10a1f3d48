"""Indexer scores on Blackwell: keys stay in shared memory, queries stream past them.

    1 warp         Q of a token or two by TMA, with head weights and q scales, in a ring
    1 warp         tcgen05.mma: 128 keys by all heads of these tokens, to tensor memory
    2 warpgroups   load 128 keys each, then relu and weighted sum over heads; a thread has a key: no sum crosses lanes
    2 warps        -inf for tokens that see none of the block's keys

A block has 256 keys of a request and some of its tokens. Keys are A of ``tcgen05.mma``. The epilogue of one product
overlaps the next. MXFP4 is multiplied as it is, with both block scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, tcgen05

from torch_attnkit.cuda import copies, fake
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed, Ring, rings
from torch_attnkit.cuda.sm100 import block_scaled, products, tmem

from ..arguments import Tensors
from . import load_keys, tokens
from .plan import KEYS, MOST_TOKENS, ROWS, TILES, Config
from .tokens import Tokens

_LANES = 32


@dataclass
class SharedMemory(Fixed):
    """Rings and shared memory; ``*_at`` are addresses."""

    queries: Ring
    sums: Ring  # a stage is a buffer of all tiles: each tile has barriers of its own
    keys: cute.Pointer  # mbarrier: keys have arrived
    base: cute.Pointer  # tcgen05.alloc writes the first column here
    tokens: Tokens
    sQ: cute.Tensor  # (columns, elements, boxes of all stages): of a stage the first boxes of all tokens, then the next
    keys_at: Int32  # of a tile the first boxes of all rows, then the next
    key_scales_at: Int32  # of MXFP4: a tile each
    query_scales_at: Int32  # a tile a stage
    weights_at: Int32  # of all stages: float32 a column
    factors_at: Int32  # scales of q, likewise

    def column(self) -> Int32:
        """First column of tensor memory of this block."""
        return cute.make_tensor(cute.recast_ptr(self.base, dtype=Int32), cute.make_layout(1))[0]

    def of_tile(self, tile: Any, buffers: int) -> Ring:
        """Ring of a tile's accumulators."""
        return Ring(self.sums.full + tile * buffers, self.sums.empty + tile * buffers, buffers)


class Scores(Fixed):
    def __init__(self, config: Config, dtype: Any):
        self.c, self.dtype = config, dtype  # as q and k are handed over
        self.format = block_scaled.FORMATS["mxfp4"]

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (T, H, elements of a head)
        mK: cute.Tensor,  # (R, S, elements of a key), or in pages
        mWeight: cute.Tensor,  # (T, H)
        mLength: cute.Tensor,  # (T,)
        mIds: cute.Tensor | None,  # (T,)
        mTable: cute.Tensor | None,  # (R, M)
        mQScale: cute.Tensor | None,  # (T, H, 1), of MXFP4 (T, H, D/32)
        mKScale: cute.Tensor | None,  # (R, S, 1), of MXFP4 (R, S, D/32)
        mScores: cute.Tensor,  # (T, S), contiguous
        cut: Int32,  # tokens of a block
        stream: cuda.CUstream,
    ):
        c = self.c
        requests = Int32(mK.shape[0] if const_expr(mTable is None) else mTable.shape[0])
        each = Int32(mQ.shape[0])  # tokens of a request
        if const_expr(mIds is None):
            each = each // requests
        by_token = cute.make_tensor(mQ.iterator, cute.select(mQ.layout, mode=[1, 2, 0]))
        box = self._box()
        tile = cute.make_composed_layout(self._swizzle(), 0, box)
        atom, rows = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), by_token, tile, box.shape)
        tensors = (mK, mWeight, mLength, mIds, mTable, mQScale, mKScale, mScores)
        self.kernel(atom, rows, tensors, (requests, each, cut)).launch(
            grid=((Int32(mScores.shape[1]) + (KEYS - 1)) // KEYS, (each + cut - 1) // cut, requests),
            block=(c.threads, 1, 1), stream=stream, min_blocks_per_mp=c.blocks, preferred_smem_carveout=100,
        )  # fmt: skip

    def _swizzle(self) -> cute.Swizzle:
        return cute.make_swizzle(3 if self.c.box_bytes == 128 else 2, 4, 3)

    def _box(self) -> cute.Layout:
        """TMA box of a token: (columns, elements)."""
        elements = self._box_elements()
        return cute.make_layout((self.c.columns, elements), stride=(elements, 1))

    def _box_elements(self) -> int:
        """Elements of a box."""
        return self.c.box_bytes * 8 // self.dtype.width

    @cute.kernel
    def kernel(self, atom: cute.CopyAtom, rows: cute.Tensor, tensors: tuple, sizes: tuple):
        c, t = self.c, Tensors(*tensors)
        requests, each, cut = sizes
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile, part, request = cute.arch.block_idx()
        first = part * cut  # of this block's tokens
        last = cutlass.min(first + cut, each)
        if const_expr(t.mIds is None):
            first, last = first + request * each, last + request * each
        start = tile * KEYS
        shared = self._shared(warp)
        if warp == 0:
            entries = Int32(t.mScores.shape[1])
            tokens.sort(shared.tokens, t.mLength, t.mIds, entries, requests, request, first, last, start)
        cute.arch.mbarrier_init_fence()
        tmem.before_sync()
        cute.arch.barrier()
        tmem.after_sync()
        count = shared.tokens.sCount[0]
        iterations = (count + (c.tokens_per_mma - 1)) // c.tokens_per_mma
        if warp < c.consumer_warps:
            if count > 0:
                self._consume(t, shared, request, start, count, iterations, warp)
        elif warp == c.consumer_warps:
            self._produce(t, shared, atom, rows, iterations)
        elif warp == c.consumer_warps + 1:
            if count > 0:
                self._multiply(shared, iterations)
        else:
            self._clear(t, shared, start)
        tmem.before_sync()
        cute.arch.barrier()
        tmem.after_sync()
        if warp == c.consumer_warps + 1:
            cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.dealloc_tmem(tmem.pointer(Float32, shared.column()), c.tensor_columns)

    @cute.jit
    def _shared(self, warp: Int32):
        c, memory = self.c, cutlass.memory.SmemAllocator()
        readers = c.consumer_warps + 1
        made = rings(memory, warp, (("queries", c.stages, 1, readers), ("sums", c.buffers * TILES, 1, 4)))
        loaded, base = memory.allocate_array(cutlass.Int64, 1), memory.allocate(4, 4)
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(loaded, c.consumer_warps)
        if warp == c.consumer_warps + 1:
            cute.arch.alloc_tmem(c.tensor_columns, cute.recast_ptr(base, dtype=Int32))
        found = tokens.allocate(memory)
        box = self._box()
        elements = cute.size(box)
        layout = cute.append(box, cute.make_layout(c.stages * c.tokens_per_mma * c.boxes, stride=elements))
        sQ = memory.allocate_tensor(self.dtype, layout, 1024, swizzle=self._swizzle())
        reserve = lambda nbytes, align: memory.allocate(nbytes, align).toint()
        factor_bytes = c.stages * c.wide * 4
        return SharedMemory(
            **made,
            keys=loaded,
            base=base,
            tokens=found,
            sQ=sQ,
            keys_at=reserve(KEYS * c.row_bytes, 1024),
            key_scales_at=reserve(TILES * block_scaled.TILE_BYTES if c.four else 16, 128),
            query_scales_at=reserve(c.stages * block_scaled.TILE_BYTES if c.four else 16, 128),
            weights_at=reserve(factor_bytes, 16),
            factors_at=reserve(factor_bytes if c.q_scale else 16, 16),
        )

    @cute.jit
    def _clear(self, t: Tensors, shared: SharedMemory, start: Int32):
        """Two warps: -inf for the tokens that see none of the block's keys."""
        thread = cute.arch.thread_idx()[0] - (self.c.consumer_warps + 2) * _LANES
        stop = cutlass.min(start + KEYS, Int32(t.mScores.shape[1]))
        for i in cutlass.range(shared.tokens.sCount[1], unroll=1):
            token = shared.tokens.sToken[MOST_TOKENS - 1 - i]
            for entry in cutlass.range(start + thread, stop, 2 * _LANES, unroll=4):
                t.mScores[token, entry] = -Float32.inf

    @cute.jit
    def _produce(self, t: Tensors, shared: SharedMemory, atom: cute.CopyAtom, rows: cute.Tensor, iterations: Int32):
        """One warp: Q, weights and q scales of each MMA; the next one's weights are loaded meanwhile."""
        c, ring = self.c, shared.queries
        gQ = cute.local_tile(rows, (c.columns, self._box_elements()), (0, None, None))
        tQs, tQg = copies.tma_partition(atom, 0, 1, shared.sQ, gQ)  # (box, boxes of all stages), (box, boxes, tokens)
        registers = self._registers()
        if iterations > 0:
            self._fetch(t, shared, Int32(0), registers)
        for n in cutlass.range(iterations, unroll=1):
            slot, full = ring.slot(n), ring.await_empty(n)
            self._share(shared, slot, registers)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, c.stage_bytes)
            for i in cutlass.range_constexpr(c.tokens_per_mma):
                token = shared.tokens.at(n * c.tokens_per_mma + i)
                for box in cutlass.range_constexpr(c.boxes):
                    to = (slot * c.boxes + box) * c.tokens_per_mma + i
                    cute.copy(atom, tQg[None, box, token], tQs[None, to], tma_bar_ptr=full)
            self._fetch(t, shared, n + 1, registers)

    def _registers(self) -> list[cute.Tensor]:
        """Weights, and scales as floats or words, of the heads that a lane loads: every 32nd of each token."""
        count = -(-self.c.columns // _LANES) * self.c.tokens_per_mma
        return [cute.make_rmem_tensor(count, Float32 if i < 2 else Int32) for i in range(3)]

    @cute.jit
    def _fetch(self, t: Tensors, shared: SharedMemory, n: Int32, registers: list[cute.Tensor]):
        """Load weights and q scales of MMA ``n``."""
        c, each = self.c, const_expr(-(-self.c.columns // _LANES))
        for i in cutlass.range_constexpr(c.tokens_per_mma):
            token = shared.tokens.at(n * c.tokens_per_mma + i)
            for j in cutlass.range_constexpr(each):
                head, at = cute.arch.lane_idx() + j * _LANES, const_expr(i * each + j)
                registers[0][at], registers[1][at], registers[2][at] = Float32(0), Float32(0), Int32(0)
                if head < c.heads:
                    registers[0][at] = t.mWeight[token, head].to(Float32)
                    if const_expr(c.q_scale):
                        registers[1][at] = Float32(t.mQScale[token, head, 0])
                    if const_expr(c.four):
                        word = Int32(0)
                        for b in cutlass.range_constexpr(c.dim // 32):
                            word = word | (Int32(t.mQScale[token, head, b]) << (8 * b))
                        registers[2][at] = word

    @cute.jit
    def _share(self, shared: SharedMemory, slot: Int32, registers: list[cute.Tensor]):
        """Store them to a stage of the ring."""
        c, each = self.c, const_expr(-(-self.c.columns // _LANES))
        for i in cutlass.range_constexpr(c.tokens_per_mma):
            for j in cutlass.range_constexpr(each):
                head, at = cute.arch.lane_idx() + j * _LANES, const_expr(i * each + j)
                if head < c.columns:
                    column = head + i * c.columns
                    offset = (slot * c.wide + column) * 4
                    load_keys.store_word(shared.weights_at + offset, registers[0][at].bitcast(Int32))
                    if const_expr(c.q_scale):
                        load_keys.store_word(shared.factors_at + offset, registers[1][at].bitcast(Int32))
                    if const_expr(c.four):
                        tile = shared.query_scales_at + slot * block_scaled.TILE_BYTES
                        load_keys.store_word(tile + block_scaled.word_of_row(column), registers[2][at])
        if const_expr(c.four):
            cute.arch.fence_view_async_shared()

    @cute.jit
    def _multiply(self, shared: SharedMemory, iterations: Int32):
        """One warp: all MMAs."""
        c, base = self.c, shared.column()
        cute.arch.mbarrier_wait(shared.keys, 0)
        tmem.after_sync()
        scales = base + c.first_scales
        if const_expr(c.four):
            with cute.arch.elect_one():
                for tile in cutlass.range_constexpr(TILES):
                    _copy_scales(scales + tile * block_scaled.TILE_COLUMNS, shared.key_scales_at, tile)
        for n in cutlass.range(iterations, unroll=1):
            slot = shared.queries.slot(n)
            shared.queries.wait(n)
            tmem.after_sync()
            query_scales = scales + (TILES + slot) * block_scaled.TILE_COLUMNS
            if const_expr(c.four):
                with cute.arch.elect_one():
                    _copy_scales(query_scales, shared.query_scales_at, slot)
            for tile in cutlass.range_constexpr(TILES):
                ring = shared.of_tile(tile, c.buffers)
                ring.await_empty(n)
                tmem.after_sync()
                sums = base + (tile * c.buffers + ring.slot(n)) * c.wide
                with cute.arch.elect_one():
                    self._product(shared, tile, slot, sums, scales, query_scales)
                    tcgen05.commit(ring.full + ring.slot(n))
            with cute.arch.elect_one():
                tcgen05.commit(shared.queries.empty + slot)

    @cute.jit
    def _product(
        self,
        shared: SharedMemory,
        tile: cutlass.Constexpr,
        slot: Int32,
        sums: Int32,
        scales: Int32,
        query_scales: Int32,
    ):
        """One thread: MMA of a key tile with a stage's queries."""
        c = self.c
        steps = const_expr(c.box_bytes // products.STEP_BYTES)
        for box in cutlass.range_constexpr(c.boxes):
            rows_at = shared.keys_at + tile * (ROWS * c.row_bytes) + box * (ROWS * c.box_bytes)
            heads_at = shared.sQ.iterator.toint() + (slot * c.boxes + box) * (c.wide * c.box_bytes)
            rows, heads = (products.descriptor(at, c.box_bytes) for at in (rows_at, heads_at))
            for step in cutlass.range_constexpr(steps):
                a_desc, b_desc = (d + products.NEXT_STEP * step for d in (rows, heads))
                more = const_expr(box + step > 0)
                if const_expr(c.four):
                    block_scaled.multiply(
                        self.format, self.format.instruction(c.wide, step), sums, a_desc, b_desc,
                        scales + tile * block_scaled.TILE_COLUMNS, query_scales, Int32(more),
                    )  # fmt: skip
                else:
                    products.multiply(c.stored, c.wide, sums, a_desc, b_desc, more)

    @cute.jit
    def _consume(
        self,
        t: Tensors,
        shared: SharedMemory,
        request: Int32,
        start: Int32,
        count: Int32,
        iterations: Int32,
        warp: Int32,
    ):
        """Two warpgroups: load the keys, then reduce; a thread has a key."""
        c, thread = self.c, op.thread_index()
        longest, row = shared.tokens.sCount[2], start + thread
        load_keys.load(c, t, request, start, longest, shared.keys_at)
        cute.arch.cp_async_commit_group()
        scale = load_keys.load_scale(c, t, request, row, longest, shared.key_scales_at)
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.keys)
        ring = shared.of_tile(warp // 4, c.buffers)
        first = tmem.lanes(shared.column() + warp // 4 * (c.buffers * c.wide), warp)
        stores = row < Int32(t.mScores.shape[1])
        sign = cutlass.select_(scale < 0, Float32(-1), Float32(1))
        scale = scale * sign
        signed = cute.arch.vote_any_sync(sign < 0)
        for n in cutlass.range(iterations, unroll=1):
            slot = shared.queries.slot(n)
            shared.queries.wait(n)
            ring.wait(n)
            tmem.after_sync()
            for i in cutlass.range_constexpr(c.tokens_per_mma):
                at = n * c.tokens_per_mma + i
                if at < count:
                    column = first + ring.slot(n) * c.wide + i * c.columns
                    value = self._sum(shared, column, (slot * c.wide + i * c.columns) * 4, sign, signed) * scale
                    if stores:
                        token, length = shared.tokens.sToken[at], shared.tokens.sLength[at]
                        t.mScores[token, row] = cutlass.select_(row < length, value, -Float32.inf)
            tmem.before_sync()
            cute.arch.sync_warp()
            ring.release(n)
            shared.queries.release(n)

    @cute.jit
    def _sum(self, shared: SharedMemory, column: Int32, offset: Int32, sign: Float32, signed: cutlass.Boolean):
        """Weighted sum of relu over a token's heads for this thread's key; ``sign``: that of the key's scale, which
        goes inside relu, if a scale in the warp is not 1."""
        c = self.c
        parts = [(Float32(0), Float32(0)) for _ in range(2)]
        for head in cutlass.range_constexpr(0, c.columns, c.columns_per_load):
            width = const_expr(min(c.columns_per_load, c.columns - head))
            loaded = tmem.load(column + head, width)
            weights = self._floats(shared.weights_at + offset + head * 4, width)
            rX = cute.make_rmem_tensor(width, Float32)
            tmem.await_loads()
            for j in cutlass.range_constexpr(width):
                rX[j] = loaded[j]
            if const_expr(c.q_scale):
                factors = self._floats(shared.factors_at + offset + head * 4, width)
                for j in cutlass.range_constexpr(0, width, 2):
                    rX[j], rX[j + 1] = _times((rX[j], rX[j + 1]), (factors[j], factors[j + 1]))
            if const_expr(c.k_scale):
                if signed:
                    for j in cutlass.range_constexpr(0, width, 2):
                        rX[j], rX[j + 1] = _times((rX[j], rX[j + 1]), (sign, sign))
            for j in cutlass.range_constexpr(0, min(width, c.heads - head), 2):
                # Columns without a head are left out: they may be NaN.
                pair = [op.max_or_nan(rX[j + x], Float32(0)) if head + j + x < c.heads else Float32(0) for x in (0, 1)]
                two = (weights[j], weights[j + 1])
                parts[j // 2 % 2] = cute.arch.fma_packed_f32x2(tuple(pair), two, parts[j // 2 % 2])
        a, b = parts
        return (a[0] + b[0]) + (a[1] + b[1])

    def _floats(self, at: Int32, count: int) -> cute.Tensor:
        """Contiguous floats of shared memory, broadcast."""
        pointer = cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=16)
        found = cute.make_rmem_tensor(count, Float32)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(count)), found)
        return found


def _times(a: tuple[Float32, Float32], b: tuple[Float32, Float32]) -> tuple[Float32, Float32]:
    """Packed multiplication."""
    return cute.arch.mul_packed_f32x2(a, b)


def _copy_scales(column: Int32, tiles: Int32, number: Any) -> None:
    """One thread: copy a tile of MXFP4 scales to tensor memory."""
    block_scaled.copy_scales(column, block_scaled.scales_descriptor(tiles + number * block_scaled.TILE_BYTES))


def trace(arch: str, config: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    c = Config(*config)
    T, requests = fake.dim32(), fake.dim32()
    stored = "u8" if c.four or c.stored == "f8e4m3" else c.stored  # not every torch hands E4M3 over
    width = fake.dtype(stored).width // 8
    steps = (fake.dim(16 // width), fake.dim(16 // width), 1)
    scale = ("u8", 1) if c.four else ("f32", 4)
    scaled = lambda *sizes: fake.tensor(scale[0], (*sizes, None), align=scale[1])
    arguments = [
        fake.tensor(stored, (T, c.heads, c.row_bytes // width), steps),
        fake.tensor(stored, (fake.dim32(), fake.dim32(), None), align=max(c.load, width)),
        fake.tensor(c.weights, (T, c.heads), align=fake.dtype(c.weights).width // 8),
        fake.tensor("i32", (T,), (None,), align=4),
        fake.tensor("i32", (T,), (None,), align=4) if c.ids else None,
        fake.tensor("i32", (requests, fake.dim32()), align=4) if c.paged else None,
        scaled(T, c.heads) if c.q_scale or c.four else None,
        scaled(fake.dim32(), fake.dim32()) if c.k_scale or c.four else None,
        fake.tensor("f32", (T, fake.dim32()), align=4),
        Int32(0),
        fake.stream(),
    ]
    return Scores(c, fake.dtype(stored)), arguments
