"""The gated delta rule on Metal: packed sequences, token by token, ``csrc/metal/gated_delta_rule.metal``."""

from __future__ import annotations

from collections.abc import Callable

from torch_attnkit.core.target import Target
from torch_attnkit.mps import launch as metal
from torch_attnkit.mps import library

from .rule_problem import RuleOperands, RuleProblem

_ROWS = 8  # of a simdgroup
_SIMDGROUPS = 4
_ELEMENTS = 4096  # of keys and queries together in threadgroup memory


def rule(source: str, problem: RuleProblem, target: Target) -> Callable[[RuleOperands], None]:
    """What solves ``problem`` with the kernel of ``csrc/metal/<source>.metal``."""
    p = problem
    if p.tokens * p.heads * p.dims[1] == 0:
        return lambda operands: None
    shape = [p.heads // p.key_heads, p.slots, p.batch, p.tokens, int(p.past), *p.steps, *p.small_steps[:4]]
    shape += [*p.state_steps, *p.small_steps[4:]]

    def variant(width: int) -> metal.Launch:
        simds = _SIMDGROUPS
        while True:
            built = library.load(
                source, target, TYPE=p.dtype, BETA_TYPE=p.beta_dtype, DIM=p.dims[0], DIM_V=p.dims[1],
                NORMALIZED=p.normalized, BLOCK=min(16, _ELEMENTS // (2 * p.dims[0])), SIMDS=simds, WIDTH=width,
            )  # fmt: skip
            limit = metal.most_simdgroups(built, source)
            if simds <= limit:
                break
            simds = limit
        grid = (-(-p.dims[1] // (_ROWS * simds)), p.heads, p.batch + 1)
        return metal.launcher(built, source, grid, simds * metal.SIMD)

    run = metal.by_alignment(variant, (*p.steps[:4], *p.state_steps))  # of q, k and the state

    def launch(o: RuleOperands) -> None:
        past = metal.bound(o.past, o.state)
        run((o.q, o.k, o.state), (*o[:8], past, o.out, shape, p.scale, p.eps))

    return launch
