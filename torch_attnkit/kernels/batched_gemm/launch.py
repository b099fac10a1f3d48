"""Host side of the products of groups for NVIDIA GPUs. Imports no cutlass."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile

from .plan import CHUNK, configure
from .problem import Operands, Problem


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``. Operands whose rows do not start at multiples of 16 bytes are copied."""
    p = problem
    if p.tokens * p.groups * p.n == 0:
        return lambda operands: None
    if p.k == 0:
        return _nothing
    c = configure(p.tokens)
    run = compile.launcher(
        target,
        p.device,
        "torch_attnkit.kernels.batched_gemm.kernel",
        dtypes=(short(p.dtype), short(p.out_dtype)),
        even=p.n % 2 == 0,
        config=(c.tokens, c.n, c.warps, c.stages),
    )
    x_fits, weight_fits = (all(n % CHUNK == 0 for n in (p.k, *steps)) for steps in (p.x, p.weight))

    def launch(operands: Operands) -> None:
        x, weight, out = operands
        run(_aligned(x, x_fits), _aligned(weight, weight_fits), out)

    return launch


def _nothing(operands: Operands) -> None:
    """The sums of no products."""
    operands.out.zero_()


def _aligned(t: torch.Tensor, fits: bool) -> torch.Tensor:
    """``t``, or a copy with zeros behind each row: rows of whole chunks, at multiples of one. Zeros add nothing."""
    if fits and t.data_ptr() % (CHUNK * t.itemsize) == 0:
        return t
    return torch.nn.functional.pad(t, (0, -t.shape[-1] % CHUNK)).clone(memory_format=torch.contiguous_format)
