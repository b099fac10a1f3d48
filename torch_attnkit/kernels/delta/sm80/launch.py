"""Host side of gated_delta_rule on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.cuda.limits import LIMITS

from ..rule_problem import RuleOperands, RuleProblem
from .config import configure


def rule(problem: RuleProblem, target: Target) -> Callable[[RuleOperands], None]:
    """What solves ``problem`` on ``target``. Heads of q, k and v that do not start at multiples of 16 bytes are copied
    first."""
    p = problem
    if p.tokens * p.heads * p.dims[1] == 0:
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
    """``kernel.py``."""
    from . import kernel

    return kernel.trace(arch, **signature)
