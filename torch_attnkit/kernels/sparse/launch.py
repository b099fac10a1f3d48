"""Host side of sparse attention on NVIDIA GPUs; FP4 results in one launch, or in two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.cuda.workspace import Workspace
from torch_attnkit.kernels.fp4.launch import rope_quantizer
from torch_attnkit.kernels.fp4.problem import Rotated
from torch_attnkit.kernels.scores import LOG2_E, MOST

from .problem import DenseResults, Fp4Results, Operands, Problem, QuantisedProblem
from .sm80 import plan as ampere
from .sm90 import plan as hopper
from .sm100 import plan as blackwell

# log2 of the growth of a row maximum that rescales O: half of float16's range above 1, so that sums of P stay exact.
# Where row_sum is a result, it belongs to the true maximum.
_RESCALE_THRESHOLD = 8.0


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``."""
    p = problem
    if p.tokens == 0 or p.heads == 0:
        return lambda operands: None
    plan: Any = {"sm90": hopper, "sm100": blackwell}.get(target.arch, ampere)
    cut = plan.plan(p, driver.sm_count(p.device))
    kernel = trace_mma if plan is ampere else trace
    run = compile.launcher(target, p.device, kernel, dtype=short(p.dtype), **cut.sizes)
    entries = p.entries if p.requests else 0
    scalars = (
        p.factor * LOG2_E, _RESCALE_THRESHOLD if p.normalize else 0.0, min(p.window, MOST), entries,
        min(p.listed, MOST) if entries else 0, max(1, p.tokens // max(1, p.requests)),
        int(p.has_list), int(p.has_length), int(p.has_requests), int(p.has_sink), int(p.normalize),
        p.requests, p.capacity,
        cut.head_blocks, cut.ctas, cut.groups, cut.concurrent,
    )  # fmt: skip

    workspace = Workspace(p.device, cut.floats, cut.counters) if cut.counters else None
    stand_in = torch.empty(p.heads, dtype=torch.float32, device=p.device)  # placeholder for absent float tensors

    def launch(operands: Operands) -> None:
        o = operands
        q = o.q if o.q.data_ptr() % 16 == 0 else _copy(o.q)
        near, far = (t if t is None or t.data_ptr() % p.align == 0 else _copy(t) for t in (o.near, o.far))
        far = near if far is None else far
        indices = o.end[:, None] if o.indices is None else o.indices
        near_table, far_table = (indices if t is None else t for t in (o.near_table, o.far_table))
        length, request = (o.end if t is None else t for t in (o.length, o.request))
        sink = stand_in if o.sink is None else o.sink
        splits, count = (stand_in, o.end) if workspace is None else workspace.get()
        global_scale = stand_in if o.global_scale is None else o.global_scale.view(1)
        tensors = (
            q, near, o.end, far, indices, length, request, sink, near_table, far_table, global_scale,
            _results(o.results, p.normalize, stand_in), splits, count,
        )  # fmt: skip
        run(tensors, scalars)

    return launch


def _results(results: DenseResults | Fp4Results, normalize: bool, stand_in: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As the kernel takes them."""
    if isinstance(results, Fp4Results):
        return (*results[:-1], stand_in if results.global_scale is None else results.global_scale.view(1))
    return (results.out, results.lse, results.lse if normalize else results.row_sum)


def _copy(t: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, for tensors whose address is not a multiple of 16 bytes, or of the row alignment."""
    return t.clone(memory_format=torch.contiguous_format)


def quantised_launcher(problem: QuantisedProblem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``."""
    if problem.attended.tokens * problem.attended.heads and _apart(problem.attended, target):
        return _unfused(problem, target)
    return launcher(problem.attended, target)


def _apart(problem: Problem, target: Target) -> bool:
    """Whether a second launch quantises: always by ``mma.sync``, never on Blackwell.

    Where a Hopper CTA has a work tile to itself, quantising in the epilogue idles its tensor cores: 17,000 cycles a
    work tile on an H200, 13,000 for MXFP4. Where CTAs split the keys, each quantises a share of the rows."""
    if target.arch != "sm90":
        return target.arch != "sm100"
    shared: bool = hopper.plan(problem, driver.sm_count(problem.device)).sizes["split_kv"]
    return not shared


def _unfused(problem: QuantisedProblem, target: Target) -> Callable[[Operands], None]:
    """Not fused: attention into a temporary 16-bit tensor, then a second launch that rotates back and quantises."""
    p = problem.attended
    attend = launcher(replace(p, fp4=None), target)
    quantise = rope_quantizer(problem.rotated, target)

    def launch(operands: Operands) -> None:
        codes = operands.results
        assert isinstance(codes, Fp4Results)
        out = torch.empty(p.tokens, p.heads, p.dim, dtype=p.dtype, device=codes.codes.device)  # (T, H, D)
        lse = torch.empty(p.tokens, p.heads, dtype=torch.float32, device=out.device)  # (T, H)
        attend(operands._replace(results=DenseResults(out, lse, lse)))
        quantise(Rotated(out, codes.cos, codes.sin, codes.global_scale, codes.codes, codes.scale))

    return launch


def trace(arch: str, **signature: Any) -> compile.Traced:
    """``<arch>/kernel.py``."""
    if arch == "sm90":
        from .sm90 import kernel as hopper_kernel

        return hopper_kernel.trace(arch, **signature)
    from .sm100 import kernel as blackwell_kernel

    return blackwell_kernel.trace(arch, **signature)


def trace_mma(arch: str, **signature: Any) -> compile.Traced:
    """``sm80/kernel.py``, for sm80, sm89 and sm120."""
    from .sm80 import kernel

    return kernel.trace(arch, **signature)
