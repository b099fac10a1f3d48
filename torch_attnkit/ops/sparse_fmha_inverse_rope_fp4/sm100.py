"""sparse_fmha_inverse_rope_fp4 on Blackwell, whose kernel asks how the rows of the caches lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch_attnkit.core.family import solved_by
from torch_attnkit.core.op import Call
from torch_attnkit.kernels.sparse.launch import quantised_launcher
from torch_attnkit.kernels.sparse.problem import Operands, QuantisedProblem
from torch_attnkit.kernels.sparse.sm100.plan import with_row_layout, with_stand_ins

from . import problem as quantised


def problem(call: Call) -> QuantisedProblem:
    found = quantised.problem(call)
    return replace(found, attended=with_row_layout(found.attended, call.arg.swa_kv, call.arg.compressed_kv))


def operands(*arguments: Any) -> Operands:
    return with_stand_ins(quantised.operands(*arguments))


build = solved_by(quantised_launcher, problem, operands)
