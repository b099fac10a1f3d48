"""A call of sparse_fmha_with_swa as a problem of the sparse kernels."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.sparse.problem import Operands, Problem


def problem(call: Call) -> Problem:
    a, d = call.arg, call.dim
    return Problem(
        call.dtype, call.device, d["Tq"], d["Hq"], d["D"], d["R"],
        capacity=d["S"],
        window=a.window,
        entries=0 if a.compressed_kv is None else d["C"],
        listed=0 if a.topk_indices is None else d["K"],
        has_list=a.topk_indices is not None,
        has_length=a.compressed_len is not None,
        has_requests=a.request_ids is not None,
        has_sink=a.sink is not None,
        factor=d["D"] ** -0.5 if a.scale is None else a.scale,
        normalize=a.normalize,
    )  # fmt: skip


def operands(
    q, swa_kv, swa_end, compressed_kv, topk_indices, compressed_len, request_ids, sink,
    scale, window, normalize, out, lse, row_sum,
) -> Operands:  # fmt: skip
    return Operands(
        q, swa_kv, swa_end, compressed_kv, topk_indices, compressed_len, request_ids, sink, out, lse, row_sum
    )
