"""Device side of causal_conv1d: a depthwise convolution over packed sequences, one launch.

    CTA (128 vectors of channels, sequence, run)   each thread a vector of channels: runs of tokens, every so many

A thread loads the tokens of a run, all at a time, and those of the W - 1 before it, from x or from the state. The one
that has a sequence's first run reads the state and leaves the new one, from x: nobody else reads or writes it. In a
decode step a thread has all tokens of its sequence, and the state stays in registers: x, weights and the state are
loaded together once offsets and slot are known. One more sequence, the tokens behind the last, and sequences without a
slot get zeros. Memory bounds it: x is read once and out written once; in a decode step a state once each way. Weights
and states whose channels lie one behind the other come in pieces of several elements.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies, fake, pdl
from torch_attnkit.cuda.warp_ops import LOG2_E, exp2, fma

_THREADS = 128


def _silu(x: Float32) -> Float32:
    return x * cute.arch.rcp_approx(Float32(1.0) + exp2(x * Float32(-LOG2_E)))


class _Conv:
    """``vector``: channels of a thread; ``length``: tokens of a run; ``ordered``: a thread has all runs of a sequence;
    ``pieces``: elements of weights, and of states, that are loaded at once, 1 with any strides."""

    def __init__(
        self, width: int, columns: int, vector: int, length: int, ordered: bool, pieces: tuple[int, int], silu: bool
    ):
        self.width, self.columns, self.vector, self.silu = width, columns, vector, silu
        self.length, self.ordered, self.pieces = length, ordered, pieces

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,  # (Tq, C)
        mWeight: cute.Tensor,  # (C, W)
        mState: cute.Tensor,  # (Ns, C, Ws)
        sequences: tuple,  # cu_seqlens (B + 1), state_index (B), past (B) or None
        mBias: cute.Tensor | None,  # (C)
        mOut: cute.Tensor,  # (Tq, C)
        runs: Int32,  # CTAs of a sequence
        stream: cuda.CUstream,
    ):
        tiles = (Int32(mX.shape[1]) + (_THREADS * self.vector - 1)) // (_THREADS * self.vector)
        self.kernel(mX, mWeight, mState, sequences, mBias, mOut, runs).launch(
            grid=(tiles, Int32(sequences[1].shape[0]) + 1, runs), block=(_THREADS, 1, 1), stream=stream,
            use_pdl=pdl.use(),
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, mX: cute.Tensor, mWeight: cute.Tensor, mState: cute.Tensor, sequences: tuple,
        mBias: cute.Tensor | None, mOut: cute.Tensor, runs: Int32,
    ):  # fmt: skip
        pdl.launch_dependents()
        pdl.wait()
        tile, b, part = cute.arch.block_idx()
        channel = (tile * _THREADS + cute.arch.thread_idx()[0]) * self.vector
        offsets, index, past = sequences
        limit = Int32(mX.shape[0])
        if const_expr(self.ordered):
            # Four loads, none of which waits for another.
            count = Int32(index.shape[0])
            first, last, slot, begun = limit, limit, Int32(-1), Int32(1)
            if b < count:
                slot, last = Int32(index[b]), Int32(offsets[b + 1])
                if const_expr(past is not None):
                    begun = Int32(past[b])
                first = Int32(offsets[b])
            else:
                first = Int32(offsets[count])
            first = cutlass.min(cutlass.max(first, 0), limit)
            if channel < Int32(mX.shape[1]):
                span = first, cutlass.min(cutlass.max(last, first), limit) - first
                self.step(mX, mWeight, mState, mBias, mOut, span, (slot, begun), channel)
        else:
            first = cutlass.min(cutlass.max(Int32(offsets[b]), 0), limit)
            last, slot, begun = limit, Int32(-1), Int32(1)  # of the tokens behind the last sequence
            if b < Int32(index.shape[0]):
                last, slot = cutlass.min(cutlass.max(Int32(offsets[b + 1]), first), limit), Int32(index[b])
                if const_expr(past is not None):
                    begun = Int32(past[b])
            tokens = last - first
            if channel < Int32(mX.shape[1]):
                share = first, tokens, part, runs
                self.prompt(mX, mWeight, mState, mBias, mOut, share, (slot, begun), channel)

    @cute.jit
    def prompt(
        self, mX: cute.Tensor, mWeight: cute.Tensor, mState: cute.Tensor, mBias: cute.Tensor | None, mOut: cute.Tensor,
        share: tuple, held: tuple, channel: Int32,
    ):  # fmt: skip
        """``share``: the sequence's first token, how many it has, the thread's first run, and how far the next is."""
        first, tokens, part, runs = share
        if (held[0] >= 0) & (held[0] < Int32(mState.shape[0])):
            weights = self.columns_of(mWeight, channel, self.width, self.pieces[0])
            rBias = self.bias(mBias, channel)
            for run in cutlass.range(part, (tokens + (self.length - 1)) // self.length, runs, unroll=1):
                span = first, tokens, run * self.length
                self.run(mX, mState, mOut, span, held, channel, weights, rBias)
        else:
            self.clear(mOut, share, channel)

    @cute.jit
    def step(
        self, mX: cute.Tensor, mWeight: cute.Tensor, mState: cute.Tensor, mBias: cute.Tensor | None, mOut: cute.Tensor,
        span: tuple, held: tuple, channel: Int32,
    ):  # fmt: skip
        """A sequence's tokens, ``length`` at a time; each moves the columns of the state up by one."""
        (first, tokens), (slot, begun) = span, held
        if (slot >= 0) & (slot < Int32(mState.shape[0])):
            if tokens > 0:
                rows = copies.fragments(self.length, self.vector, mX.element_type)
                self.load_run(mX, rows, first, tokens, Int32(0), channel)
                state = self.at_slot(mState, slot)
                columns = self.before(state, begun, channel)
                weights = self.columns_of(mWeight, channel, self.width, self.pieces[0])
                rBias = self.bias(mBias, channel)
                for begin in cutlass.range(0, tokens, self.length, unroll=1):
                    for i in cutlass.range_constexpr(self.length):
                        if begin + i < tokens:
                            row = cute.make_rmem_tensor(self.vector, Float32)
                            row.store(rows[i].load().to(Float32))
                            given = [*columns[self.columns - (self.width - 1) :], row]
                            result = self.sums(given, weights, rBias, mOut.element_type)
                            copies.store(result, self.at(mOut, first + begin + i, channel))
                            for c in cutlass.range_constexpr(self.columns - 1):
                                columns[c].store(columns[c + 1].load())
                            columns[-1].store(row.load())
                    if begin + self.length < tokens:
                        self.load_run(mX, rows, first, tokens, begin + self.length, channel)
                self.store_columns(columns, state, channel)
        else:
            self.clear(mOut, (first, tokens, Int32(0), Int32(1)), channel)

    @cute.jit
    def clear(self, mOut: cute.Tensor, share: tuple, channel: Int32):
        first, tokens, part, runs = share
        zeros = cute.make_rmem_tensor(self.vector, mOut.element_type)
        zeros.fill(0.0)
        for t in cutlass.range(part, tokens, runs, unroll=1):
            copies.store(zeros, self.at(mOut, first + t, channel))

    @cute.jit
    def run(
        self, mX: cute.Tensor, mState: cute.Tensor, mOut: cute.Tensor, span: tuple, held: tuple, channel: Int32,
        weights: list, rBias: cute.Tensor,
    ):  # fmt: skip
        """``span``: the sequence's first token, how many it has, and of those the run's first."""
        first, tokens, begin = span
        rows = [self.load(mX, first + cutlass.min(begin + i, tokens - 1), channel) for i in range(self.length)]
        before = copies.fragments(self.width - 1, self.vector, Float32)
        if begin > 0:
            for i in cutlass.range_constexpr(self.width - 1):
                before[i].store(self.load(mX, first + (begin + i - (self.width - 1)), channel).load())
        else:
            self.replace_state(mX, mState, before, (first, tokens), held, channel)
        given = [*before, *rows]
        for i in cutlass.range_constexpr(self.length):
            if begin + i < tokens:
                result = self.sums(given[i : i + self.width], weights, rBias, mOut.element_type)
                copies.store(result, self.at(mOut, first + begin + i, channel))

    @cute.jit
    def replace_state(
        self, mX: cute.Tensor, mState: cute.Tensor, before: list, span: tuple, held: tuple, channel: Int32
    ):
        """Tokens before the first to ``before``; the last ones of the sequence, or of its state, to the state."""
        (first, tokens), (slot, begun) = span, held
        state = self.at_slot(mState, slot)
        old = self.before(state, begun, channel)
        for i in cutlass.range_constexpr(self.width - 1):
            before[i].store(old[self.columns - (self.width - 1) + i].load())
        kept = copies.fragments(self.columns, self.vector, Float32)
        for i in cutlass.range_constexpr(self.columns):
            token = tokens - self.columns + i
            if token >= 0:
                kept[i].store(self.load(mX, first + token, channel).load())
            else:
                # What was there moves up by the number of tokens, of which there are fewer than columns.
                for n in cutlass.range_constexpr(1, self.columns - i):
                    if tokens == n:
                        kept[i].store(old[i + n].load())
        self.store_columns(kept, state, channel)

    def at_slot(self, mState: cute.Tensor, slot: Int32) -> cute.Tensor:
        """(C, Ws)"""
        return cute.make_tensor(
            mState.iterator + Int64(slot) * mState.stride[0],
            cute.make_layout((mState.shape[1], self.columns), stride=(mState.stride[1], mState.stride[2])),
        )

    def bias(self, mBias: cute.Tensor | None, channel: Int32) -> cute.Tensor:
        rBias = cute.make_rmem_tensor(self.vector, Float32)
        rBias.fill(0.0)
        if mBias is not None:
            for j in range(self.vector):
                rBias[j] = Float32(mBias[channel + j])
        return rBias

    def sums(self, given: list, weights: list, rBias: cute.Tensor, dtype: Any) -> cute.Tensor:
        """What comes out of a token, the last of ``given``."""
        result = cute.make_rmem_tensor(self.vector, dtype)
        for j in range(self.vector):
            total = rBias[j]
            for k in range(self.width):
                total = fma(weights[k][j], given[k][j], total)
            result[j] = (_silu(total) if self.silu else Float32(total)).to(dtype)
        return result

    @cute.jit
    def before(self, state: cute.Tensor, begun: Int32, channel: Int32) -> list[cute.Tensor]:
        """The columns of a state (C, Ws), zeros of a sequence that begins."""
        old = copies.fragments(self.columns, self.vector, Float32)
        for i in cutlass.range_constexpr(self.columns):
            old[i].fill(0.0)
        if begun != 0:
            for i, column in enumerate(self.columns_of(state, channel, self.columns, self.pieces[1])):
                old[i].store(column.load())
        return old

    def columns_of(self, tensor: cute.Tensor, channel: Int32, count: int, piece: int) -> list[cute.Tensor]:
        """The columns of this thread's channels of (C, count) in float32."""
        found = copies.fragments(count, self.vector, Float32)
        if piece > 1:
            parts = copies.fragments(count * self.vector // piece, piece, tensor.element_type)
            for i, part in enumerate(parts):
                copies.load(tensor.iterator + (channel * count + i * piece), part)
            for e in range(count * self.vector):
                found[e % count][e // count] = Float32(parts[e // piece][e % piece])
        else:
            for i, column in enumerate(found):
                for j in range(self.vector):
                    column[j] = Float32(tensor[channel + j, i])
        return found

    def store_columns(self, columns: list[cute.Tensor], tensor: cute.Tensor, channel: Int32) -> None:
        count, piece = len(columns), self.pieces[1]
        parts = copies.fragments(count * self.vector // piece, piece, tensor.element_type)
        for e in range(count * self.vector):
            parts[e // piece][e % piece] = columns[e % count][e // count].to(tensor.element_type)
        for i, part in enumerate(parts):
            if piece > 1:
                copies.store(part, tensor.iterator + (channel * count + i * piece))
            else:
                tensor[channel + i // count, i % count] = part[0]

    def at(self, tensor: cute.Tensor, token: Int32, channel: Int32) -> Any:
        return tensor.iterator + (Int64(token) * tensor.stride[0] + channel)

    def load_run(
        self, mX: cute.Tensor, rows: list[cute.Tensor], first: Int32, tokens: Int32, begin: Int32, channel: Int32
    ) -> None:
        """The run's tokens, behind the last the last again."""
        for i, row in enumerate(rows):
            copies.load(self.at(mX, first + cutlass.min(begin + i, tokens - 1), channel), row)

    def load(self, mX: cute.Tensor, token: Int32, channel: Int32) -> cute.Tensor:
        """A token's channels in float32."""
        stored, found = (cute.make_rmem_tensor(self.vector, kind) for kind in (mX.element_type, Float32))
        copies.load(self.at(mX, token, channel), stored)
        found.store(stored.load().to(Float32))
        return found


def trace(
    arch: str,
    dtype: str,
    width: int,
    columns: int,
    vector: int,
    length: int,
    ordered: bool,
    pieces: tuple[int, int],
    silu: bool,
    bias: bool,
    past: bool,
) -> tuple[Any, list[Any]]:
    tokens, C, B = (fake.dim32() for _ in range(3))
    size = fake.dtype(dtype).width // 8

    def rows() -> Any:
        return fake.tensor(dtype, (tokens, C), (fake.dim(vector), 1), align=vector * size)

    def ids(*shape: Any) -> Any:
        return fake.tensor("i32", shape, (None,), align=4)

    def small(piece: int, count: int, shape: tuple, outer: tuple) -> Any:
        if piece > 1:
            return fake.tensor(dtype, shape, (*outer, count, 1), align=piece * size)
        return fake.tensor(dtype, shape, (None,) * len(shape), align=size)

    arguments = [
        rows(),
        small(pieces[0], width, (C, width), ()),
        small(pieces[1], columns, (fake.dim32(), C, columns), (fake.dim(pieces[1]),)),
        (ids(fake.dim32()), ids(B), ids(B) if past else None),
        fake.tensor(dtype, (C,), (None,), align=size) if bias else None,
        rows(),
        Int32(1),
        fake.stream(),
    ]
    return _Conv(width, columns, vector, length, ordered, pieces, silu), arguments
