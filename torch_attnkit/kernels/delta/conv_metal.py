"""causal_conv1d on Metal, ``csrc/metal/causal_conv1d.metal``."""

from __future__ import annotations

from collections.abc import Callable

from torch_attnkit.core.target import Target
from torch_attnkit.mps import launch as metal
from torch_attnkit.mps import library

from .conv_problem import RUN, ConvOperands, ConvProblem

_SIMDGROUPS = 4


def conv(source: str, problem: ConvProblem, target: Target) -> Callable[[ConvOperands], None]:
    """What solves ``problem`` with the kernel of ``csrc/metal/<source>.metal``."""
    p = problem
    if p.empty:
        return lambda operands: None
    built = library.load(
        source, target, TYPE=p.dtype, TAPS=p.width, COLUMNS=p.columns, RUN=RUN, SILU=p.silu, BIAS=p.bias
    )
    simds = min(_SIMDGROUPS, metal.most_simdgroups(built, source))
    shape = [p.tokens, p.channels, p.batch, p.slots, int(p.past), *p.steps, p.past_step, p.bias_step]
    run = metal.launcher(built, source, (-(-p.channels // (32 * simds)), p.batch + 1, p.runs), simds * metal.SIMD)

    def launch(o: ConvOperands) -> None:
        bias, past = metal.bound(o.bias, o.x), metal.bound(o.past, o.cu_seqlens)
        run((*o[:5], bias, past, o.out, shape))

    return launch
