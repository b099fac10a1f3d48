"""Host side of sparse attention for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.cuda.workspace import Workspace

from ..scores import LOG2_E, MOST
from .problem import Codes, Numbers, Operands, Problem
from .sm90 import plan as hopper
from .sm100 import plan as blackwell

# Powers of two by which maxima grow before the output is rescaled: half of what float16 has above 1, so that sums of
# probabilities are as exact as ever. Sums that are results belong to the maxima themselves.
_LAG = 8.0


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``."""
    p = problem
    if p.tokens == 0 or p.heads == 0:
        return lambda operands: None
    plan: Any = hopper if target.arch == "sm90" else blackwell
    cut = plan.plan(p, driver.sm_count(p.device))
    run = compile.launcher(target, p.device, trace, dtype=short(p.dtype), **cut.sizes)
    entries = p.entries if p.requests else 0
    numbers = (
        p.factor * LOG2_E, _LAG if p.normalize else 0.0, min(p.window, MOST), entries,
        min(p.listed, MOST) if entries else 0, max(1, p.tokens // max(1, p.requests)),
        int(p.has_list), int(p.has_length), int(p.has_requests), int(p.has_sink), int(p.normalize),
        p.requests, p.capacity,
        cut.head_blocks, cut.ctas, cut.groups, cut.together,
    )  # fmt: skip

    workspace = Workspace(p.device, cut.floats, cut.counters) if cut.counters else None
    stand_in = torch.empty(p.heads, dtype=torch.float32, device=p.device)  # for floats that a call does not have

    def launch(operands: Operands) -> None:
        o = operands
        q = o.q if o.q.data_ptr() % 16 == 0 else _copy(o.q)
        near, far = (t if t is None or t.data_ptr() % p.align == 0 else _copy(t) for t in (o.near, o.far))
        far = near if far is None else far
        chosen = o.end[:, None] if o.chosen is None else o.chosen
        near_table, far_table = (chosen if t is None else t for t in (o.near_table, o.far_table))
        length, request = (o.end if t is None else t for t in (o.length, o.request))
        sink = stand_in if o.sink is None else o.sink
        splits, count = (stand_in, o.end) if workspace is None else workspace.get()
        global_scale = stand_in if o.global_scale is None else o.global_scale.view(1)
        tensors = (
            q, near, o.end, far, chosen, length, request, sink, near_table, far_table, global_scale,
            _results(o.results, p.normalize, stand_in), splits, count,
        )  # fmt: skip
        run(tensors, numbers)

    return launch


def _results(results: Numbers | Codes, normalize: bool, stand_in: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As the kernel takes them."""
    if isinstance(results, Codes):
        return (*results[:-1], stand_in if results.global_scale is None else results.global_scale.view(1))
    return (results.out, results.lse, results.lse if normalize else results.row_sum)


def _copy(t: torch.Tensor) -> torch.Tensor:
    """One that starts where the kernel reads, at a multiple of 16 bytes or of what its rows are aligned to: the plan
    does not know where memory begins."""
    return t.clone(memory_format=torch.contiguous_format)


def trace(arch: str, **signature: Any) -> compile.Traced:
    """``<arch>/kernel.py``."""
    if arch == "sm90":
        from .sm90 import kernel as hopper_kernel

        return hopper_kernel.trace(arch, **signature)
    from .sm100 import kernel as blackwell_kernel

    return blackwell_kernel.trace(arch, **signature)
