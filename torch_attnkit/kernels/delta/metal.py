"""The gated delta rule and the convolution ahead of it on Metal: ``csrc/metal/gated_delta_step.metal``,
``kimi_delta_step.metal``, ``gated_delta_rule.metal`` and ``causal_conv1d.metal``."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch_attnkit.core.target import Target
from torch_attnkit.mps import launch as metal
from torch_attnkit.mps import library

from .problem import ConvOperands, ConvProblem, RuleOperands, RuleProblem, StepOperands, StepProblem

VECTOR = 16  # channels of a key's head that the four lanes of a row have at a time
_ROWS = 8  # of a simdgroup
_SIMDGROUPS = 4
_STEP = "delta_step"  # the kernel of both steps
_ELEMENTS = 4096  # of keys and queries together in threadgroup memory


def step(source: str, problem: StepProblem, target: Target) -> Callable[[StepOperands], None]:
    """What solves ``problem`` with the kernel of ``csrc/metal/<source>.metal``."""
    p = problem
    if p.empty:
        return lambda operands: None
    shape = [p.heads // p.key_heads, p.slots, int(p.accepted), *p.steps]

    def variant(width: int) -> metal.Launch:
        log_type, bias_type = p.gate_dtypes
        build = functools.partial(
            library.load, source, target, TYPE=p.dtype, LOG_TYPE=log_type, BIAS_TYPE=bias_type, TOKENS=p.tokens,
            DIM=p.dims[0], DIM_V=p.dims[1], NORMALIZED=p.normalized, WIDTH=width,
            **(dict(BOUNDED=p.lower_bound is not None) if p.channels else {}),
        )  # fmt: skip
        built, simds = _fitted(_STEP, build)
        grid = (-(-p.dims[1] // (_ROWS * simds)), p.heads, p.batch)
        return metal.launcher(built, _STEP, grid, simds * metal.SIMD)

    of_state = 16 if p.channels else 15
    run = metal.by_alignment(variant, (*p.steps[:6], *p.steps[of_state : of_state + 3]))  # of q, k and the state

    def launch(o: StepOperands) -> None:
        accepted = metal.bound(o.accepted, o.state)
        tensors = (*o[:6], o.dt_bias.contiguous(), *o[7:9], accepted, o.out)
        run((o.q, o.k, o.state), (*tensors, shape, p.scale, p.eps, p.gate_scalar))

    return launch


def rule(source: str, problem: RuleProblem, target: Target) -> Callable[[RuleOperands], None]:
    """What solves ``problem`` with the kernel of ``csrc/metal/<source>.metal``."""
    p = problem
    if p.empty:
        return lambda operands: None
    shape = [p.heads // p.key_heads, p.slots, p.batch, p.tokens, int(p.past), *p.steps, *p.small_steps[:4]]
    shape += [*p.state_steps, *p.small_steps[4:]]

    def variant(width: int) -> metal.Launch:
        build = functools.partial(
            library.load, source, target, TYPE=p.dtype, BETA_TYPE=p.beta_dtype, DIM=p.dims[0], DIM_V=p.dims[1],
            NORMALIZED=p.normalized, BLOCK=min(16, _ELEMENTS // (2 * p.dims[0])), WIDTH=width,
        )  # fmt: skip
        built, simds = _fitted(source, build)
        grid = (-(-p.dims[1] // (_ROWS * simds)), p.heads, p.batch + 1)
        return metal.launcher(built, source, grid, simds * metal.SIMD)

    run = metal.by_alignment(variant, (*p.steps[:4], *p.state_steps))  # of q, k and the state

    def launch(o: RuleOperands) -> None:
        past = metal.bound(o.past, o.state)
        run((o.q, o.k, o.state), (*o[:8], past, o.out, shape, p.scale, p.eps))

    return launch


def conv(source: str, problem: ConvProblem, target: Target) -> Callable[[ConvOperands], None]:
    """What solves ``problem`` with the kernel of ``csrc/metal/<source>.metal``."""
    p = problem
    if p.empty:
        return lambda operands: None
    built = library.load(
        source, target, TYPE=p.dtype, TAPS=p.width, COLUMNS=p.columns, RUN=p.run, SILU=p.silu, BIAS=p.bias
    )
    simds = min(_SIMDGROUPS, metal.most_simdgroups(built, source))
    shape = [p.tokens, p.channels, p.batch, p.slots, int(p.past), *p.steps, p.past_step, p.bias_step]
    run = metal.launcher(built, source, (-(-p.channels // (32 * simds)), p.batch + 1, p.runs), simds * metal.SIMD)

    def launch(o: ConvOperands) -> None:
        bias, past = metal.bound(o.bias, o.x), metal.bound(o.past, o.cu_seqlens)
        run((*o[:5], bias, past, o.out, shape))

    return launch


def _fitted(kernel: str, build: Callable[..., library.Library]) -> tuple[library.Library, int]:
    """What ``build(SIMDS=...)`` compiles for as many simdgroups of a threadgroup as its pipeline takes, and their
    number."""
    simds = _SIMDGROUPS
    while True:
        built = build(SIMDS=simds)
        limit = metal.most_simdgroups(built, kernel)
        if simds <= limit:
            return built, simds
        simds = limit
