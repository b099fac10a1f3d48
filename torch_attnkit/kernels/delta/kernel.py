"""Device side of gated_delta_step and kimi_delta_step: a few tokens of each sequence, one launch.

    CTA (16 rows, head, sequence)   4 warps, 8 lanes a row: the row of the state in registers, float32
    a token                         g, beta, |q|, |k| by every row's lanes -> S <- e^g S + k' u -> o = S q'

Rows of the state are those of V; a row meets no other, so nothing goes through shared memory and nobody waits. A lane
has four neighbouring columns of every 32: rows are read and written once, 128 bytes at a time, whatever the number of
tokens. What bounds it is memory: a token of a head of 128 x 128 moves 131 KB and takes 0.12 MFLOP.

Where each channel has a gate, a CTA works out those of all tokens first, a thread every so many-th, and keeps e^g in
shared memory: a lane would have as many of them as it has elements of its row.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies, fake, pdl
from torch_attnkit.cuda.log1p import log1p_ratio
from torch_attnkit.cuda.warp_ops import LN_2, LOG2_E, exp2, fma

from .launch import LANES
from .problem import VECTOR

_WARPS = 4
_ROWS = _WARPS * 32 // LANES  # of a CTA
_LOG2_E_REST = 1.92596299e-08  # of log2(e), beyond the float32 next to it
_MOST = 200.0  # whose power is 0 and infinite
_FLAT = 20.0  # from here on softplus(x) is x, as PyTorch has it


def _exp(x: Float32) -> Float32:
    """e^x to a few roundings: that of x * log2(e), which the power would show x times as large, is added afterwards.
    NaN stays, beyond the bounds it is 0 or infinite."""
    x = cutlass.select_(x < Float32(-_MOST), Float32(-_MOST), cutlass.select_(x > Float32(_MOST), Float32(_MOST), x))
    power = x * Float32(LOG2_E)
    rest = fma(x, Float32(LOG2_E), -power) + x * Float32(_LOG2_E_REST)
    return exp2(power) * fma(rest, Float32(LN_2), Float32(1.0))


def _softplus(x: Float32) -> Float32:
    """log(1 + e^x) as max(x, 0) + log(1 + e^-|x|), whose relative error is that of float32; x itself above 20."""
    small = _exp(-cute.arch.fmax(x, -x))
    log1p = small * log1p_ratio(small)
    return cutlass.select_(x > Float32(_FLAT), x, cute.arch.fmax(x, Float32(0.0)) + log1p)


def _sigmoid(x: Float32) -> Float32:
    return cute.arch.rcp_approx(Float32(1.0) + _exp(-x))


def _row_sum(x: Float32) -> Float32:
    """Over the lanes of a row."""
    for distance in (1, 2, 4):
        x += cute.arch.shuffle_sync_bfly(x, distance)
    return x


class HeadGates:
    """A gate for each head and token, worked out where it is used."""

    axes: tuple[int, ...] = ()  # of a and dt_bias, behind the head

    def prepare(self, gates: tuple, b: Int32, head: Int32, thread: Int32, lower_bound: Any) -> Any:
        """Nothing to do ahead."""

    def apply(self, rS: list[cute.Tensor], gates: tuple, prepared: Any, b: Int32, t: int, head: Int32, lane: Int32):
        """The decay that the row has yet to take: all of it."""
        mA, _, mDecay, mBias = gates
        x = Float32(mA[b, t, head]) + Float32(mBias[head])
        return _exp(-_exp(Float32(mDecay[head])) * _softplus(x))

    def beta(self, b: Float32, beta_scale: Any) -> Float32:
        return Float32(beta_scale) * _sigmoid(b)


class ChannelGates:
    """A gate for each channel and token. ``bounded``: g is ``lower_bound`` times a sigmoid."""

    def __init__(self, dim: int, tokens: int, bounded: bool):
        self.dim, self.tokens, self.bounded = dim, tokens, bounded
        self.axes = (dim,)

    @cute.jit
    def prepare(self, gates: tuple, b: Int32, head: Int32, thread: Int32, lower_bound: Any):
        """e^g of all tokens of the head to shared memory, an element a thread; synchronises the CTA."""
        count = const_expr(self.tokens * self.dim)
        mA, _, mDecay, mBias = gates
        sDecay = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(count), 16)
        rate = _exp(Float32(mDecay[head]))
        for i in cutlass.range(thread, count, 32 * _WARPS, unroll=1):
            t, channel = i // self.dim, i % self.dim
            x = Float32(mA[b, t, head, channel]) + Float32(mBias[head, channel])
            sDecay[i] = self.decay(x, rate, lower_bound)
        cute.arch.barrier()
        return sDecay

    def decay(self, x: Float32, rate: Float32, lower_bound: Any) -> Float32:
        """e^g of a channel."""
        return _exp(Float32(lower_bound) * _sigmoid(rate * x) if self.bounded else -rate * _softplus(x))

    def apply(self, rS: list[cute.Tensor], gates: tuple, prepared: Any, b: Int32, t: int, head: Int32, lane: Int32):
        """Decays the row, which has nothing left to take."""
        for i, part in enumerate(rS):
            at = prepared.iterator.toint() + (t * self.dim + (i * LANES + lane) * VECTOR) * 4
            rD = cute.make_rmem_tensor(VECTOR, Float32)
            source = cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=16)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(VECTOR)), rD)
            for j in range(VECTOR):
                part[j] = part[j] * rD[j]
        return Float32(1.0)

    def beta(self, b: Float32, lower_bound: Any) -> Float32:
        return _sigmoid(b)


class _Step:
    """``aligned``: whether vectors of the state are."""

    def __init__(self, dims: tuple[int, int], tokens: int, normalized: bool, aligned: bool, gates: Any):
        self.dims, self.tokens, self.normalized, self.aligned, self.gates = dims, tokens, normalized, aligned, gates
        self.vectors = dims[0] // (LANES * VECTOR)  # of a row, q and k that a lane has

    @cute.jit
    def __call__(
        self,
        heads: tuple,  # q and k (B, n, Hk, K), v (B, n, Hv, V)
        gates: tuple,  # a and b (B, n, Hv), A_log and dt_bias (Hv); a and dt_bias with the axes of the gates
        state: cute.Tensor,  # (Ns, Hv, V, K)
        index: cute.Tensor,  # (B, n)
        accepted: cute.Tensor | None,  # (B)
        out: cute.Tensor,  # (B, n, Hv, V)
        group: Int32,  # value heads of a key head
        numbers: tuple,  # scale, eps, and what the gates take
        stream: cuda.CUstream,
    ):
        tiles = const_expr(-(-self.dims[1] // _ROWS))
        self.kernel(heads, gates, state, index, accepted, out, group, numbers).launch(
            grid=(tiles * Int32(out.shape[2]), out.shape[0], 1), block=(32 * _WARPS, 1, 1), stream=stream,
            use_pdl=pdl.use(),
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        heads: tuple,
        gates: tuple,
        state: cute.Tensor,
        index: cute.Tensor,
        accepted: cute.Tensor | None,
        out: cute.Tensor,
        group: Int32,
        numbers: tuple,
    ):
        V, n = const_expr(self.dims[1]), const_expr(self.tokens)
        scale, eps, of_gates = numbers
        pdl.launch_dependents()
        pdl.wait()
        block, b, _ = cute.arch.block_idx()
        tiles = const_expr(-(-V // _ROWS))
        head, thread = block // tiles, cute.arch.thread_idx()[0]
        lane, row = thread % LANES, block % tiles * _ROWS + thread // LANES
        begin = Int32(0)
        if const_expr(accepted is not None):
            begin = cutlass.min(cutlass.max(Int32(accepted[b]), 1), n) - 1
        slots = Int32(state.shape[0])
        first = Int32(index[b, begin])
        here = (first >= 0) & (first < slots)
        valid = row < V
        held = cutlass.select_(valid, row, Int32(0))
        at = Int64(head) * state.stride[1] + Int64(held) * state.stride[2] + lane * VECTOR
        prepared = self.gates.prepare(gates, b, head, thread, of_gates)
        rS = copies.fragments(self.vectors, VECTOR, Float32)
        for i in cutlass.range_constexpr(self.vectors):
            rS[i].fill(0.0)
            if here & valid:
                self.load_state(rS[i], state.iterator + (Int64(first) * state.stride[0] + at + i * LANES * VECTOR))
        for t in cutlass.range_constexpr(n):
            mQ, mK, mV = heads
            rQ, norm_q = self.vector(mQ, b, t, head // group, lane)
            rK, norm_k = self.vector(mK, b, t, head // group, lane)
            by_q, by_k = Float32(scale), Float32(1.0)
            if const_expr(self.normalized):
                by_q *= cute.math.rsqrt(norm_q + eps, fastmath=True)
                by_k = cute.math.rsqrt(norm_k + eps, fastmath=True)
            decay = self.gates.apply(rS, gates, prepared, b, t, head, lane)
            beta = self.gates.beta(Float32(gates[1][b, t, head]), of_gates)
            found = Float32(0.0)
            for i in cutlass.range_constexpr(self.vectors):
                for j in cutlass.range_constexpr(VECTOR):
                    found = fma(rS[i][j], rK[i][j], found)
            value = Float32(mV[b, t, head, held])
            u = beta * (value - decay * by_k * _row_sum(found)) * by_k
            read = Float32(0.0)
            for i in cutlass.range_constexpr(self.vectors):
                for j in cutlass.range_constexpr(VECTOR):
                    rS[i][j] = fma(rK[i][j], u, rS[i][j] * decay)
                    read = fma(rS[i][j], rQ[i][j], read)
            result = cutlass.select_(here, by_q * _row_sum(read), Float32(0.0))
            if valid & (lane == 0):
                out[b, t, head, row] = result.to(out.element_type)
            to = Int32(index[b, t])
            if valid & here & (to >= 0) & (to < slots):
                for i in cutlass.range_constexpr(self.vectors):
                    self.store_state(rS[i], state.iterator + (Int64(to) * state.stride[0] + at + i * LANES * VECTOR))

    def load_state(self, fragment: cute.Tensor, source: Any) -> None:
        if self.aligned:
            copies.load(source, fragment)
            return
        for j in range(VECTOR):
            fragment[j] = copies.scalar(source + j)

    def store_state(self, fragment: cute.Tensor, target: Any) -> None:
        if self.aligned:
            copies.store(fragment, target)
            return
        for j in range(VECTOR):
            cute.make_tensor(target + j, cute.make_layout(1))[0] = fragment[j]

    @cute.jit
    def vector(self, source: cute.Tensor, b: Int32, t: Int32, head: Int32, lane: Int32):
        """A lane's part of a head in float32, and the sum of the squares of all of them."""
        begin = source.iterator + (
            Int64(b) * source.stride[0] + Int64(t) * source.stride[1] + Int64(head) * source.stride[2] + lane * VECTOR
        )
        rX, square = copies.fragments(self.vectors, VECTOR, Float32), Float32(0.0)
        for i in cutlass.range_constexpr(self.vectors):
            stored = cute.make_rmem_tensor(VECTOR, source.element_type)
            copies.load(begin + i * LANES * VECTOR, stored)
            rX[i].store(stored.load().to(Float32))
            for j in cutlass.range_constexpr(VECTOR):
                square = fma(rX[i][j], rX[i][j], square)
        return rX, _row_sum(square)


def trace(
    arch: str, dtypes: tuple[str, str, str], dims: tuple[int, int], tokens: int, normalized: bool, accepted: bool,
    aligned: bool, channels: bool = False, bounded: bool = False,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """``dtypes`` of q, k, v, a and b, of A_log, and of dt_bias; ``aligned``: whether vectors of the state are;
    ``channels``: whether each has a gate, and ``bounded`` as ``ChannelGates`` has it."""
    model, decay, bias = dtypes
    B, Hk, Hv = (fake.dim32() for _ in range(3))
    K, V = dims
    gates = ChannelGates(K, tokens, bounded) if channels else HeadGates()

    def rows(heads: Any, dim: int) -> Any:
        align = min(16, VECTOR * fake.dtype(model).width // 8)
        steps = tuple(fake.dim(VECTOR) for _ in range(3))
        return fake.tensor(model, (B, tokens, heads, dim), (*steps, 1), align=align)

    def small(*shape: Any, name: str = model) -> Any:
        return fake.tensor(name, shape, tuple(None for _ in shape), align=fake.dtype(name).width // 8)

    arguments = [
        (rows(Hk, K), rows(Hk, K), fake.tensor(model, (B, tokens, Hv, V), (None, None, None, 1), align=2)),
        (
            small(B, tokens, Hv, *gates.axes),
            small(B, tokens, Hv),
            small(Hv, name=decay),
            small(Hv, *gates.axes, name=bias),
        ),
        fake.tensor("f32", (fake.dim32(), Hv, V, K), (*(fake.dim(VECTOR) for _ in range(3)), 1), align=16)
        if aligned
        else fake.tensor("f32", (fake.dim32(), Hv, V, K), align=4),
        fake.tensor("i32", (B, tokens), (None, None), align=4),
        fake.tensor("i32", (B,), (None,), align=4) if accepted else None,
        fake.tensor(model, (B, tokens, Hv, V), (None, None, None, 1), align=2),
        Int32(1),
        (Float32(0), Float32(0), Float32(0)),
        fake.stream(),
    ]
    return _Step(dims, tokens, normalized, aligned, gates), arguments
