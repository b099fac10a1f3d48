"""A call of merge_partials as a problem of the merge kernels."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.merge.problem import Operands, Problem


def problem(call: Call) -> Problem:
    a, d = call.arg, call.dim
    return Problem(
        call.dtype, a.dtype or call.dtype, call.device, d["P"], d["R"], d["H"], d["Dv"],
        part=a.out_partial.stride(),
        lse=a.lse_partial.stride(),
        row_sum=None if a.row_sum is None else a.row_sum.stride(),
        sink=a.sink is not None,
    )  # fmt: skip


def operands(out_partial, lse_partial, sink, row_sum, dtype, out, lse) -> Operands:
    return Operands(out_partial, lse_partial, sink, row_sum, out, lse)
