"""Our attention kernels beside PyTorch's, counted in the same simulator on the same tensors, against what we aimed at.

Decode: one query of 32 heads on 8 KV heads of dim 128 over 8192 keys, in float16, where PyTorch takes two passes.
Prefill: 2048 queries and keys, causal, dim 128, in float16. Heads are alike, so one of each kind stands for all: a
query head with a KV head of its own, and four that share one. Every count is exact, every time a bound from a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from torch_attnkit.core.target import simulate

from . import torch_kernels
from .counters import Report
from .library import counting

KEYS, QUERIES, DIM = 8192, 2048, 128
_ERROR_QUERIES = 512


@dataclass(frozen=True)
class Side:
    """The launches of one side, and the largest error of its output against float64."""

    reports: list[Report]
    error: float

    def total(self, name: str) -> int:
        """Of the launches, the sum of a field or property of Report."""
        return sum(getattr(r, name) for r in self.reports)

    @property
    def memory(self) -> int:
        return self.total("memory_read") + self.total("memory_written")


@dataclass(frozen=True)
class Pair:
    """Ours and PyTorch's for one call; ``least`` is what its tensors hold, in bytes."""

    name: str
    ours: Side
    torch: Side
    least: int


@dataclass(frozen=True)
class Bar:
    """A figure that may be at most ``most``, or with None one that stands for information."""

    what: str
    value: float
    most: float | None

    @property
    def verdict(self) -> str:
        return "-" if self.most is None else "met" if self.value <= self.most else "MISSED"


def _tensors(
    dtype: torch.dtype, heads: int, kv_heads: int, queries: int, keys: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    q, k, v = (torch.randn(1, h, n, DIM, generator=gen).to(dtype) for h, n in shapes)
    return q, k, v


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """The attention in float64, (1, H, L, D)."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(repeat, 1) for t in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q.double(), k, v, is_causal=causal)


def _side(run: Callable[[], torch.Tensor], exact: torch.Tensor, count: bool = True) -> Side:
    reports: list[Report] = []
    with ExitStack() as stack:
        if count:
            reports = stack.enter_context(counting())
        out = run()
    return Side(reports, float((out.double() - exact).abs().max()))


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(t.nbytes for t in tensors)


def decode(keys: int = KEYS, heads: int = 32, kv_heads: int = 8) -> Pair:
    q, k, v = _tensors(torch.float16, heads, kv_heads, 1, keys)
    kv_len = torch.tensor([keys], dtype=torch.int32)
    out, lse = torch.zeros_like(q), torch.zeros(1, heads)
    exact = _exact(q, k, v, causal=False)

    def ours() -> torch.Tensor:
        with simulate("metal"):
            got: torch.Tensor = torch.ops.attnkit.sdpa_decode(q[:, :, 0], k, v, kv_len)[0]
        return got[:, :, None]

    theirs = _side(lambda: torch_kernels.decode_in_two(q, k, v, out), exact)
    name = f"decode, {heads}/{kv_heads} heads, {keys} keys"
    return Pair(name, _side(ours, exact), theirs, _bytes(q, k, v, kv_len, out, lse))


def prefill(
    heads: int, kv_heads: int, queries: int = QUERIES, dtype: torch.dtype = torch.float16, count: bool = True
) -> Pair:
    q, k, v = _tensors(dtype, heads, kv_heads, queries, queries)
    out, lse = torch.zeros_like(q), torch.zeros(1, queries, heads)
    exact = _exact(q, k, v, causal=True)

    def ours() -> torch.Tensor:
        with simulate("metal"):
            rows = (t.transpose(1, 2).contiguous() for t in (q, k, v))
            got: torch.Tensor = torch.ops.attnkit.flash_attention(*rows, causal=True)[0]
        return got.transpose(1, 2)

    theirs = _side(lambda: torch_kernels.prefill(q, k, v, out, causal=True), exact, count)
    name = f"prefill, {heads}/{kv_heads} heads, {queries} causal"
    return Pair(name, _side(ours, exact, count), theirs, _bytes(q, k, v, out, lse))


def pairs() -> Iterator[Pair]:
    """The calls that are counted, about a minute of simulation in all."""
    yield decode()
    yield prefill(1, 1)
    yield prefill(4, 1)


def bars(measured: Sequence[Pair]) -> Iterator[Bar]:
    """What was aimed at, for pairs as ``pairs`` gives them."""
    for p in measured:
        ours, theirs = p.ours, p.torch
        mine = ours.total("device_bytes")
        if p.name.startswith("decode"):
            yield Bar(f"{p.name}: device bytes / DecodeAttention.h's", mine / theirs.total("device_bytes"), 0.30)
            yield Bar(f"{p.name}: device bytes / least possible", mine / p.least, 1.05)
            continue
        yield Bar(f"{p.name}: device bytes / PrefillAttention.h's", mine / theirs.total("device_bytes"), None)
        yield Bar(f"{p.name}: device bytes / least possible", mine / p.least, 1.3)
        yield Bar(f"{p.name}: bytes past a cache of 8 MiB / least possible", ours.memory / p.least, None)
        for what, field in (("flops outside the matrix units", "flops"), ("barriers", "barriers")):
            yield Bar(f"{p.name}: {what} / PrefillAttention.h's", ours.total(field) / theirs.total(field), 1.0)
    for dtype in (torch.float16, torch.bfloat16):
        p = prefill(4, 1, _ERROR_QUERIES, dtype, count=False)
        name = f"{p.name}: largest error in {str(dtype).removeprefix('torch.')} / PrefillAttention.h's"
        yield Bar(name, p.ours.error / p.torch.error, 1.0)


def counts(side: Side) -> dict[str, Any]:
    """What the two sides are compared by, in the order of a table's columns."""
    return {
        "device bytes": side.total("device_bytes"),
        "past the cache": side.memory,
        "flops": side.total("flops"),
        "in matrix units": side.total("matrix_flops"),
        "exponentials": side.total("special"),
        "threadgroup bytes": side.total("threadgroup_read") + side.total("threadgroup_written"),
        "barriers": side.total("barriers"),
    }
