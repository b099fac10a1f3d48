"""Indexer scores by ``mma.sync``: sm_80, sm_89 and sm_120. Keys stay in registers, queries stream past them.

    warp 0        sorts the CTA's tokens by whether they see some of its keys
    all threads   -inf for tokens that see none; cp.async ring of queries, a token a stage; head weights beside them
    each warp     32 keys as operand A: products with all heads, relu, weighted sum over them, stored as float32

A CTA has 128 keys for a few tokens of a request, else 256, and up to 256 tokens. A stage is waited for by
cp.async.wait_group and one CTA barrier a token, behind which the stage before it is free; the copy of a later token
goes out there. Weights of the token after the next are loaded to registers meanwhile, one head a thread, and stored a
token later.

Operands are E4M3 where the target multiplies it, else float16 for it; of 16 bits as they are; bf16 for MXFP4, whose
keys are decoded with their scales here, and whose queries by a launch before. load.py says how columns are ordered.
Constraints: rows of q have multiples of 16 bytes; lengths and request ids out of range are clamped, keys of pages out
of range are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from torch_attnkit.cuda import fake
from torch_attnkit.cuda.ring import Fixed

from ..arguments import Tensors
from ..sm90.head_reduce import over_quad
from ..sm100 import tokens
from ..sm100.plan import MOST_TOKENS
from .load import QUAD, load_keys, load_query, query_addresses, row_of
from .plan import ATOMS, CHUNK, Config
from .products import HeadWeights, allocate_weights, fetch, score, share


@dataclass
class SharedMemory(Fixed):
    tokens: tokens.Tokens
    weights: HeadWeights  # of the tokens of all stages
    queries: Int32  # address of the first stage


class ScoresMma:
    def __init__(self, config: Config):
        self.c = config

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
        cut: Int32,  # tokens of a CTA
        stream: cuda.CUstream,
    ):
        c = self.c
        requests = Int32(mK.shape[0] if const_expr(mTable is None) else mTable.shape[0])
        each = Int32(mQ.shape[0])  # tokens of a request
        if const_expr(mIds is None):
            each = each // requests
        tensors = (mK, mWeight, mLength, mIds, mTable, mQScale, mKScale, mScores)
        self.kernel(mQ, tensors, (requests, each, cut)).launch(
            grid=((Int32(mScores.shape[1]) + (c.keys - 1)) // c.keys, (each + cut - 1) // cut, requests),
            block=(c.threads, 1, 1), stream=stream, min_blocks_per_mp=1, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, mQ: cute.Tensor, tensors: tuple, sizes: tuple):
        c, t = self.c, Tensors(*tensors)
        requests, each, cut = sizes
        tile, part, request = cute.arch.block_idx()
        first = part * cut  # of this CTA's tokens
        last = cutlass.min(first + cut, each)
        if const_expr(t.mIds is None):
            first, last = first + request * each, last + request * each
        start = tile * c.keys
        shared = self.shared()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            entries = Int32(t.mScores.shape[1])
            tokens.sort(shared.tokens, t.mLength, t.mIds, entries, requests, request, first, last, start)
        cute.arch.barrier()
        self.clear(t, shared, start)
        count = shared.tokens.sCount[0]
        if count > 0:
            self.scores(mQ, t, shared, request, start + warp * c.warp_keys, count)

    def shared(self) -> SharedMemory:
        c, memory = self.c, cutlass.memory.SmemAllocator()
        found, weights = tokens.allocate(memory), allocate_weights(c, memory)
        return SharedMemory(found, weights, memory.allocate(c.stages * c.stage_bytes, 128).toint())

    @cute.jit
    def clear(self, t: Tensors, shared: SharedMemory, start: Int32):
        """-inf for the tokens that see none of the CTA's keys."""
        c = self.c
        stop = cutlass.min(start + c.keys, Int32(t.mScores.shape[1]))
        for i in cutlass.range(shared.tokens.sCount[1], unroll=1):
            token = shared.tokens.sToken[MOST_TOKENS - 1 - i]
            for entry in cutlass.range(start + cute.arch.thread_idx()[0], stop, c.threads, unroll=1):
                t.mScores[token, entry] = -Float32.inf

    @cute.jit
    def scores(self, mQ: cute.Tensor, t: Tensors, shared: SharedMemory, request: Int32, first: Int32, count: Int32):
        """The scores of this warp's keys, from ``first`` on, for every token that sees some of the CTA's."""
        c, seen = self.c, shared.tokens
        for s in cutlass.range_constexpr(c.stages - 1):
            if s < count:
                load_query(c, mQ, seen.at(Int32(s)), shared.queries + s * c.stage_bytes)
            cute.arch.cp_async_commit_group()
        lane = cute.arch.lane_idx()
        keys = load_keys(c, t, request, first + lane // QUAD, seen.sCount[2])
        rWeight = cute.make_rmem_tensor(1 + c.q_scale, Float32)  # of this thread's head
        fetch(c, t, seen.at(Int32(0)), rWeight)
        share(c, shared.weights, rWeight, Int32(0))
        fetch(c, t, seen.at(Int32(1)), rWeight)
        even, odd = query_addresses(c)
        row, scale = self.of_lane(first + lane // QUAD, keys.scales)
        for n in cutlass.range(count, unroll=1):
            cute.arch.cp_async_wait_group(c.stages - 2)
            cute.arch.barrier()  # this token is there for all, and nobody reads the one before any more
            ahead, slot = n + (c.stages - 1), n % c.stages
            if ahead < count:
                load_query(c, mQ, seen.at(ahead), shared.queries + ahead % c.stages * c.stage_bytes)
            cute.arch.cp_async_commit_group()
            share(c, shared.weights, rWeight, (n + 1) % c.stages)
            fetch(c, t, seen.at(n + 2), rWeight)
            stage = shared.queries + slot * c.stage_bytes
            value = over_quad(score(c, keys, stage + even, stage + odd, shared.weights, slot)) * scale
            if row < t.mScores.shape[1]:
                t.mScores[seen.sToken[n], row] = cutlass.select_(row < seen.sLength[n], value, -Float32.inf)

    def of_lane(self, first: Int32, scales: list[Float32]) -> tuple[Int32, Float32]:
        """The row whose scores this lane stores, one of its quad's four, and its scale."""
        lane = cute.arch.lane_idx() % QUAD
        row, scale = first, Float32(1)
        for i in range(2 * ATOMS):
            row = cutlass.select_(lane == i, first + row_of(i), row)
            if scales:
                scale = cutlass.select_(lane == i, scales[i], scale)
        return row, scale


def trace(arch: str, config: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    c = Config(*config)
    T, requests, four = fake.dim32(), fake.dim32(), c.stored == "mxfp4"
    # Not every torch hands E4M3 over.
    stored, product = ("u8" if name in ("mxfp4", "f8e4m3") else name for name in (c.stored, c.dtype))
    itemsize = {name: fake.dtype(name).width // 8 for name in (product, c.weights)}
    step = fake.dim(CHUNK // itemsize[product]), fake.dim(CHUNK // itemsize[product]), 1
    by_token = [fake.tensor("i32", (T,), (None,), align=4) for _ in range(2)]
    scales = "u8" if four else "f32"
    key = fake.dim32(), fake.dim32(), None
    return ScoresMma(c), [
        fake.tensor(product, (T, c.heads, c.dim), step),
        fake.tensor(stored, key, align=c.load),
        fake.tensor(c.weights, (T, c.heads), align=itemsize[c.weights]),
        by_token[0],
        by_token[1] if c.ids else None,
        fake.tensor("i32", (requests, fake.dim32()), align=4) if c.paged else None,
        fake.tensor("f32", (T, c.heads, 1), align=4) if c.q_scale else None,
        fake.tensor(scales, (*key[:2], None), align=1 if four else 4) if four or c.k_scale else None,
        fake.tensor("f32", (T, fake.dim32()), align=4),
        Int32(0),
        fake.stream(),
    ]
