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
    """A CTA has ``rows`` rows of the weight and all tokens; its warps share K in steps, each of which is ``parts``
    chunks of ``FEW_CHUNK`` numbers of a row."""

    groups: int  # of 8 tokens
    parts: int  # 2: operand A is 8 rows with two chunks each instead of 16 rows, for CTAs of half the size
    warps: int
    ahead: int  # steps that a warp has in flight

    @property
    def rows(self) -> int:
        return 16 // self.parts


FEW_CHUNK = 32
VECTOR = 8  # numbers of 16 bytes


def few(tokens: int, n: int, sms: int) -> FewConfig:
    """CTAs so small that all multiprocessors have about as many; more bytes in flight than memory needs cost time.

    H200, us for 1, 8 and 16 tokens (docs/lab/batched_gemm.md has the others): 2880 x 4096 in CTAs of 8 rows 7.8, 8.2,
    9.0, of 16 rows 8.1, 8.8, 10.2; 5120 x 2880 in these CTAs of 8 warps 10.2, 11.2, 13.7, as it is 8.8, 9.3, 10.7."""
    groups = -(-tokens // 8)
    ctas = -(-n // 8)
    if ctas <= 4 * sms:
        return FewConfig(groups, parts=2, warps=8, ahead=2 if groups == 1 or ctas <= sms else 1)
    return FewConfig(groups, parts=2, warps=4, ahead=3) if groups == 1 else FewConfig(groups, 1, warps=8, ahead=3)


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
