"""Host side of queries at the end of a cache of E4M3 on Hopper.

Few of them share work tiles with the other heads of their KV head (``multi_codes.py``), many are a dense batch.
"""

from __future__ import annotations

from collections.abc import Callable

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from ..problem import Operands, Problem
from . import cached, codes_launch, multi_codes_plan

_KERNEL = "torch_attnkit.kernels.prefill.sm90.multi_codes_kernel"


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem``, whose K and V are caches (B, Hkv, S, D)."""
    p = problem
    if p.batch * p.queries * p.heads == 0 or multi_codes_plan.serves(p, driver.sm_count(p.device)):
        return cached.launcher_of(p, target, _KERNEL, multi_codes_plan)
    attend = codes_launch.launcher(p, target)
    if p.causal:
        return attend
    clear = compile.launcher(target, p.device, "torch_attnkit.kernels.prefill.sm90.unplaced", dtype=short(p.out_dtype))

    def launch(o: Operands) -> None:
        attend(o)
        clear(o.out, o.lse, o.kv_len, p.keys)

    return launch
