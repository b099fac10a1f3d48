"""vLLM's fused routers (``_moe_C``): softmax, sqrt(softplus), and the latter with a table of experts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def _ops() -> Any:
    """The operators, from the shared library by itself: vllm's Python needs not be importable."""
    if not hasattr(torch.ops._moe_C, "topk_softmax"):
        spec = importlib.util.find_spec("vllm")
        roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
        found = [p for root in roots for p in sorted(root.glob("_moe_C*.so"))]
        if not found:
            raise ImportError("vllm's _moe_C is not installed")
        for library in found:  # newer ones have the routers in a second library, with torch's stable ABI
            torch.ops.load_library(str(library))
    return torch.ops._moe_C


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    if op not in ("route_softmax", "route_sqrt_softplus", "route_hash"):
        return None
    logits, bias, ids, table = args[0], None, None, None
    if op == "route_hash":
        ids, table = args[1:3]
    elif op == "route_sqrt_softplus":
        bias = (*args, None)[1]
    rows, topk = logits.shape[0], kwargs["topk"] if table is None else table.shape[1]
    weights = logits.new_empty(rows, topk, dtype=torch.float32)
    indices, sources = (logits.new_empty(rows, topk, dtype=torch.int32) for _ in range(2))
    scale, renormalize = kwargs.get("route_scale", 1.0), bool(kwargs.get("renormalize", op != "route_softmax"))
    if op != "route_softmax":
        run = _ops().topk_softplus_sqrt
        given = (weights, indices, sources, logits, renormalize, scale, bias, ids, table)
    else:
        # The softmax of the chosen is that of all over the sum of the chosen. It has no scale: one more multiplication.
        run = _ops().topk_softmax
        given = (weights, indices, sources, logits, renormalize or not kwargs.get("softmax_first", False), None)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        run(*given)
        return (weights * scale if op == "route_softmax" and scale != 1 else weights), indices

    return call
