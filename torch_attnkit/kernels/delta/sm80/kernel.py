"""Device side of gated_delta_rule: prompts through the gated delta rule by chunks of 32 tokens, by ``mma.sync``.

    CTA (rows of V, value head, sequence); one more sequence, the tokens behind the last, and sequences without a slot
    get zeros
    Gram warps     in turns a chunk each: cp.async of k and q -> K K', Q K' -> inverse of I + L, P, factors -> stage
    state warps    16 rows of S each, in float32 registers over all chunks: cp.async of their v -> S k' -> V' -> copy;
                   S <- e^G S + V' k
    output warps   one for each state warp: out = S q' + V' P'

    mbarriers, arrivals of warps   ready, of a stage: its Gram warp (1); state and output warps wait
                                   free, of a stage: state and output warps (2 * state_warps); the Gram warp of the
                                   chunk ``stages`` later waits before it loads
                                   full, of a copy: a state warp (1); its output warp waits
                                   empty, of a copy: an output warp (1); its state warp waits

The chain from chunk to chunk is S k', V' and the update of S. All that S is not needed for is done ahead of it by the
Gram warps, and what comes out behind it by the output warps. S is transposed to what the textbook has: rows of V are
the rows of every product, so results are operands of the next product without leaving registers (gram.py, state.py and
output.py have the formulas). Tokens behind the end of a sequence are zeros, with g = 0, which changes nothing.

Constraints: 16-bit q, k, v; rows of 16 bytes' multiples; K a multiple of 16 up to 128, V of 8.
Source: the chunked form of Gated DeltaNet (arXiv 2412.06464), with V' = A (v - S k') instead of U - W S.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import fake, mbarrier
from torch_attnkit.cuda.ring import Fixed

from .config import ROWS, TOKENS, VALUES, Config
from .gram import Gram
from .output import Output
from .state import State


class Span(Fixed):
    """The tokens of a CTA's sequence."""

    def __init__(self, first: Int32, tokens: Int32):
        self.first, self.tokens = first, tokens
        self.chunks = (tokens + (TOKENS - 1)) // TOKENS

    def chunk(self, n: Int32) -> tuple[Int32, Int32]:
        """The first token of a chunk, and how many it has."""
        return self.first + n * TOKENS, cutlass.min(self.tokens - n * TOKENS, TOKENS)


class ChunkedRule:
    def __init__(self, config: Config, dtype: Any):
        self.c, self.gram = config, Gram(config, dtype)
        self.state, self.output = State(config, dtype), Output(config, dtype)

    @cute.jit
    def __call__(
        self,
        heads: tuple,  # q and k (Tq, Hk, K), v (Tq, Hv, V)
        gates: tuple,  # g and beta (Tq, Hv)
        mState: cute.Tensor,  # (Ns, Hv, V, K)
        sequences: tuple,  # cu_seqlens (B + 1), state_index (B), past (B) or None
        mOut: cute.Tensor,  # (Tq, Hv, V)
        group: Int32,  # value heads of a key head
        scalars: tuple,  # scale, eps
        stream: cuda.CUstream,
    ):
        c = self.c
        self.kernel(heads, gates, mState, sequences, mOut, group, scalars).launch(
            grid=(c.tiles * Int32(mOut.shape[1]), Int32(sequences[1].shape[0]) + 1, 1), block=(c.threads, 1, 1),
            stream=stream, min_blocks_per_mp=1, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        heads: tuple,
        gates: tuple,
        mState: cute.Tensor,
        sequences: tuple,
        mOut: cute.Tensor,
        group: Int32,
        scalars: tuple,
    ):
        c = self.c
        shared = cutlass.memory.SmemAllocator().allocate(c.nbytes, 16).toint()
        block, b, _ = cute.arch.block_idx()
        head, tile = block // c.tiles, block % c.tiles
        offsets, index, past = sequences
        limit = Int32(mOut.shape[0])
        first = cutlass.min(cutlass.max(Int32(offsets[b]), 0), limit)
        last, slot = limit, Int32(-1)  # of the tokens behind the last sequence
        if b < Int32(index.shape[0]):
            last, slot = cutlass.min(cutlass.max(Int32(offsets[b + 1]), first), limit), Int32(index[b])
        span = Span(first, last - first)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if cute.arch.thread_idx()[0] == 0:
            self.stages(shared).init(1, 2 * c.state_warps)
            for i in cutlass.range_constexpr(c.state_warps):
                self.copies(shared, Int32(i)).init(1, 1)
        cute.arch.barrier()
        if (slot >= 0) & (slot < Int32(mState.shape[0])):
            row = tile * c.rows + warp % c.state_warps * ROWS
            if warp < c.state_warps:
                begin = Int32(1)
                if const_expr(past is not None):
                    begin = Int32(past[b])
                self.advance(heads[2], mState, span, slot, head, row, begin, warp, shared)
            elif warp < 2 * c.state_warps:
                self.put_out(mOut, span, head, row, warp - c.state_warps, shared)
            else:
                self.prepare(heads, gates, span, head, group, scalars, warp - 2 * c.state_warps, shared)
        else:
            self.clear(mOut, span, head, tile * c.rows)

    @cute.jit
    def clear(self, mOut: cute.Tensor, span: Span, head: Int32, row: Int32):
        """Zeros in the CTA's channels of tokens without a state."""
        c, words = self.c, const_expr(self.c.rows // 2)
        for i in cutlass.range(cute.arch.thread_idx()[0], span.tokens * words, c.threads, unroll=1):
            channel = row + i % words * 2
            if channel < c.dims[1]:
                at = Int64(span.first + i // words) * mOut.stride[0] + Int64(head) * mOut.stride[1] + channel
                pointer = cute.make_ptr(Int32, (mOut.iterator + at).toint(), cute.AddressSpace.gmem, assumed_align=4)
                cute.make_tensor(pointer, cute.make_layout(1))[0] = Int32(0)

    def stages(self, shared: Int32) -> mbarrier.Barriers:
        return mbarrier.Barriers(self.c.barriers.at(shared), self.c.stages)

    def copies(self, shared: Int32, warp: Int32) -> mbarrier.Barriers:
        """Of a state warp's registers."""
        c = self.c
        begin = c.barriers.at(shared) + 2 * mbarrier.BYTES * c.stages
        return mbarrier.Barriers(begin + warp * (2 * mbarrier.BYTES * c.copies), c.copies)

    @cute.jit
    def prepare(
        self, heads: tuple, gates: tuple, span: Span, head: Int32, group: Int32, scalars: tuple, warp: Int32,
        shared: Int32,
    ):  # fmt: skip
        """A Gram warp's chunks; the copies of its next one are under way while it computes."""
        c, lane, gram, stages = self.c, cute.arch.lane_idx(), self.gram, self.stages(shared)
        (mQ, mK, _), (mG, mBeta) = heads, gates
        scale, eps = Float32(scalars[0]), Float32(scalars[1])
        scratch = c.scratch.at(shared) + warp * c.scratch_bytes
        if warp < span.chunks:
            self.fetch(mK, mQ, span, warp, head // group, shared)
        for n in cutlass.range(warp, span.chunks, c.gram_warps, unroll=1):
            first, count = span.chunk(n)
            g, beta = Float32(0.0), Float32(0.0)
            if lane < count:
                g = Float32(mG[first + lane, head])
                beta = Float32(mBeta[first + lane, head])
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_warp()
            stage = shared + n % c.stages * c.stage_bytes
            rKK, rQK = gram.products(stage, scratch)
            if n + c.gram_warps < span.chunks:
                self.fetch(mK, mQ, span, n + c.gram_warps, head // group, shared)
            gram.finish(rKK, rQK, stage, scratch, g, beta, scale, eps)
            stages.fill(n)

    @cute.jit
    def fetch(self, mK: cute.Tensor, mQ: cute.Tensor, span: Span, n: Int32, head: Int32, shared: Int32):
        """Start the copies of chunk ``n``, behind those who read the chunk before it in its stage."""
        c = self.c
        self.stages(shared).wait_empty(n)
        first, count = span.chunk(n)
        self.gram.load(mK, mQ, first, count, head, shared + n % c.stages * c.stage_bytes)

    @cute.jit
    def advance(
        self, mV: cute.Tensor, mState: cute.Tensor, span: Span, slot: Int32, head: Int32, row: Int32, begin: Int32,
        warp: Int32, shared: Int32,
    ):  # fmt: skip
        """A state warp's rows through all chunks."""
        c, state, stages, copies = self.c, self.state, self.stages(shared), self.copies(shared, warp)
        of_lane = row + cute.arch.lane_idx() // 4
        values = c.value.at(shared) + warp * (VALUES * c.value_bytes)
        if span.chunks > 0:
            for n in cutlass.range_constexpr(VALUES - 1):
                self.fetch_values(mV, span, Int32(n), head, row, values)
            rS = state.read(mState, slot, head, of_lane, begin)
            for n in cutlass.range(span.chunks, unroll=1):
                cute.arch.cp_async_wait_group(VALUES - 2)
                cute.arch.sync_warp()
                stage = shared + n % c.stages * c.stage_bytes
                copies.wait_empty(n)
                stages.wait_full(n)
                rV = state.correct(rS, stage, values + n % VALUES * c.value_bytes, self.copy(shared, warp, n))
                copies.fill(n)
                self.fetch_values(mV, span, n + (VALUES - 1), head, row, values)
                state.update(rS, rV, stage)
                stages.release(n)
            cute.arch.cp_async_wait_group(0)  # of chunks that there are not: nothing may land when the CTA is gone
            state.write(rS, mState, slot, head, of_lane)

    def copy(self, shared: Int32, warp: Int32, n: Int32) -> Int32:
        """Where a state warp leaves an output warp its registers of a chunk."""
        return self.c.copy.at(shared) + (warp * self.c.copies + n % self.c.copies) * self.c.copy_bytes

    @cute.jit
    def put_out(self, mOut: cute.Tensor, span: Span, head: Int32, row: Int32, warp: Int32, shared: Int32):
        """An output warp's channels of all chunks."""
        c, output, stages, copies = self.c, self.output, self.stages(shared), self.copies(shared, warp)
        for n in cutlass.range(span.chunks, unroll=1):
            copies.wait_full(n)
            stages.wait_full(n)
            state, values = output.taken(self.copy(shared, warp, n))
            rOut = output.multiply(state, values, shared + n % c.stages * c.stage_bytes)
            copies.release(n)  # not before products have used what was loaded
            stages.release(n)
            first, count = span.chunk(n)
            output.store(rOut, mOut, first, count, head, row)

    def fetch_values(self, mV: cute.Tensor, span: Span, n: Int32, head: Int32, row: Int32, values: Int32) -> None:
        first, count = span.chunk(n)
        self.state.load_values(mV, first, count, head, row, values + n % VALUES * self.c.value_bytes)


def trace(arch: str, dtype: str, beta_dtype: str, config: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """``dtype`` of q, k and v."""
    c = Config(*config)
    tokens, Hk, Hv, B = (fake.dim32() for _ in range(4))

    def rows(heads: Any, dim: int, step: int, align: int) -> Any:
        return fake.tensor(dtype, (tokens, heads, dim), (fake.dim(step), fake.dim(step), 1), align=align)

    def gate(name: str) -> Any:
        return fake.tensor(name, (tokens, Hv), (None, None), align=fake.dtype(name).width // 8)

    def ids(*shape: Any) -> Any:
        return fake.tensor("i32", shape, (None,), align=4)

    arguments = [
        (rows(Hk, c.dims[0], 8, 16), rows(Hk, c.dims[0], 8, 16), rows(Hv, c.dims[1], 8, 16)),
        (gate("f32"), gate(beta_dtype)),
        fake.tensor("f32", (fake.dim32(), Hv, c.dims[1], c.dims[0]), align=4),
        (ids(fake.dim32()), ids(B), ids(B) if c.past else None),
        rows(Hv, c.dims[1], 2, 4),
        Int32(1),
        (Float32(0), Float32(0)),
        fake.stream(),
    ]
    return ChunkedRule(c, fake.dtype(dtype)), arguments
