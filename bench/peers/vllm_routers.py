"""vLLM's fused routers (``_moe_C``): softmax, sqrt(softplus), and the latter with a table of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.peers import vllm_ops


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    if op not in ("route_softmax", "route_sqrt_softplus", "route_hash"):
        return None
    logits, bias, ids, table = args[0], None, None, None
    if op == "route_hash":
        ids, table = args[1:3]
        if ids.dtype != table.dtype:  # it takes no others
            return None
    elif op == "route_sqrt_softplus":
        bias = (*args, None)[1]
    if op == "route_sqrt_softplus" and logits.dtype == torch.float32 and kwargs["topk"] == 6 and bias is not None:
        return None  # there vLLM prefers a kernel of its Python package
    rows, topk = logits.shape[0], kwargs["topk"] if table is None else table.shape[1]
    weights = logits.new_empty(rows, topk, dtype=torch.float32)
    indices, sources = (logits.new_empty(rows, topk, dtype=torch.int32) for _ in range(2))
    scale, renormalize = kwargs.get("route_scale", 1.0), bool(kwargs.get("renormalize", op != "route_softmax"))
    if op != "route_softmax":
        run = vllm_ops.moe().topk_softplus_sqrt
        given = (weights, indices, sources, logits, renormalize, scale, bias, ids, table)
    else:
        # The softmax of the chosen is that of all over the sum of the chosen. It has no scale: one more multiplication.
        run = vllm_ops.moe().topk_softmax
        given = (weights, indices, sources, logits, renormalize or not kwargs.get("softmax_first", False), None)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        run(*given)
        return (weights * scale if op == "route_softmax" and scale != 1 else weights), indices

    return call
