"""Top-k router: the K experts of a row of logits with the largest keys, ties to the lowest index, and their weights.

A warp has a row, a lane consecutive experts, so that among equal keys the lowest lane, and in it the first expert, is
the lowest index. ``_Resident`` keeps keys in registers: each lane sorts its keys once (a sorting network); in each of K
rounds a warp reduction finds the largest head, whose lane pops it; lane k keeps round k's key and writes its weight.
Keys of 16-bit logits carry their expert in the bits that float32 adds; with 32 bits lane k searches for its expert
among the keys of the lane that had it. ``_Stream``, for any E and K, reads the row again for each round.
"""

from __future__ import annotations

import operator
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies, fake
from torch_attnkit.cuda.warp_ops import LOG2_E, exp2

from . import score
from .plan import LANES, Config, sorting_network

_INDEX_BITS = 0x1FFF  # the bits of a float32 that no bf16 and no f16 has: they hold the expert


class _Largest:
    """What both kernels share: the launch, keys and weights."""

    def __init__(self, config: Config, scoring: str, bias: bool, over_all: bool, renormalize: bool):
        self.c = config
        self.softmax, self.bias = scoring == "softmax", bias
        self.over_all, self.renormalize = over_all, renormalize

    @cute.jit
    def __call__(
        self,
        mLogits: cute.Tensor,  # (R, E)
        mBias: cute.Tensor | None,  # (E,)
        mWeights: cute.Tensor,  # (R, K), contiguous
        mIndices: cute.Tensor,  # (R, K), contiguous
        scale: Float32,
        stream: cuda.CUstream,
    ):
        warps = self.c.warps
        blocks = (mLogits.shape[0] + (warps - 1)) // warps
        self.kernel(mLogits, mBias, mWeights, mIndices, scale).launch(
            grid=(blocks, 1, 1), block=(warps * LANES, 1, 1), stream=stream
        )

    def row(self, mLogits: Any) -> tuple[Any, Any, Any]:
        """(row of this warp, whether it is in range, pointer to it); past the end the pointer is the last row's."""
        block, _, _ = cute.arch.block_idx()
        row = Int64(block) * self.c.warps + cute.arch.warp_idx()
        at = cutlass.min(row, Int64(mLogits.shape[0]) - 1)
        return row, row < mLogits.shape[0], mLogits.iterator + at * mLogits.stride[0]

    def key(self, x: Any, bias: Any) -> Any:
        """What experts are compared by, as an integer."""
        if self.softmax:
            return score.ordered(x)
        s = score.sqrt_softplus(x)
        return score.ordered(s + bias) if self.bias else s.bitcast(Int32)

    def exponential(self, x: Any, top: Any) -> Any:
        return exp2((x - top) * LOG2_E)

    def base(self, largest: Any) -> Any:
        """What is subtracted of logits: the largest, or 0 where that would make NaN of -inf."""
        return cutlass.select_(largest == -Float32.inf, Float32(0), largest)


class _Resident(_Largest):
    """Every lane keeps its keys in registers."""

    def __init__(self, *arguments: Any, bits: int):
        super().__init__(*arguments)
        self.packed = self.softmax and bits == 16

    @cute.kernel
    def kernel(
        self,
        mLogits: cute.Tensor,
        mBias: cute.Tensor | None,
        mWeights: cute.Tensor,
        mIndices: cute.Tensor,
        scale: Float32,
    ):
        c = self.c
        lane = cute.arch.lane_idx()
        row, inside, logits = self.row(mLogits)
        first = lane * c.per_lane
        rX, rBias = self.vectors(mLogits.element_type), self.vectors(Float32)
        for v in cutlass.range_constexpr(c.per_lane // c.width):
            if const_expr(not c.even):
                rX[v].fill(0)
                rBias[v].fill(0)
            if c.even or first + v * c.width < c.experts:
                copies.load(logits + (first + v * c.width), rX[v])
                if const_expr(self.bias):
                    copies.load(mBias.iterator + (first + v * c.width), rBias[v])

        x = [rX[j // c.width][j % c.width].to(Float32) for j in range(c.per_lane)]
        keys = self.keys(x, rBias, first)
        lane_key, votes, top = self.rounds(keys, lane)
        expert = self.packed_expert(lane_key) if const_expr(self.packed) else self.expert(lane_key, votes, keys, lane)
        expert = cutlass.max(cutlass.min(expert, Int32(c.experts - 1)), Int32(0))  # whatever NaN makes of keys
        chosen = lane < c.topk
        weight = Float32(0)
        if const_expr(self.softmax):
            base = self.base(self.logit(top))
            weight = cutlass.select_(chosen, self.exponential(self.logit(lane_key), base), Float32(0))
            total = self.total(weight)
            if const_expr(self.over_all):
                total = Float32(0)
                for j in cutlass.range_constexpr(c.per_lane):
                    total += self.present(first + j, self.exponential(x[j], base), Float32(0))
                total = cute.arch.warp_reduction(total, operator.add)
            weight = weight * (1.0 / cutlass.select_(total == 0, Float32(1), total))
        elif const_expr(self.bias):
            if chosen:
                weight = score.sqrt_softplus(copies.scalar(logits + expert).to(Float32))
        else:
            weight = cutlass.select_(chosen, Int32(lane_key).bitcast(Float32), Float32(0))
        if const_expr(self.renormalize):
            total = self.total(weight) + score.TINY
        if inside and chosen:
            if const_expr(self.renormalize):
                weight = weight / total
            mWeights[row, lane] = weight * scale
            mIndices[row, lane] = expert

    def vectors(self, dtype: Any) -> list[Any]:
        return copies.fragments(self.c.per_lane // self.c.width, self.c.width, dtype)

    def keys(self, x: list[Any], rBias: list[Any], first: Any) -> list[Any]:
        """The keys of a lane's experts, ``NONE`` past the last expert."""
        c, keys = self.c, []
        for j in range(c.per_lane):
            key = self.key(x[j], rBias[j // c.width][j % c.width])
            if self.packed:
                key = (key & ~_INDEX_BITS) | (_INDEX_BITS - j - first)
            keys.append(self.present(first + j, key, Int32(score.NONE)))
        return keys

    def present(self, expert: Any, value: Any, otherwise: Any) -> Any:
        """``value`` for a valid expert."""
        return value if self.c.even else cutlass.select_(expert < self.c.experts, value, otherwise)

    def rounds(self, keys: list[Any], lane: Any) -> tuple[Any, Any, Any]:
        """Of lane k: the key of round k, and the lanes that had it. And the largest key of all, in every lane."""
        c, heads = self.c, list(keys)
        for a, b in sorting_network(c.per_lane, c.depth):
            heads[a], heads[b] = cutlass.max(heads[a], heads[b]), cutlass.min(heads[a], heads[b])
        heads = heads[: c.depth]
        lane_key, votes, top = Int32(score.NONE), Int32(0), heads[0]
        below = (Int32(1) << lane) - 1
        for k in range(c.topk):
            best = score.largest(heads[0])
            top = best if k == 0 else top
            won = heads[0] == best
            lane_key = cutlass.select_(lane == k, best, lane_key)
            if not self.packed:
                vote = cute.arch.vote_ballot_sync(won)
                votes = cutlass.select_(lane == k, vote, votes)
                won = won & ((vote & below) == 0)
            # A key of depth t can become a head in t rounds at the earliest.
            for t in range(min(c.depth, c.topk - k) - 1):
                heads[t] = cutlass.select_(won, heads[t + 1], heads[t])
            if c.topk - k > c.depth:
                heads[-1] = cutlass.select_(won, Int32(score.NONE), heads[-1])
        return lane_key, votes, top

    def logit(self, key: Any) -> Any:
        """The logit of a key, softmax's, exactly."""
        if not self.packed:
            return score.number(key)
        return Int32(score.number(key).bitcast(Int32) & ~_INDEX_BITS).bitcast(Float32)

    def packed_expert(self, key: Any) -> Any:
        return _INDEX_BITS - (key & _INDEX_BITS)

    @cute.jit
    def expert(self, lane_key: Any, votes: Any, keys: list[Any], lane: Any):
        """The expert of lane k's key: in the lowest of the lanes that had it, the first that has not been chosen."""
        c = self.c
        owner = score.trailing_zeros(votes) % LANES
        hits = Int32(0)
        for j in cutlass.range_constexpr(c.per_lane):
            hits |= cutlass.select_(cute.arch.shuffle_sync(keys[j], owner) == lane_key, Int32(1 << j), Int32(0))
        # A lane that had the same key several times gave it in rounds that follow one another.
        again = cute.arch.shuffle_sync_up(lane_key, 1) == lane_key
        again = again & (cute.arch.shuffle_sync_up(owner, 1) == owner) & (lane > 0)
        runs = cute.arch.vote_ballot_sync(again)
        before = cute.arch.clz(~(runs << (31 - lane)))
        for _ in cutlass.range(before, unroll=1):
            hits = hits & (hits - 1)
        return owner * c.per_lane + score.trailing_zeros(hits)

    def total(self, weight: Any) -> Any:
        """The sum over the lanes that have a weight."""
        return cute.arch.warp_reduction(weight, operator.add, threads_in_group=1 << (self.c.topk - 1).bit_length())


class _Stream(_Largest):
    """Any number of experts and rounds: each round is the largest (key, lowest index) after that of the last."""

    @cute.kernel
    def kernel(
        self,
        mLogits: cute.Tensor,
        mBias: cute.Tensor | None,
        mWeights: cute.Tensor,
        mIndices: cute.Tensor,
        scale: Float32,
    ):
        c = self.c
        lane = cute.arch.lane_idx()
        row, inside, logits = self.row(mLogits)
        last, last_expert = Int32(score.LAST), Int32(-1)
        base, total = Float32(0), Float32(0)
        for k in cutlass.range(c.topk):
            best, at = Int32(score.NONE), Int32(score.LAST)
            for e in cutlass.range(lane, c.experts, LANES):
                key = self.key_at(logits, mBias, e)
                after = (key < last) | ((key == last) & (e > last_expert))
                better = after & (key > best)
                best = cutlass.select_(better, key, best)
                at = cutlass.select_(better, e, at)
            last = score.largest(best)
            found = cutlass.select_(best == last, at, Int32(score.LAST))
            last_expert = cute.arch.warp_redux_sync(found, "min")
            expert = cutlass.min(last_expert, Int32(c.experts - 1))  # whatever NaN makes of keys
            x = copies.scalar(logits + expert).to(Float32)
            weight = Float32(0)
            if const_expr(self.softmax):
                base = cutlass.select_(k == 0, self.base(x), base)
                weight = self.exponential(x, base)
            else:
                weight = score.sqrt_softplus(x)
            if lane == k % LANES:
                total += weight
                if inside:
                    mWeights[row, k] = weight
                    mIndices[row, k] = expert

        total = cute.arch.warp_reduction(total, operator.add)
        # As the reference: the softmax first, and its sum over the chosen is what they may be divided by once more.
        factor = Float32(1)
        if const_expr(self.softmax):
            whole = total
            if const_expr(self.over_all):
                whole = Float32(0)
                for e in cutlass.range(lane, c.experts, LANES):
                    whole += self.exponential(copies.scalar(logits + e).to(Float32), base)
                whole = cute.arch.warp_reduction(whole, operator.add)
            factor = 1.0 / cutlass.select_(whole == 0, Float32(1), whole)
        if const_expr(self.renormalize):
            factor = factor / (total * factor + score.TINY)
        if inside:
            for k in cutlass.range(lane, c.topk, LANES):
                mWeights[row, k] = mWeights[row, k] * factor * scale

    def key_at(self, logits: Any, mBias: Any, e: Any) -> Any:
        bias = copies.scalar(mBias.iterator + e) if self.bias else None
        return self.key(copies.scalar(logits + e).to(Float32), bias)


def trace(
    arch: str, dtype: str, scoring: str, bias: bool, over_all: bool, renormalize: bool, config: tuple[int, ...]
) -> tuple[Any, list[Any]]:
    c, element = Config(*config), fake.dtype(dtype)
    settings = (c, scoring, bias, over_all, renormalize)
    kernel = _Resident(*settings, bits=element.width) if c.per_lane else _Stream(*settings)
    rows = fake.dim()
    arguments = [
        fake.tensor(dtype, (rows, c.experts), align=c.width * element.width // 8),
        fake.tensor("f32", (c.experts,), align=min(16, 4 * c.width)) if bias else None,
        fake.tensor("f32", (rows, c.topk), (c.topk, 1), align=4),
        fake.tensor("i32", (rows, c.topk), (c.topk, 1), align=4),
        Float32(0),
        fake.stream(),
    ]
    return kernel, arguments
