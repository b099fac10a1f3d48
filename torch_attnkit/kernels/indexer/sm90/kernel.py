"""Indexer scores on Hopper, many tokens: keys stay in registers, queries stream past them.

    producer warp    Q of a token or two per stage by TMA, with head weights and q scales, in a ring
    2 to 4 consumer  64 or 128 keys each as the register operand of wgmma: products with all heads, relu, weighted sum
    warpgroups
    3 warps          -inf for tokens that see none of the keys, of the opposite block: balances causal lengths

Ring full: 1 arrival and the bytes of Q; empty: every consumer warp. The epilogue of a product runs under the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from torch_attnkit.cuda import copies, fake
from torch_attnkit.cuda.ring import Fixed, Ring, rings

from ..arguments import Tensors
from . import head_reduce
from .load_keys import QUAD, load, prefetch
from .plan import MOST_TOKENS, Config

_LANES = 32


@dataclass
class SharedMemory(Fixed):
    """The ring of queries, and the block's tokens that see some of its keys."""

    ring: Ring
    sQ: cute.Tensor  # (columns, D, tokens of all stages)
    sB: cute.Tensor  # the same as (columns of a product, D, stages)
    weights: head_reduce.Weights  # of all tokens of all stages
    sToken: cute.Tensor  # (MOST_TOKENS)
    sLength: cute.Tensor  # (MOST_TOKENS)
    sCount: cute.Tensor  # (2): how many these are, the longest of them


class Scores(Fixed):
    def __init__(self, config: Config):
        self.c = config
        self.dtype = fake.dtype(config.dtype)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (T, H, D), as products take it
        mK: cute.Tensor,  # (R, S, elements of a key), or in pages
        mWeight: cute.Tensor,  # (T, H)
        mLength: cute.Tensor,  # (T,)
        mIds: cute.Tensor | None,  # (T,)
        mTable: cute.Tensor | None,  # (R, M)
        mQScale: cute.Tensor | None,  # (T, H, 1)
        mKScale: cute.Tensor | None,  # (R, S, 1), of MXFP4 (R, S, D/32)
        mScores: cute.Tensor,  # (T, S), contiguous
        cut: tuple,  # tokens of a block, and blocks that the machine works on at a time
        stream: cuda.CUstream,
    ):
        c = self.c
        requests = Int32(mK.shape[0] if const_expr(mTable is None) else mTable.shape[0])
        each = Int32(mQ.shape[0])  # tokens of a request
        if const_expr(mIds is None):
            each = each // requests
        # The same memory as TMA fills it and as products read it.
        layout = self.layout(c.columns, c.stages * c.tokens_per_mma)
        product = self.layout(c.columns * c.tokens_per_mma, c.stages)
        q = cute.recast_ptr(mQ.iterator, dtype=self.dtype)  # E4M3 comes as bytes
        by_token = cute.make_tensor(q, cute.select(mQ.layout, mode=[1, 2, 0]))
        atom, rows = copies.tma_atom(by_token, layout)
        tensors = (mK, mWeight, mLength, mIds, mTable, mQScale, mKScale, mScores)
        self.kernel(atom, rows, (layout, product), tensors, (requests, each, *cut)).launch(
            grid=(
                (Int32(mScores.shape[1]) + (c.keys - 1)) // c.keys,
                (each + cut[0] - 1) // cut[0],
                requests,
            ),
            block=(c.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
        )

    def layout(self, rows: int, stages: int) -> cute.ComposedLayout:
        atom = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, self.c.dim)
        shape = (rows, self.c.dim, stages)
        return cute.tile_to_shape(warpgroup.make_smem_layout_atom(atom, self.dtype), shape, order=(0, 1, 2))

    @cute.kernel
    def kernel(
        self,
        atom: cute.CopyAtom,
        rows: cute.Tensor,
        layouts: tuple,
        tensors: tuple,
        sizes: tuple,
    ):
        c = self.c
        t = Tensors(*tensors)
        requests, each, tokens, ahead = sizes
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile, part, request = cute.arch.block_idx()
        tiles, parts, _ = cute.arch.grid_dim()
        start = tile * c.keys
        shared = self.shared(*layouts, warp)
        if warp == 0:
            self.sort_tokens(t, shared, request, requests, self.span(t, request, part, tokens, each), start)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        count = shared.sCount[0]
        if warp >= c.consumers * 4:
            cute.arch.setmaxregister_decrease(c.registers[1])
            if warp == c.consumers * 4:
                self.produce(t, shared, atom, rows, count)
            else:  # of the block opposite: where tokens see keys up to themselves, it is empty if this one is full
                span = self.span(t, request, parts - 1 - part, tokens, each)
                self.clear(t, request, requests, span, (tiles - 1 - tile) * c.keys)
        else:
            cute.arch.setmaxregister_increase(c.registers[0])
            if count > 0:
                thread = cute.arch.thread_idx()[0]
                if thread < c.keys:
                    prefetch(c, t, request, start + ahead * c.keys + thread, shared.sCount[1])
                self.consume(t, shared, request, start, count)

    @cute.jit
    def shared(self, layout: cute.ComposedLayout, product: cute.ComposedLayout, warp: Int32):
        c = self.c
        memory = cutlass.memory.SmemAllocator()
        ring = rings(memory, warp, (("q", c.stages, 1, c.consumers * 4),))["q"]
        vector = lambda kind, *shape: memory.allocate_tensor(kind, cute.make_layout(shape), byte_alignment=16)
        sQ = memory.allocate_tensor(self.dtype, layout.outer, 1024, swizzle=layout.inner)
        return SharedMemory(
            ring=ring,
            sQ=sQ,
            sB=cute.make_tensor(sQ.iterator, product.outer),
            weights=head_reduce.shared_weights(c, memory, c.stages * c.tokens_per_mma),
            sToken=vector(Int32, MOST_TOKENS),
            sLength=vector(Int32, MOST_TOKENS),
            sCount=vector(Int32, 2),
        )

    @cute.jit
    def span(self, t: Tensors, request: Int32, part: Int32, tokens: Int32, each: Int32):
        """(first, past-the-end) token of a block."""
        first = part * tokens
        last = cutlass.min(first + tokens, each)
        if const_expr(t.mIds is None):
            first, last = first + request * each, last + request * each
        return first, last

    @cute.jit
    def seen(self, t: Tensors, request: Int32, requests: Int32, token: Int32, last: Int32):
        """(visible entries of a token, whether it is the request's)."""
        held = cutlass.min(token, last - 1)
        owner = request if const_expr(t.mIds is None) else Int32(t.mIds[held])
        in_request = (token < last) & (cutlass.max(cutlass.min(owner, requests - 1), Int32(0)) == request)
        return cutlass.max(cutlass.min(Int32(t.mLength[held]), Int32(t.mScores.shape[1])), Int32(0)), in_request

    @cute.jit
    def sort_tokens(self, t: Tensors, shared: SharedMemory, request: Int32, requests: Int32, span: tuple, start: Int32):
        """One warp: compact the request's tokens that see keys of this block."""
        lane = cute.arch.lane_idx()
        below = (Int32(1) << lane) - 1
        first, last = span
        some, longest = Int32(0), Int32(0)
        rounds = const_expr(MOST_TOKENS // _LANES)
        rLength, rInRequest = cute.make_rmem_tensor(rounds, Int32), cute.make_rmem_tensor(rounds, Boolean)
        for i in cutlass.range_constexpr(rounds):  # all on their way before the first is looked at
            rLength[i], rInRequest[i] = self.seen(t, request, requests, first + i * _LANES + lane, last)
        for i in cutlass.range_constexpr(rounds):
            sees = rInRequest[i] & (rLength[i] > start)
            votes = cute.arch.vote_ballot_sync(sees)
            if sees:
                position = some + Int32(cute.arch.popc(votes & below))
                shared.sToken[position], shared.sLength[position] = first + i * _LANES + lane, rLength[i]
                longest = cutlass.max(longest, rLength[i])
            some += Int32(cute.arch.popc(votes))
        longest = cute.arch.warp_redux_sync(longest, "max")
        if lane == 0:
            shared.sCount[0], shared.sCount[1] = some, longest

    @cute.jit
    def clear(self, t: Tensors, request: Int32, requests: Int32, span: tuple, start: Int32):
        """Three warps: -inf for tokens that see none of a block's keys from ``start`` on."""
        c = self.c
        lane = cute.arch.lane_idx()
        thread = cute.arch.thread_idx()[0] - (c.consumers * 128 + _LANES)
        stop = cutlass.min(start + c.keys, Int32(t.mScores.shape[1]))
        first, last = span
        for base in cutlass.range(first, last, _LANES, unroll=1):
            length, in_request = self.seen(t, request, requests, base + lane, last)
            blind = cute.arch.vote_ballot_sync(in_request & (length <= start))
            while blind != 0:
                token = base + Int32(cute.arch.popc(~blind & (blind - 1)))
                blind = blind & (blind - 1)
                for entry in cutlass.range(start + thread, stop, 3 * _LANES, unroll=4):
                    t.mScores[token, entry] = -Float32.inf

    @cute.jit
    def produce(self, t: Tensors, shared: SharedMemory, atom: cute.CopyAtom, rows: cute.Tensor, count: Int32):
        """One warp: Q and weights, weights a token ahead."""
        c = self.c
        ring = shared.ring
        tQs, tQg = copies.tma_partition(
            atom, 0, 1, shared.sQ, cute.local_tile(rows, (c.columns, c.dim), (0, 0, None))
        )  # (box, tokens of all stages), (box, tokens)
        local_weights = [head_reduce.of_lane(c) for _ in range(c.tokens_per_mma)]
        if count > 0:
            for i in cutlass.range_constexpr(c.tokens_per_mma):
                head_reduce.fetch(c, t, self.token(shared, i, count), local_weights[i])
        for n in cutlass.range(self.products(count), unroll=1):
            slot = ring.slot(n) * c.tokens_per_mma
            full = ring.await_empty(n)
            for i in cutlass.range_constexpr(c.tokens_per_mma):
                head_reduce.share(c, local_weights[i], shared.weights, slot + i)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, c.tokens_per_mma * c.columns * c.dim * c.itemsize)
            for i in cutlass.range_constexpr(c.tokens_per_mma):
                token = self.token(shared, n * c.tokens_per_mma + i, count)
                cute.copy(atom, tQg[None, token], tQs[None, slot + i], tma_bar_ptr=full)
            for i in cutlass.range_constexpr(c.tokens_per_mma):
                head_reduce.fetch(c, t, self.token(shared, (n + 1) * c.tokens_per_mma + i, count), local_weights[i])

    def products(self, count: Int32) -> Int32:
        """Number of MMAs for ``count`` tokens."""
        return (count + (self.c.tokens_per_mma - 1)) // self.c.tokens_per_mma

    def token(self, shared: SharedMemory, n: Int32, count: Int32) -> Int32:
        """The n-th visible token; past the end the last."""
        return shared.sToken[cutlass.min(n, count - 1)]

    @cute.jit
    def consume(self, t: Tensors, shared: SharedMemory, request: Int32, start: Int32, count: Int32):
        """One warpgroup: scores of 64 or 128 keys for every visible token."""
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        tile = (64, c.tokens_per_mma * c.columns)
        mma = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), tile,
            warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        thr_mma = mma.get_slice(thread % 128)
        tB = thr_mma.make_fragment_B(thr_mma.partition_B(shared.sB))
        row = thread // 32 % 4 * 16 + cute.arch.lane_idx() // QUAD + start + thread // 128 * (c.tiles * 64)
        keys = load(c, t, mma, request, row, shared.sCount[1])
        accs = [cute.make_rmem_tensor(mma.partition_shape_C(tile), Float32) for _ in keys]
        scale = self.of_lane([s for k in keys for s in k.scales])
        found = cute.make_rmem_tensor(2 * c.tiles * c.tokens_per_mma, Float32)  # sums of this lane
        values = cute.make_rmem_tensor(max(1, c.tiles * c.tokens_per_mma // 2), Float32)  # scores that this lane stores
        found.fill(0)
        values.fill(0)
        for n in cutlass.range(self.products(count), unroll=1):
            shared.ring.wait(n)
            slot = shared.ring.slot(n)
            for i in cutlass.range_constexpr(c.tiles):
                head_reduce.multiply(mma, keys[i].rA, tB[None, None, None, slot], accs[i])
            # While these MMAs run, sums of the last iteration become scores. The branch keeps this in place: without
            # them ptxas waits for both products before it sums the first up.
            if n > 0:
                self.reduce_over_quad(found, values, scale)
            weights = [None] * c.tokens_per_mma
            for i in cutlass.range_constexpr(c.tiles):
                for j in cutlass.range_constexpr(c.tokens_per_mma):
                    if const_expr(i == 0):
                        weights[j] = head_reduce.of_columns(c, shared.weights, slot * c.tokens_per_mma + j)
                    if const_expr(j == 0):
                        if const_expr(i == c.tiles - 1):
                            self.store(t, shared, row, n - 1, count, values)
                        warpgroup.wait_group(c.tiles - 1 - i)
                    if const_expr(i == c.tiles - 1 and j == c.tokens_per_mma - 1):  # all weights are read, too
                        shared.ring.release(n)
                    for r, value in enumerate(head_reduce.sums(c, accs[i], weights[j], token=j)):
                        found[2 * (j * c.tiles + i) + r] = value
        self.reduce_over_quad(found, values, scale)
        self.store(t, shared, row, self.products(count) - 1, count, values)

    def reduce_over_quad(self, found: cute.Tensor, values: cute.Tensor, scale: Float32) -> None:
        """Reduce sums over the quad, to the scores that this lane stores."""
        each = cute.size(found) // cute.size(values)
        for j in range(cute.size(values)):
            values[j] = head_reduce.over_quad([found[each * j + i] for i in range(each)]) * scale

    @cute.jit
    def store(self, t: Tensors, shared: SharedMemory, row: Int32, n: Int32, count: Int32, values: cute.Tensor):
        """Store scores of MMA ``n``; none for -1. ``row``: the first of a lane's quad."""
        c = self.c
        lane = cute.arch.lane_idx() % QUAD
        row += (lane % 2) * 8 + (lane // 2 * 64 if const_expr(c.tiles == 2) else 0)
        second = lane // 2 if const_expr(c.tiles < c.tokens_per_mma) else Int32(0)
        stores = (row < t.mScores.shape[1]) & (lane < 2 * c.tiles * c.tokens_per_mma // cute.size(values)) & (n >= 0)
        for j in cutlass.range_constexpr(cute.size(values)):
            at = n * c.tokens_per_mma + j + second
            if stores & (at < count):
                token, length = shared.sToken[at], shared.sLength[at]
                t.mScores[token, row] = cutlass.select_(row < length, values[j], -Float32.inf)

    def of_lane(self, values: list[Float32]) -> Float32:
        """The value of the row that this lane stores."""
        lane = cute.arch.lane_idx()
        for step in (1, 2)[: len(values) // 2]:
            upper = (lane & step) != 0
            values = [cutlass.select_(upper, b, a) for a, b in zip(values[::2], values[1::2], strict=True)]
        return values[0]


def trace(arch: str, config: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    c = Config(*config)
    T, requests = fake.dim32(), fake.dim32()
    four = c.stored == "mxfp4"
    # Not every torch hands E4M3 over.
    stored, product = ("u8" if name in ("mxfp4", "f8e4m3") else name for name in (c.stored, c.dtype))
    k_scale = None
    if four or c.k_scale:
        k_scale = fake.tensor("u8" if four else "f32", (fake.dim32(), fake.dim32(), None), align=1 if four else 4)
    steps = (fake.dim(16 // c.itemsize), fake.dim(16 // c.itemsize), 1)
    arguments = [
        fake.tensor(product, (T, c.heads, c.dim), steps),
        fake.tensor(stored, (fake.dim32(), fake.dim32(), None), align=c.load),
        fake.tensor(c.weights, (T, c.heads), align=fake.dtype(c.weights).width // 8),
        fake.tensor("i32", (T,), (None,), align=4),
        fake.tensor("i32", (T,), (None,), align=4) if c.ids else None,
        fake.tensor("i32", (requests, fake.dim32()), align=4) if c.paged else None,
        fake.tensor("f32", (T, c.heads, 1), align=4) if c.q_scale else None,
        k_scale,
        fake.tensor("f32", (T, fake.dim32()), align=4),
        (Int32(0), Int32(0)),
        fake.stream(),
    ]
    return Scores(c), arguments
