"""Host side of sparse attention whose results are FP4, for NVIDIA GPUs: one launch, or two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from torch_attnkit.core.target import Target
from torch_attnkit.cuda import driver

from ..fp4.launch import rope_quantizer
from ..fp4.problem import Rotate, Rotated
from . import launch as attention
from .problem import Codes, Numbers, Operands, Problem
from .sm90.plan import plan


@dataclass(frozen=True)
class Quantised:
    """Attention with results in FP4, and the same as numbers that another launch rotates back and quantises."""

    attended: Problem
    rotated: Rotate


def launcher(problem: Quantised, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``."""
    if problem.attended.tokens * problem.attended.heads and _apart(problem.attended, target):
        return _in_turn(problem, target)
    return attention.launcher(problem.attended, target)


def _apart(problem: Problem, target: Target) -> bool:
    """Whether another launch quantises.

    Where a CTA of Hopper has a work tile to itself, its tensor cores rest while consumers make codes: on an H200 for
    17,000 cycles of each work tile, in MXFP4 13,000. Where CTAs share one, each has a share of its rows.
    """
    if target.arch != "sm90":
        return False
    shared: bool = plan(problem, driver.sm_count(problem.device)).sizes["merge"]
    return not shared


def _in_turn(problem: Quantised, target: Target) -> Callable[[Operands], None]:
    """Numbers into memory of the call's own, and a launch behind that quantises them."""
    p = problem.attended
    attend = attention.launcher(replace(p, fp4=None), target)
    quantise = rope_quantizer(problem.rotated, target)

    def launch(operands: Operands) -> None:
        codes = operands.results
        assert isinstance(codes, Codes)
        out = torch.empty(p.tokens, p.heads, p.dim, dtype=p.dtype, device=codes.codes.device)  # (T, H, D)
        lse = torch.empty(p.tokens, p.heads, dtype=torch.float32, device=out.device)  # (T, H)
        attend(operands._replace(results=Numbers(out, lse, lse)))
        quantise(Rotated(out, codes.cos, codes.sin, codes.global_scale, codes.codes, codes.scale))

    return launch
