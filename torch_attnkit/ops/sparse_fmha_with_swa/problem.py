"""A call of sparse_fmha_with_swa as a problem of the sparse kernels."""

from __future__ import annotations

import math

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.sparse.problem import DenseResults, Operands, Problem

from . import caches


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
        near_paged=a.swa_block_table is not None,
        far_paged=a.compressed_block_table is not None,
        format=a.format,
        rope_dim=0 if a.format == "none" else a.rope_dim,
        align=_align(call),
        divided=a.global_scale is not None,
    )  # fmt: skip


def _align(call: Call) -> int:
    """Bytes, at most 16, at whose multiples all rows of the caches start that begin at one; those of a copy, too."""
    rows = caches.given(call)
    return math.gcd(16, *((t.shape[-1] if i == 2 else t.stride(i)) * t.itemsize for t in rows for i in range(3)))


def operands(
    q, swa_kv, swa_end, compressed_kv, topk_indices, compressed_len, request_ids, sink, swa_block_table,
    compressed_block_table, global_scale, scale, window, normalize, format, rope_dim, out, lse, row_sum,
) -> Operands:  # fmt: skip
    return Operands(
        q, swa_kv, swa_end, compressed_kv, topk_indices, compressed_len, request_ids, sink, swa_block_table,
        compressed_block_table, global_scale, DenseResults(out, lse, row_sum),
    )  # fmt: skip
