"""sparse_fmha_inverse_rope_fp4 on Metal: the kernels are the family ``kernels/sparse``."""

from __future__ import annotations

from collections.abc import Callable

from torch_attnkit.core.op import Call
from torch_attnkit.core.target import Target
from torch_attnkit.kernels.sparse import metal
from torch_attnkit.kernels.sparse.metal import Fp4Output
from torch_attnkit.ops.sparse_fmha_with_swa.mps import layout

from .problem import operands, problem


def build(call: Call, target: Target) -> Callable[..., None]:
    a, p = call.arg, problem(call).attended
    results = Fp4Output(p, a.cos.stride(0), a.sin.stride(0), a.groups)
    run = metal.launcher("sparse_fmha_inverse_rope_fp4", p, layout(call), results, target)
    return lambda *arguments: run(operands(*arguments))
