"""Host side of the routed experts for NVIDIA GPUs: plan, kernels, workspace, launch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from torch_attnkit.core import memory
from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.cuda.workspace import Workspace

from .problem import CONTIGUOUS, LINEAR, PADDED, Operands, Problem, Weights
from .sm90 import plan as hopper
from .sm90.config import SHARED, SHARED_SMALL
from .sm100 import plan as blackwell
from .sm120 import plan as geforce

_WITH_BULK_COPIES = "sm90", "sm120"  # by ``mma.sync``: the same kernel
_AMPERE = partial(hopper.by_mma, shared=SHARED_SMALL, bulk=False)
_PLANS: dict[str, Callable[[Problem, int], Any]] = {
    "sm80": _AMPERE,
    "sm89": _AMPERE,
    "sm90": hopper.plan,
    "sm100": blackwell.plan,
    "sm120": geforce.plan,
}


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``."""
    p = problem
    if p.tokens == 0 or p.hidden == 0:
        return lambda operands: None
    if p.slots == 0 or p.experts == 0:
        return _zero_out
    plan = _PLANS[target.arch](p, driver.sm_count(p.device))

    def compiled(vectors: tuple[int, int]) -> Callable[..., None]:
        kernel: compile.Trace = trace
        if target.arch == "sm120" and isinstance(plan, blackwell.Plan):
            kernel, special = trace_block_scaled, dict[str, Any](columns=plan.columns[0])
        elif plan.token_widths:
            kernel = trace_wgmma
            special = dict(token_widths=plan.token_widths, group=plan.group, warps=plan.row_warps)
        else:
            special = dict(columns=plan.columns, row_warps=plan.row_warps, by_warp=plan.by_warp)
            if target.arch in _WITH_BULK_COPIES:
                special["one_launch"] = plan.one_launch
        return compile.launcher(
            target, p.device, kernel, dtype=short(p.dtype), index_dtype=short(p.index_dtype),
            format=p.format, activations=p.activations, experts=plan.experts, scale_vectors=vectors,
            code_alignment=plan.code_alignment, **special,
        )  # fmt: skip

    vectors = plan.scale_vectors
    aligned = plan.scale_alignments
    wide = compiled(vectors)
    narrow: list[Callable[..., None]] = []
    counters = math.prod(plan.counters)
    workspace = Workspace(p.device, 1, counters)
    rows = [_rows_of_scales(p, w) for w in (p.up, p.down)]
    limit = float("inf") if p.limit is None else p.limit
    scalars = int(p.swiglu == "gptoss"), p.alpha, limit

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return memory.empty(shape, dtype=dtype, device=p.device)

    def launch(operands: Operands) -> None:
        o = operands
        one, count = workspace.get()
        x_rows, h_rows = empty(torch.bfloat16, *plan.x_rows), empty(torch.bfloat16, *plan.h_rows)
        x, w13, w2 = _aligned(o.x), *(_aligned(w, plan.code_alignment) for w in (o.w13, o.w2))
        run = wide
        if o.w13_scale.data_ptr() % aligned[0] or o.w2_scale.data_ptr() % aligned[1]:
            if not narrow:
                narrow.append(compiled((1, 1)))
            run = narrow[0]
        up = _matrices(w13, o.w13_scale, o.bias13, o.w13_global, o.x_global, x, one)
        down = _matrices(w2, o.w2_scale, o.bias2, o.w2_global, o.h_global, x, one)
        tensors = (
            x, o.weights, o.indices, up, down, o.out, empty(torch.int32, 2 * p.slots),
            empty(torch.int32, plan.tiles + 1, 4), h_rows,
            empty(torch.float32, p.slots, p.hidden), count[:counters].view(plan.counters),
        )  # fmt: skip
        flags = (
            (*(int(t is not None) for t in three), kind, int(p.interleaved))
            for kind, *three in (
                (rows[0], o.bias13, o.w13_global, o.x_global),
                (rows[1], o.bias2, o.w2_global, o.h_global),
            )
        )
        run(tensors, x_rows, (*flags, *scalars), *plan.blocks)

    return launch


def _rows_of_scales(problem: Problem, weights: Weights) -> int:
    """The layout of a matrix' scales in memory."""
    if problem.scale_layout == "linear":
        return LINEAR
    return CONTIGUOUS if weights.scale_row == weights.scale_columns else PADDED


def _zero_out(operands: Operands) -> None:
    """The result where no token has a choice."""
    operands.out.zero_()


def _matrices(
    packed: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, divisor: torch.Tensor | None,
    activation: torch.Tensor | None, matrix: torch.Tensor, vector: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The weights of a GEMM. ``matrix`` and ``vector`` are placeholders for absent tensors, never read."""
    return (
        packed,
        scale if scale.dtype is torch.uint8 else scale.view(torch.uint8),
        matrix if bias is None else bias,
        vector if divisor is None else divisor,
        vector if activation is None else activation.view(1),
    )


def _aligned(t: torch.Tensor, nbytes: int = 16) -> torch.Tensor:
    """A copy of what does not start, row by row, at multiples of so many bytes. Weights' rows do; a view of them may
    begin anywhere, and then costs a copy of all of them with every call."""
    if t.data_ptr() % nbytes or any(step * t.itemsize % nbytes for step in t.stride()[:-1]):
        return t.clone(memory_format=torch.contiguous_format)
    return t


def trace(arch: str, **signature: Any) -> compile.Traced:
    """Few tokens an expert on Hopper; any elsewhere."""
    if arch in _WITH_BULK_COPIES:
        from .sm90 import kernel_mma

        return kernel_mma.trace(arch, shared=SHARED if arch == "sm90" else SHARED_SMALL, **signature)
    if arch in ("sm80", "sm89"):
        from .sm80 import kernel as ampere

        return ampere.trace(arch, **signature)
    from .sm100 import kernel

    return kernel.trace(arch, **signature)


def trace_wgmma(arch: str, **signature: Any) -> compile.Traced:
    """Many tokens an expert on Hopper."""
    from .sm90 import kernel_wgmma

    return kernel_wgmma.trace(arch, **signature)


def trace_block_scaled(arch: str, **signature: Any) -> compile.Traced:
    """Many tokens an expert on sm120, activations in the format of the weights."""
    from .sm120 import kernel

    return kernel.trace(arch, **signature)
