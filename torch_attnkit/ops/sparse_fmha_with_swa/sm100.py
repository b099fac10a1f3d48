"""sparse_fmha_with_swa on Blackwell, whose kernel asks how the rows of the caches lie."""

from __future__ import annotations

from typing import Any

from torch_attnkit.core.family import solved_by
from torch_attnkit.core.op import Call
from torch_attnkit.kernels.sparse.launch import launcher
from torch_attnkit.kernels.sparse.problem import Operands
from torch_attnkit.kernels.sparse.sm100.plan import StridedProblem, with_row_layout, with_stand_ins

from . import problem as attention


def problem(call: Call) -> StridedProblem:
    return with_row_layout(attention.problem(call), call.arg.swa_kv, call.arg.compressed_kv)


def operands(*arguments: Any) -> Operands:
    return with_stand_ins(attention.operands(*arguments))


build = solved_by(launcher, problem, operands)
