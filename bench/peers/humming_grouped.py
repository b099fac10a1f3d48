"""Humming's other product: rows sorted by expert and copied first, by vLLM's permutation. Faster with many tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.peers.humming_moe import products
from bench.peers.moe_layer import call_of

_FEWEST = 512  # tokens; below, the indexed product is the one to compare with
_GEMM = "grouped_contiguous"


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    given = call_of(op, args, kwargs)
    if given is None or len(given.x) < _FEWEST:
        return None
    from bench.peers import moe_steps as steps
    from bench.peers import vllm_ops

    ops = vllm_ops.moe()
    up, down = products(given.layer)
    (Tq, K), experts, x = given.indices.shape, given.layer.experts, given.x
    first, second = up.run(_GEMM, Tq * K), down.run(_GEMM, Tq * K)
    routes = torch.arange(Tq * K, dtype=torch.int32, device=x.device).view(Tq, K)
    starts = torch.empty(experts + 1, dtype=torch.int64, device=x.device)
    position, route = torch.empty_like(routes), torch.empty_like(routes.flatten())

    def call() -> torch.Tensor:
        rows = x.new_empty(Tq * K, x.shape[1])
        route.fill_(Tq * K)
        ops.moe_permute(x, given.indices, routes, None, experts, experts, K, rows, starts, position, route)
        h = steps.swiglu(first(rows, expert_layout=starts), given.act)  # (Tq * K, M)
        out = torch.empty_like(x)
        ops.moe_unpermute(second(h, expert_layout=starts), given.weights, position.flatten(), starts, K, out)
        return out

    return call
