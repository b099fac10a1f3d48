"""A call of sparse_fmha_inverse_rope_fp4 as a problem of the sparse kernels."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.fp4.problem import Rotate
from torch_attnkit.kernels.sparse.problem import Fp4, Fp4Results, Operands, QuantisedProblem
from torch_attnkit.ops.sparse_fmha_with_swa import problem as attention


def problem(call: Call) -> QuantisedProblem:
    a, dim = call.arg, call.dim
    attended = replace(call, arg=SimpleNamespace(**vars(a), normalize=True))
    swizzled, divided = a.scale_layout == "128x4", a.o_global is not None
    fp4 = Fp4(a.o_format, dim["R2"], a.cos.dtype, swizzled, divided)
    sizes = dim["Tq"], dim["Hq"], dim["D"], dim["R2"]
    o = tuple(step if size > 1 else 0 for size, step in ((dim["Tq"], dim["Hq"] * dim["D"]), (dim["Hq"], dim["D"])))
    angles = tuple(t.stride(0) if len(t) > 1 else 0 for t in (a.cos, a.sin))
    rotated = Rotate(
        a.o_format, call.device, a.q.dtype, a.cos.dtype, *sizes, o, angles, a.groups, swizzled, divided
    )  # fmt: skip
    return QuantisedProblem(replace(attention.problem(attended), fp4=fp4), rotated)


def operands(
    q, swa_kv, swa_end, cos, sin, compressed_kv, topk_indices, compressed_len, request_ids, sink, swa_block_table,
    compressed_block_table, global_scale, o_global, scale, window, format, rope_dim, groups, o_format, scale_layout,
    codes, o_scale,
) -> Operands:  # fmt: skip
    return Operands(
        q, swa_kv, swa_end, compressed_kv, topk_indices, compressed_len, request_ids, sink, swa_block_table,
        compressed_block_table, global_scale, Fp4Results(codes, o_scale, cos, sin, o_global),
    )  # fmt: skip
