"""Host side of rope_kv_cache_append on NVIDIA GPUs: the problem, how wide vectors are, the launch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torch_attnkit.core.memory import span
from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile


@dataclass(frozen=True)
class AppendProblem:
    """A token of each sequence: heads of q, rotated; keys, rotated, and values, to a row of caches or behind them."""

    device: torch.device
    dtype: torch.dtype
    angle_dtype: torch.dtype
    slot_dtype: torch.dtype | None  # None: rows of full caches move up by one
    sink_dtype: torch.dtype | None
    batch: int
    heads: int
    kv_heads: int
    rows: int  # of a cache, a sequence and head
    dims: tuple[int, int]  # of heads of q and keys, and of values
    pairs: int  # of the first channels of heads of q and keys, rotated
    steps: tuple[int, ...]  # between sequences, heads and rows of q, keys, values and caches; 0 if there is none
    angle_steps: tuple[int, ...]  # between sequences, of cos and of sin
    shared: tuple[bool, bool]  # whether all sequences have the angles, and the slot, of the first

    @property
    def empty(self) -> bool:
        """Whether there is nothing but sinks."""
        return self.batch * (self.heads * self.dims[0] + self.kv_heads * self.rows * sum(self.dims)) == 0


class AppendOperands(NamedTuple):
    """The tensors of one launch that appends."""

    q: torch.Tensor  # (B, Hq, D)
    key: torch.Tensor  # (B, Hkv, D)
    value: torch.Tensor  # (B, Hkv, Dv)
    k_cache: torch.Tensor  # (B, Hkv, S, D)
    v_cache: torch.Tensor  # (B, Hkv, S, Dv)
    cos: torch.Tensor  # (B, 1, R2) or (1, 1, R2)
    sin: torch.Tensor  # (B, 1, R2) or (1, 1, R2)
    slot: torch.Tensor | None  # (B,) or (1,)
    sink: torch.Tensor | None  # (Hq,)
    q_out: torch.Tensor  # (B, Hq, D), contiguous
    sink_out: torch.Tensor  # (Hq,) if there is a sink


def apart_from_caches(o: AppendOperands) -> AppendOperands:
    """``o``, with copies of heads that may overlap a cache, so that none is overwritten before it is read."""
    spans = [span(cache) for cache in (o.k_cache, o.v_cache)]

    def own(new: torch.Tensor) -> torch.Tensor:
        begin, end = span(new)
        return new.clone() if any(begin < last and first < end for first, last in spans) else new

    return o._replace(q=own(o.q), key=own(o.key), value=own(o.value))


def width_of(p: AppendProblem) -> int:
    """Elements of the widest vectors that sizes and strides of heads, caches and angles allow."""
    every = math.gcd(16 // p.dtype.itemsize, *p.dims, p.pairs, *p.steps, *p.angle_steps)
    return every & -every


def threads_of(p: AppendProblem, width: int) -> int:
    """Of a CTA: enough for a head, and to move rows of a full one."""
    vectors = max((p.dims[0] - p.pairs) // width, p.dims[1] // width, 1)
    return max(256 if p.slot_dtype is None else 64, -(-vectors // 32) * 32)


def appender(problem: AppendProblem, target: Target) -> Callable[[AppendOperands], None]:
    """What solves ``problem`` on ``target``. Tokens that may overlap a cache are copied first."""
    p = problem
    if p.empty:
        return _sinks_alone if p.sink_dtype else lambda operands: None

    def compiled(width: int) -> Callable[..., None]:
        dtypes = tuple(d and short(d) for d in (p.dtype, p.angle_dtype, p.slot_dtype, p.sink_dtype))
        return compile.launcher(
            target, p.device, trace_append, dims=p.dims, pairs=p.pairs, dtypes=dtypes, width=width,
            threads=threads_of(p, width),
        )  # fmt: skip

    width = width_of(p)
    wide, narrow = compiled(width), list[Callable[..., None]]()
    # The bits of no vector's address.
    odd, angle_odd = (min(16, width * d.itemsize) - 1 for d in (p.dtype, p.angle_dtype))
    steps = tuple(int(not shared) for shared in p.shared)

    def launch(operands: AppendOperands) -> None:
        o, run = apart_from_caches(operands), wide
        addresses = o.q.data_ptr() | o.key.data_ptr() | o.value.data_ptr() | o.k_cache.data_ptr() | o.v_cache.data_ptr()
        if addresses & odd or (o.cos.data_ptr() | o.sin.data_ptr()) & angle_odd:
            if not narrow:
                narrow.append(compiled(1))
            run = narrow[0]
        sinks = None if o.sink is None else (o.sink, o.sink_out)
        run(o[:3], o[3:5], o[5:7], o.slot, sinks, o.q_out, steps)

    return launch


def _sinks_alone(operands: AppendOperands) -> None:
    """The result where there are no sequences."""
    if operands.sink is not None:
        operands.sink_out.copy_(operands.sink)


def trace_append(arch: str, **signature: Any) -> compile.Traced:
    """Heads rotated, keys and values appended."""
    from . import append_kernel

    return append_kernel.trace(arch, **signature)
