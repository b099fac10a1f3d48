"""Host side of the gated delta rule, and of the convolution ahead of it, on NVIDIA GPUs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.cuda.limits import LIMITS

from .problem import VECTOR, ConvOperands, ConvProblem, RuleOperands, RuleProblem, StepOperands, StepProblem
from .sm80.config import configure

LANES = 8  # that have a row of the state together
MOST_DIM = 256  # of a key's head: a lane holds K / 8 numbers of a row, and as many of q and k
CHANNELS = 4  # of the convolution that a thread has in prompts
_BYTES = 16  # of a load


def step(problem: StepProblem, target: Target) -> Callable[[StepOperands], None]:
    """What solves ``problem`` on ``target``. Heads of q and k that start between vectors are copied first."""
    p = problem
    if p.empty:
        return lambda operands: None

    of_channels = dict(channels=True, bounded=p.lower_bound is not None) if p.channels else {}

    def compiled(aligned: bool) -> Callable[..., None]:
        return compile.launcher(
            target, p.device, trace_step, dtypes=(short(p.dtype), *map(short, p.gate_dtypes)), dims=p.dims,
            tokens=p.tokens, normalized=p.normalized, accepted=p.accepted, aligned=aligned, **of_channels,
        )  # fmt: skip

    runs = {p.state_aligned: compiled(p.state_aligned)}
    group, scalars = p.heads // p.key_heads, (p.scale, p.eps, p.gate_scalar)
    odd = VECTOR * p.dtype.itemsize - 1

    def whole(t: torch.Tensor) -> torch.Tensor:
        return t if p.aligned and not t.data_ptr() & odd else t.contiguous().clone()

    def launch(o: StepOperands) -> None:
        heads, gates = (whole(o.q), whole(o.k), o.v), (o.a, o.b, o.a_log, o.dt_bias)
        aligned = p.state_aligned and o.state.data_ptr() % 16 == 0
        if aligned not in runs:
            runs[aligned] = compiled(aligned)
        runs[aligned](heads, gates, o.state, o.state_index, o.accepted, o.out, group, scalars)

    return launch


def trace_step(arch: str, **signature: Any) -> compile.Traced:
    """``kernel.py``."""
    from . import kernel

    return kernel.trace(arch, **signature)


def rule(problem: RuleProblem, target: Target) -> Callable[[RuleOperands], None]:
    """What solves ``problem`` on ``target``. Heads of q, k and v that do not start at multiples of 16 bytes are copied
    first."""
    p = problem
    if p.empty:
        return lambda operands: None
    config = configure(p.dims, p.heads * p.batch, p.normalized, p.past, LIMITS[target.arch], driver.sm_count(p.device))
    run = compile.launcher(
        target, p.device, trace_rule, dtype=short(p.dtype), beta_dtype=short(p.beta_dtype), config=astuple(config)
    )
    aligned = all(step % 8 == 0 for step in p.steps)

    def whole(t: torch.Tensor) -> torch.Tensor:
        return t if aligned and not t.data_ptr() & 15 else t.contiguous().clone()

    def launch(o: RuleOperands) -> None:
        heads = whole(o.q), whole(o.k), whole(o.v)
        sequences = o.cu_seqlens, o.state_index, o.past
        run(heads, (o.g, o.beta), o.state, sequences, o.out, p.heads // p.key_heads, (p.scale, p.eps))

    return launch


def trace_rule(arch: str, **signature: Any) -> compile.Traced:
    """``sm80/kernel.py``."""
    from .sm80 import kernel

    return kernel.trace(arch, **signature)


def conv(problem: ConvProblem, target: Target) -> Callable[[ConvOperands], None]:
    """What solves ``problem`` on ``target``. A thread has one channel where x and out do not allow more."""
    p = problem
    if p.empty:
        return lambda operands: None
    channels, length = thread_tile(p)
    size, most = p.dtype.itemsize, _BYTES // p.dtype.itemsize if p.short else CHANNELS
    even = p.channels % channels == 0 and p.steps[0] % channels == 0
    of_weight, of_state = (math.gcd(channels * count, most) for count in (p.width, p.columns))
    pieces = (
        of_weight if even and p.steps[2:4] == (p.width, 1) else 1,
        of_state if even and p.steps[5:7] == (p.columns, 1) and p.steps[4] % of_state == 0 else 1,
    )

    @functools.cache
    def compiled(vector: int, pieces: tuple[int, int]) -> Callable[..., None]:
        return compile.launcher(
            target, p.device, trace_conv, dtype=short(p.dtype), width=p.width, columns=p.columns, vector=vector,
            length=length, ordered=p.short, pieces=pieces, silu=p.silu, bias=p.bias, past=p.past,
        )  # fmt: skip

    compiled(channels if even else 1, pieces)

    def launch(o: ConvOperands) -> None:
        wide = even and (o.x.data_ptr() | o.out.data_ptr()) % (channels * size) == 0
        of_these = tuple(
            piece if wide and t.data_ptr() % (piece * size) == 0 else 1
            for piece, t in zip(pieces, (o.weight, o.conv_state), strict=True)
        )
        sequences = o.cu_seqlens, o.state_index, o.past
        compiled(channels if wide else 1, of_these)(o.x, o.weight, o.conv_state, sequences, o.bias, o.out, p.runs)

    return launch


def thread_tile(p: ConvProblem) -> tuple[int, int]:
    """Channels that a thread has, and tokens that it loads at a time. In steps its state is one load where it can be:
    those of a warp lie one behind the other."""
    if not p.short:
        return CHANNELS, p.run
    state = p.columns * p.dtype.itemsize
    return CHANNELS if _BYTES % state else _BYTES // state, 1 if p.tokens <= p.batch else p.run


def trace_conv(arch: str, **signature: Any) -> compile.Traced:
    """``conv_kernel.py``."""
    from . import conv_kernel

    return conv_kernel.trace(arch, **signature)
