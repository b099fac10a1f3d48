"""sparse_fmha_inverse_rope_fp4 on Blackwell, whose kernel asks how the rows of the caches lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch_attnkit.core.family import solved_by
from torch_attnkit.core.op import Call
from torch_attnkit.kernels.sparse.problem import Operands
from torch_attnkit.kernels.sparse.quantised import Quantised, launcher
from torch_attnkit.kernels.sparse.sm100.problem import located, standing_in

from . import problem as quantised


def problem(call: Call) -> Quantised:
    found = quantised.problem(call)
    return replace(found, attended=located(found.attended, call.arg.swa_kv, call.arg.compressed_kv))


def operands(*arguments: Any) -> Operands:
    return standing_in(quantised.operands(*arguments))


build = solved_by(launcher, problem, operands)
