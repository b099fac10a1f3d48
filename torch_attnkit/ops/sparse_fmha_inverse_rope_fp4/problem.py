"""A call of sparse_fmha_inverse_rope_fp4 as a problem of the sparse kernels."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.sparse.problem import Codes, Fp4, Operands, Problem
from torch_attnkit.ops.sparse_fmha_with_swa import problem as attention


def problem(call: Call) -> Problem:
    a = call.arg
    attended = replace(call, arg=SimpleNamespace(**vars(a), normalize=True))
    angles = tuple(t.stride(0) if len(t) > 1 else 0 for t in (a.cos, a.sin))
    fp4 = Fp4(
        a.o_format, call.dim["R2"], a.cos.dtype, a.scale_layout == "128x4", a.o_global is not None, a.groups, angles
    )  # fmt: skip
    return replace(attention.problem(attended), fp4=fp4)


def operands(
    q, swa_kv, swa_end, cos, sin, compressed_kv, topk_indices, compressed_len, request_ids, sink, swa_block_table,
    compressed_block_table, global_scale, o_global, scale, window, format, rope_dim, groups, o_format, scale_layout,
    codes, o_scale,
) -> Operands:  # fmt: skip
    return Operands(
        q, swa_kv, swa_end, compressed_kv, topk_indices, compressed_len, request_ids, sink, swa_block_table,
        compressed_block_table, global_scale, Codes(codes, o_scale, cos, sin, o_global),
    )  # fmt: skip
