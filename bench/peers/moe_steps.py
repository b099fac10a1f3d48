"""What stands between a peer's products where its package has no op for it: routes by expert, SwiGLU, the sum."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from bench.peers.moe_layer import Swiglu

_BLOCK = 1024


@triton.jit
def _swiglu_kernel(
    both, bias, expert, h, M, alpha, limit, GPTOSS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(both + row * 2 * M + at, mask=at < M, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * M + M + at, mask=at < M, other=0.0).to(tl.float32)
    if BIAS:
        own = bias + tl.load(expert + row).to(tl.int64) * 2 * M
        gate += tl.load(own + at, mask=at < M, other=0.0).to(tl.float32)
        up += tl.load(own + M + at, mask=at < M, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    value = gate / (1 + tl.exp(-alpha * gate)) * (up + 1) if GPTOSS else gate / (1 + tl.exp(-gate)) * up
    tl.store(h + row * M + at, value.to(h.dtype.element_ty), mask=at < M)


@triton.jit
def _combine_kernel(
    y, position, weights, bias, indices, out, N, K: tl.constexpr, PERMUTED: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for k in tl.static_range(K):
        route = token * K + k
        row = tl.load(position + route).to(tl.int64) if PERMUTED else route
        value = tl.load(y + row * N + at, mask=at < N, other=0.0).to(tl.float32)
        if BIAS:
            own = tl.load(indices + route).to(tl.int64) * N
            value += tl.load(bias + own + at, mask=at < N, other=0.0).to(tl.float32)
        total += tl.load(weights + route) * value
    tl.store(out + token * N + at, total.to(out.dtype.element_ty), mask=at < N)


class Sorted(NamedTuple):
    """Routes in the order of their experts: R = Tq * K of them."""

    expert: torch.Tensor  # (R,) of each sorted route
    route: torch.Tensor  # (R,) int64: which route it is, token * K + k
    position: torch.Tensor  # (Tq, K) int64: where a route is in the order
    ends: torch.Tensor  # (E,) int32: how many routes lead to an expert or those before it


def by_expert(indices: torch.Tensor, experts: torch.Tensor) -> Sorted:
    """``experts``: 0 to E - 1 as int16; keys of 16 bits take a radix sort half as many passes."""
    expert, route = indices.flatten().to(torch.int16).sort(stable=True)
    position = torch.empty_like(route)
    position[route] = torch.arange(len(route), device=route.device)
    ends = torch.searchsorted(expert, experts, right=True, out_int32=True)
    return Sorted(expert, route, position.view(indices.shape), ends)


def swiglu(
    both: torch.Tensor, act: Swiglu, bias: torch.Tensor | None = None, expert: torch.Tensor | None = None
) -> torch.Tensor:
    """(R, 2M) of gates, then ups, to (R, M); ``bias`` (E, 2M) is that of each row's ``expert`` (R,)."""
    R, M = both.shape[0], both.shape[1] // 2
    h = both.new_empty(R, M)
    _swiglu_kernel[R, triton.cdiv(M, _BLOCK)](
        both, bias, expert, h, M, act.alpha, act.limit, GPTOSS=act.gptoss, BIAS=bias is not None, BLOCK=_BLOCK
    )
    return h


def combine(
    y: torch.Tensor, weights: torch.Tensor, position: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, indices: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Rows y (R, N) weighted and summed per token (Tq, N): row token * K + k, or where ``position`` (Tq, K) says.

    ``bias`` (E, N) is that of each route's expert, ``indices`` (Tq, K).
    """
    (Tq, K), N = weights.shape, y.shape[1]
    out = y.new_empty(Tq, N)
    _combine_kernel[Tq, triton.cdiv(N, _BLOCK)](
        y, position, weights, bias, indices, out, N,
        K=K, PERMUTED=position is not None, BIAS=bias is not None, BLOCK=_BLOCK,
    )  # fmt: skip
    return out
