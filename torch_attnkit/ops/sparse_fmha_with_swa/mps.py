"""sparse_fmha_with_swa on Metal: the kernels are the family ``kernels/sparse``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_attnkit.core.op import Call
from torch_attnkit.core.target import Target
from torch_attnkit.kernels.sparse import metal
from torch_attnkit.kernels.sparse.metal import DenseOutput

from .problem import operands, problem


def build(call: Call, target: Target) -> Callable[..., None]:
    run = metal.launcher("sparse_fmha_with_swa", problem(call), layout(call), DenseOutput(), target)
    return lambda *arguments: run(operands(*arguments))


def layout(call: Call) -> metal.Layout:
    a = call.arg
    return metal.Layout(
        q_token=a.q.stride(0),
        q_head=a.q.stride(1),
        near=_cache(a.swa_kv, a.swa_block_table),
        far=_cache(a.compressed_kv, a.compressed_block_table),
        list_row=0 if a.topk_indices is None else a.topk_indices.stride(0),
    )


def _cache(rows: torch.Tensor | None, table: torch.Tensor | None) -> metal.Cache:
    if rows is None:
        return metal.Cache(0, 0)
    first, key, _ = rows.stride()
    if table is None:
        return metal.Cache(first, key)
    return metal.Cache(first, key, rows.shape[1], rows.shape[0], table.stride(0))
