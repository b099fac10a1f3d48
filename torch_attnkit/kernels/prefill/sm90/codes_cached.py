"""Host side of queries at the end of a cache of E4M3 on Hopper. Imports no cutlass."""

from __future__ import annotations

from collections.abc import Callable

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile

from ..problem import Operands, Problem
from . import codes_launch


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem``, whose K and V are caches (B, Hkv, S, D)."""
    p, attend = problem, codes_launch.launcher(problem, target)
    if p.causal or p.batch * p.queries * p.heads == 0:
        return attend
    clear = compile.launcher(target, p.device, "torch_attnkit.kernels.prefill.sm90.unplaced", dtype=short(p.out_dtype))

    def launch(o: Operands) -> None:
        attend(o)
        clear(o.out, o.lse, o.kv_len, p.keys)

    return launch
