"""Scores of cache entries for an indexer on Hopper: keys stay, tokens stream past them.

    1 warp         queries of a token by TMA, and the weights of its heads, in a ring
    2 warpgroups   128 keys each: products with all heads of a token, rectified, weighted and summed

A block takes 256 keys of a request and some of its tokens. Its keys are the first operand of ``wgmma`` and stay in
registers, so they may lie anywhere, in pages or not, and be decoded on the way; the heads of a token are the second.
A warpgroup has two products of 64 keys, and sums one up while the tensor cores work on the other, or on another
warpgroup's. Nothing but scores is written. Imports cutlass.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from torch_attnkit.cuda import copies, fake
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed, Ring, rings
from torch_attnkit.cuda.sm90 import softmax

from .keys import QUAD, Keys, Tensors, load, prefetch
from .plan import MOST_TOKENS, Config

_LANES = 32


@dataclass
class Shared(Fixed):
    """The ring of queries, and the block's tokens: those that see some of its keys from the front, the others from the
    back."""

    ring: Ring
    sQ: cute.Tensor  # (columns, D, stages)
    sWeight: cute.Tensor  # (columns, stages)
    sToken: cute.Tensor  # (MOST_TOKENS)
    sLength: cute.Tensor  # (MOST_TOKENS)
    sCount: cute.Tensor  # (3): tokens that see some keys, tokens that see none, the longest of the first


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
        layout = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(
                hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, c.dim), self.dtype
            ),
            (c.columns, c.dim, c.stages),
            order=(0, 1, 2),
        )
        by_token = cute.make_tensor(mQ.iterator, cute.select(mQ.layout, mode=[1, 2, 0]))
        atom, rows = copies.tma_atom(by_token, layout)
        tensors = (mK, mWeight, mLength, mIds, mTable, mQScale, mKScale, mScores)
        self.kernel(atom, rows, layout, tensors, (requests, each, *cut)).launch(
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

    @cute.kernel
    def kernel(
        self,
        atom: cute.CopyAtom,
        rows: cute.Tensor,
        layout: cute.ComposedLayout,
        tensors: tuple,
        sizes: tuple,
    ):
        c = self.c
        t = Tensors(*tensors)
        requests, each, tokens, ahead = sizes
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile, part, request = cute.arch.block_idx()
        first = part * tokens  # of this block's tokens
        last = cutlass.min(first + tokens, each)
        if const_expr(t.mIds is None):
            first, last = first + request * each, last + request * each
        start = tile * c.keys
        shared = self.shared(layout, warp)
        if warp == 0:
            self.sort_tokens(t, shared, request, requests, first, last, start)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        count = shared.sCount[0]
        if warp == c.consumers * 4:
            self.produce(t, shared, atom, rows, count)
        else:
            self.clear(t, shared, start)
            if count > 0:
                later = start + ahead * c.keys + cute.arch.thread_idx()[0]
                for i in cutlass.range_constexpr(0, c.keys, c.consumers * 128):
                    prefetch(c, t, request, later + i, shared.sCount[2])
                self.consume(t, shared, request, start, count)

    @cute.jit
    def shared(self, layout: cute.ComposedLayout, warp: Int32):
        c = self.c
        memory = cutlass.memory.SmemAllocator()
        ring = rings(memory, warp, (("q", c.stages, 1, c.consumers * 4),))["q"]
        vector = lambda kind, *shape: memory.allocate_tensor(kind, cute.make_layout(shape), byte_alignment=16)
        return Shared(
            ring=ring,
            sQ=memory.allocate_tensor(self.dtype, layout.outer, 1024, swizzle=layout.inner),
            sWeight=vector(Float32, c.columns, c.stages),
            sToken=vector(Int32, MOST_TOKENS),
            sLength=vector(Int32, MOST_TOKENS),
            sCount=vector(Int32, 3),
        )

    @cute.jit
    def sort_tokens(
        self, t: Tensors, shared: Shared, request: Int32, requests: Int32, first: Int32, last: Int32, start: Int32
    ):
        """One warp: which tokens of the request see keys of this block, and up to where."""
        lane = cute.arch.lane_idx()
        below = (Int32(1) << lane) - 1
        entries = Int32(t.mScores.shape[1])
        some, none, longest = Int32(0), Int32(0), Int32(0)
        for at in cutlass.range(first, last, _LANES, unroll=1):
            token = cutlass.min(at + lane, last - 1)
            mine = at + lane < last
            length = cutlass.max(cutlass.min(Int32(t.mLength[token]), entries), Int32(0))
            if const_expr(t.mIds is not None):
                owner = cutlass.max(cutlass.min(Int32(t.mIds[token]), requests - 1), Int32(0))
                mine = mine & (owner == request)
            sees = mine & (length > start)
            blind = mine & (length <= start)
            votes, others = cute.arch.vote_ballot_sync(sees), cute.arch.vote_ballot_sync(blind)
            if sees:
                place = some + Int32(cute.arch.popc(votes & below))
                shared.sToken[place], shared.sLength[place] = token, length
                longest = cutlass.max(longest, length)
            if blind:
                shared.sToken[MOST_TOKENS - 1 - none - Int32(cute.arch.popc(others & below))] = token
            some += Int32(cute.arch.popc(votes))
            none += Int32(cute.arch.popc(others))
        longest = cute.arch.warp_redux_sync(longest, "max")
        if lane == 0:
            shared.sCount[0], shared.sCount[1], shared.sCount[2] = some, none, longest

    @cute.jit
    def clear(self, t: Tensors, shared: Shared, start: Int32):
        """Consumers: -inf for the tokens that see none of the block's keys."""
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        end = cutlass.min(start + c.keys, Int32(t.mScores.shape[1]))
        for i in cutlass.range(shared.sCount[1], unroll=1):
            token = shared.sToken[MOST_TOKENS - 1 - i]
            for j in cutlass.range(start + thread, end, c.consumers * 128, unroll=1):
                t.mScores[token, j] = -Float32.inf

    @cute.jit
    def produce(self, t: Tensors, shared: Shared, atom: cute.CopyAtom, rows: cute.Tensor, count: Int32):
        """One warp: queries and weights of the tokens, the weights a token ahead."""
        c = self.c
        lane = cute.arch.lane_idx()
        ring = shared.ring
        tQs, tQg = copies.tma_partition(
            atom, 0, 1, shared.sQ, cute.local_tile(rows, (c.columns, c.dim), (0, 0, None))
        )  # (box, stages), (box, tokens)
        parts = const_expr((c.columns + _LANES - 1) // _LANES)
        rWeight = cute.make_rmem_tensor(parts, Float32)
        if count > 0:
            self.weigh(t, shared.sToken[0], rWeight)
        for n in cutlass.range(count, unroll=1):
            token, slot = shared.sToken[n], ring.slot(n)
            full = ring.await_empty(n)
            for i in cutlass.range_constexpr(parts):
                head = lane + i * _LANES
                if head < c.columns:
                    shared.sWeight[head, slot] = rWeight[i]
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, c.columns * c.dim * (self.dtype.width // 8))
            cute.copy(atom, tQg[None, token], tQs[None, slot], tma_bar_ptr=full)
            if n + 1 < count:
                self.weigh(t, shared.sToken[n + 1], rWeight)

    @cute.jit
    def weigh(self, t: Tensors, token: Int32, rWeight: cute.Tensor):
        """The weights of a lane's heads, times the size of the scale of q; q has its sign."""
        for i in cutlass.range_constexpr(cute.size(rWeight)):
            head = cute.arch.lane_idx() + i * _LANES
            rWeight[i] = Float32(0)
            if head < self.c.heads:
                weight = t.mWeight[token, head].to(Float32)
                if const_expr(self.c.q_scale):
                    weight = weight * cute.math.absf(Float32(t.mQScale[token, head, 0]))
                rWeight[i] = weight

    @cute.jit
    def consume(self, t: Tensors, shared: Shared, request: Int32, start: Int32, count: Int32):
        """One warpgroup: the scores of 128 keys for every token that sees some of the block's."""
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        mma = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (64, c.columns),
            warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        mine = mma.get_slice(thread % 128)
        tB = mine.make_fragment_B(mine.partition_B(shared.sQ))
        row = thread // 32 % 4 * 16 + cute.arch.lane_idx() // QUAD + start + thread // 128 * (c.tiles * 64)
        longest = shared.sCount[2]
        keys = [load(c, t, mma, request, row + i * 64, longest) for i in range(c.tiles)]
        for n in cutlass.range(count, unroll=1):
            shared.ring.wait(n)
            slot = shared.ring.slot(n)
            sums = [self.multiply(mma, keys[i].rA, tB[None, None, None, slot]) for i in range(c.tiles)]
            token, length = shared.sToken[n], shared.sLength[n]
            rWeight = self.of_columns(shared.sWeight, slot)
            for i in cutlass.range_constexpr(c.tiles):
                warpgroup.wait_group(c.tiles - 1 - i)
                if const_expr(i == c.tiles - 1):
                    shared.ring.release(n)
                self.store(t, keys[i], sums[i], rWeight, token, length)

    def multiply(self, mma: cute.TiledMma, rA: cute.Tensor, tB: cute.Tensor) -> cute.Tensor:
        """Issue the products of 64 keys with a token's heads as one group of ``wgmma``, without waiting for it."""
        acc = cute.make_rmem_tensor(mma.partition_shape_C((64, self.c.columns)), Float32)
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        for k in range(cute.size(rA, mode=[2])):
            cute.gemm(atom, acc, rA[None, None, k], tB[None, None, k], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        return acc

    @cute.jit
    def of_columns(self, sWeight: cute.Tensor, slot: Int32):
        """The weights of this lane's columns, two of every eight."""
        column = cute.arch.lane_idx() % QUAD * 2
        rWeight = cute.make_rmem_tensor(self.c.columns // 4, Float32)
        for i in cutlass.range_constexpr(self.c.columns // 4):
            rWeight[i] = sWeight[i // 2 * 8 + i % 2 + column, slot]
        return rWeight

    @cute.jit
    def store(self, t: Tensors, keys: Keys, acc: cute.Tensor, rWeight: cute.Tensor, token: Int32, length: Int32):
        """The sums over heads of one product, to the scores of a token."""
        lane = cute.arch.lane_idx()
        found = [s * keys.scales[r] for r, s in enumerate(self.sums(acc, rWeight))]
        # Of the four lanes with the sums of two rows, two store one each.
        second = lane % QUAD == 1
        row = cutlass.select_(second, keys.rows[1], keys.rows[0])
        value = cutlass.select_(second, found[1], found[0])
        if (lane % QUAD < 2) & (row < t.mScores.shape[1]):
            t.mScores[token, row] = cutlass.select_(row < length, value, -Float32.inf)

    def sums(self, acc: cute.Tensor, rWeight: cute.Tensor) -> list[Float32]:
        """Of this lane's two rows, in all lanes of the quad."""
        c, found = self.c, []
        for r in range(2):
            parts = [Float32(0), Float32(0)]
            for v, a in itertools.product(range(c.columns // 8), range(2)):
                x = op.max_or_nan(acc[a + 2 * r + 4 * v], Float32(0))
                if 8 * v + 8 > c.heads:  # a column without a head may be NaN
                    column = cute.arch.lane_idx() % QUAD * 2 + (8 * v + a)
                    x = cutlass.select_(column < c.heads, x, Float32(0))
                parts[a] = op.fma(x, rWeight[2 * v + a], parts[a])
            found.append(softmax.quad_sum(parts[0] + parts[1]))
        return found
