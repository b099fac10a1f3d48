"""Host side of linear_decode on NVIDIA GPUs: the problem, how K is cut, the launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver


@dataclass(frozen=True)
class FewProblem:
    """``out[t] = weight @ x[t] + bias`` for at most ``MOST_FEW`` tokens."""

    device: torch.device
    dtype: torch.dtype
    tokens: int
    k: int
    n: int
    bias: bool


class FewOperands(NamedTuple):
    """The tensors of one launch for few tokens."""

    x: torch.Tensor  # (T, K)
    weight: torch.Tensor  # (N, K)
    bias: torch.Tensor | None  # (N,)
    out: torch.Tensor  # (T, N), contiguous


@dataclass(frozen=True)
class FewConfig:
    """Few tokens: a CTA has ``FEW_ROWS`` rows of the weight and ``groups`` of 8 tokens; its warps share K in steps of
    ``FEW_STEP``, of which each has ``ahead`` in flight."""

    groups: int
    warps: int
    ahead: int


FEW_ROWS, FEW_STEP = 16, 32
CHUNK = 8  # numbers of 16 bytes


def few(tokens: int, n: int, sms: int) -> FewConfig:
    """Where a CTA or two have an SM, more in flight. Counted, not measured."""
    groups = -(-tokens // 8)
    return FewConfig(groups, 8, 8 // groups if -(-n // FEW_ROWS) <= 2 * sms else 4 // groups)


def launcher(problem: FewProblem, target: Target) -> Callable[[FewOperands], None]:
    """What solves ``problem`` on ``target``. What does not begin at a multiple of 16 bytes is copied."""
    p = problem
    if p.tokens * p.n == 0:
        return lambda operands: None
    config = few(p.tokens, p.n, driver.sm_count(p.device))
    run = compile.launcher(target, p.device, trace_few, dtype=short(p.dtype), bias=p.bias, config=astuple(config))

    def whole(t: torch.Tensor) -> torch.Tensor:
        return t.clone() if t.data_ptr() & 15 else t

    return lambda o: run(whole(o.x), whole(o.weight), o.bias, o.out)


def trace_few(arch: str, **signature: Any) -> compile.Traced:
    """Few tokens, K cut inside of a CTA."""
    from . import few_kernel

    return few_kernel.trace(arch, **signature)
