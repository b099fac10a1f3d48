"""The gated delta rule on Metal: a few tokens of each sequence, ``csrc/metal/gated_delta_step.metal``."""

from __future__ import annotations

from collections.abc import Callable

from torch_attnkit.core.target import Target
from torch_attnkit.mps import launch as metal
from torch_attnkit.mps import library

from .problem import StepOperands, StepProblem

VECTOR = 16  # channels of a key's head that the four lanes of a row have at a time
_ROWS = 8  # of a simdgroup
_SIMDGROUPS = 4


def step(source: str, problem: StepProblem, target: Target) -> Callable[[StepOperands], None]:
    """What solves ``problem`` with the kernel of ``csrc/metal/<source>.metal``."""
    p = problem
    if p.empty:
        return lambda operands: None
    shape = [p.heads // p.key_heads, p.slots, int(p.accepted), *p.steps]

    def variant(width: int) -> metal.Launch:
        log_type, bias_type = p.gate_dtypes
        simds = _SIMDGROUPS
        while True:
            built = library.load(
                source, target, TYPE=p.dtype, LOG_TYPE=log_type, BIAS_TYPE=bias_type, TOKENS=p.tokens, DIM=p.dims[0],
                DIM_V=p.dims[1], NORMALIZED=p.normalized, SIMDS=simds, WIDTH=width,
            )  # fmt: skip
            limit = metal.most_simdgroups(built, source)
            if simds <= limit:
                break
            simds = limit
        grid = (-(-p.dims[1] // (_ROWS * simds)), p.heads, p.batch)
        return metal.launcher(built, source, grid, simds * metal.SIMD)

    run = metal.by_alignment(variant, (*p.steps[:6], *p.steps[15:18]))  # of q, k and the state

    def launch(o: StepOperands) -> None:
        accepted = metal.bound(o.accepted, o.state)
        tensors = (*o[:9], accepted, o.out)
        run((o.q, o.k, o.state), (*tensors, shape, p.scale, p.eps, p.beta_scale))

    return launch
