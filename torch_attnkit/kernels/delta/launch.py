"""Host side of the gated delta rule on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile

from .problem import StepOperands, StepProblem

VECTOR = 4  # elements of q, k and the state that a lane loads at once
LANES = 8  # that have a row of the state together
MOST_DIM = 256  # of a key's head: a lane holds K / 8 numbers of a row, and as many of q and k


def step(problem: StepProblem, target: Target) -> Callable[[StepOperands], None]:
    """What solves ``problem`` on ``target``. Heads of q and k that start between vectors are copied first."""
    p = problem
    if p.empty:
        return lambda operands: None

    def compiled(aligned: bool) -> Callable[..., None]:
        return compile.launcher(
            target, p.device, trace_step, dtypes=(short(p.dtype), *map(short, p.gate_dtypes)), dims=p.dims,
            tokens=p.tokens, normalized=p.normalized, accepted=p.accepted, aligned=aligned,
        )  # fmt: skip

    runs = {p.state_aligned: compiled(p.state_aligned)}
    group = p.heads // p.key_heads
    odd = VECTOR * p.dtype.itemsize - 1

    def whole(t: torch.Tensor) -> torch.Tensor:
        return t if p.aligned and not t.data_ptr() & odd else t.contiguous().clone()

    def launch(o: StepOperands) -> None:
        heads, gates = (whole(o.q), whole(o.k), o.v), (o.a, o.b, o.a_log, o.dt_bias)
        aligned = p.state_aligned and o.state.data_ptr() % 16 == 0
        if aligned not in runs:
            runs[aligned] = compiled(aligned)
        runs[aligned](heads, gates, o.state, o.state_index, o.accepted, o.out, group, (p.scale, p.eps, p.beta_scale))

    return launch


def trace_step(arch: str, **signature: Any) -> compile.Traced:
    """``kernel.py``."""
    from . import kernel

    return kernel.trace(arch, **signature)
