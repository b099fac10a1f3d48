"""Device side of gated_delta_step and kimi_delta_step: a few tokens of each sequence, one launch.

    CTA (16 rows, head, sequence)   4 warps, 8 lanes a row: the row of the state in registers, float32
    a token                         g, beta, |q|, |k| by every row's lanes -> S <- e^g S + k' u -> o = S q'

Rows of the state are those of V; a row meets no other, so nothing goes through shared memory and nobody waits. A lane
has four neighbouring columns of every 32: rows are read and written once, 128 bytes at a time, whatever the number of
tokens. What bounds it is memory: a token of a head of 128 x 128 moves 131 KB and takes 0.12 MFLOP.

Where each channel has a gate, a CTA works out those of all tokens first, a thread every so many-th, and keeps e^g in
shared memory: a lane would have as many of them as it has numbers of its row.
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


def _row_sum(x: Float32) -> Float32:
    """Over the lanes of a row."""
    for distance in (1, 2, 4):
        x += cute.arch.shuffle_sync_bfly(x, distance)
    return x


class _Step:
    """``aligned``: whether vectors of the state are."""

    channels = False

    def __init__(self, dims: tuple[int, int], tokens: int, normalized: bool, aligned: bool):
        self.dims, self.tokens, self.normalized, self.aligned = dims, tokens, normalized, aligned
        self.vectors = dims[0] // (LANES * VECTOR)  # of a row, q and k that a lane has

    @cute.jit
    def __call__(
        self,
        heads: tuple,  # q and k (B, n, Hk, K), v (B, n, Hv, V)
        gates: tuple,  # a and b (B, n, Hv), A_log and dt_bias (Hv)
        state: cute.Tensor,  # (Ns, Hv, V, K)
        index: cute.Tensor,  # (B, n)
        accepted: cute.Tensor | None,  # (B)
        out: cute.Tensor,  # (B, n, Hv, V)
        group: Int32,  # value heads of a key head
        numbers: tuple,  # scale, eps, beta_scale
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
        scale, eps, beta_scale = numbers
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
        sDecay = self.decays(gates, b, head, thread, numbers)
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
            mA, mB, mDecay, mBias = gates
            decay = Float32(1.0)
            if const_expr(self.channels):
                self.decay_row(rS, sDecay, t, lane)
            else:
                x = Float32(mA[b, t, head]) + Float32(mBias[head])
                decay = _exp(-_exp(Float32(mDecay[head])) * _softplus(x))
            beta = self.beta(Float32(mB[b, t, head]), beta_scale)
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

    def decays(self, gates: tuple, b: Int32, head: Int32, thread: Int32, scalars: tuple) -> Any:
        """Of gates of channels: e^g of all tokens of the head."""

    def decay_row(self, rS: list[cute.Tensor], sDecay: Any, t: int, lane: Int32) -> None:
        """By gates of channels."""

    def beta(self, b: Float32, beta_scale: Any) -> Float32:
        return Float32(beta_scale) * cute.arch.rcp_approx(Float32(1.0) + _exp(-b))

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
        """A lane's part of a head's numbers in float32, and the sum of the squares of all of them."""
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


class _ChannelStep(_Step):
    """Each channel has a gate. ``bounded``: g is ``lower_bound`` times a sigmoid, which is the last of the scalars."""

    channels = True

    def __init__(self, bounded: bool, *given: Any):
        super().__init__(*given)
        self.bounded = bounded

    @cute.jit
    def decays(self, gates: tuple, b: Int32, head: Int32, thread: Int32, scalars: tuple):
        K, n = const_expr(self.dims[0]), const_expr(self.tokens)
        mA, _, mDecay, mBias = gates
        sDecay = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(n * K), 16)
        rate = _exp(Float32(mDecay[head]))
        for first in cutlass.range_constexpr(0, n * K, 32 * _WARPS):
            i = first + thread
            if const_expr(first + 32 * _WARPS <= n * K):
                sDecay[i] = self.decay(Float32(mA[b, i // K, head, i % K]) + Float32(mBias[head, i % K]), rate, scalars)
            elif i < n * K:
                sDecay[i] = self.decay(Float32(mA[b, i // K, head, i % K]) + Float32(mBias[head, i % K]), rate, scalars)
        cute.arch.barrier()
        return sDecay

    def decay(self, x: Float32, rate: Float32, scalars: tuple) -> Float32:
        """e^g of a channel."""
        if self.bounded:
            return _exp(Float32(scalars[2]) * cute.arch.rcp_approx(Float32(1.0) + _exp(-rate * x)))
        return _exp(-rate * _softplus(x))

    def decay_row(self, rS: list[cute.Tensor], sDecay: Any, t: int, lane: Int32) -> None:
        for i in range(self.vectors):
            at = sDecay.iterator.toint() + (t * self.dims[0] + i * LANES * VECTOR + lane * VECTOR) * 4
            rD = cute.make_rmem_tensor(VECTOR, Float32)
            source = cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=16)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(VECTOR)), rD)
            for j in range(VECTOR):
                rS[i][j] = rS[i][j] * rD[j]

    def beta(self, b: Float32, beta_scale: Any) -> Float32:
        return cute.arch.rcp_approx(Float32(1.0) + _exp(-b))


def trace(
    arch: str, dtypes: tuple[str, str, str], dims: tuple[int, int], tokens: int, normalized: bool, accepted: bool,
    aligned: bool, channels: bool = False, bounded: bool = False,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """``dtypes`` of q, k, v, a and b, of A_log, and of dt_bias; ``aligned``: whether vectors of the state are;
    ``channels``: whether each has a gate, and ``bounded`` as ``_ChannelStep`` has it."""
    model, decay, bias = dtypes
    B, Hk, Hv = (fake.dim32() for _ in range(3))
    K, V = dims
    of_channel = (K,) if channels else ()

    def rows(heads: Any, dim: int) -> Any:
        align = min(16, VECTOR * fake.dtype(model).width // 8)
        steps = tuple(fake.dim(VECTOR) for _ in range(3))
        return fake.tensor(model, (B, tokens, heads, dim), (*steps, 1), align=align)

    def small(*shape: Any, name: str = model) -> Any:
        return fake.tensor(name, shape, tuple(None for _ in shape), align=fake.dtype(name).width // 8)

    arguments = [
        (rows(Hk, K), rows(Hk, K), fake.tensor(model, (B, tokens, Hv, V), (None, None, None, 1), align=2)),
        (
            small(B, tokens, Hv, *of_channel),
            small(B, tokens, Hv),
            small(Hv, name=decay),
            small(Hv, *of_channel, name=bias),
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
    given = dims, tokens, normalized, aligned
    return _ChannelStep(bounded, *given) if channels else _Step(*given), arguments
