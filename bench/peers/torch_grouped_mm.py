"""``torch._grouped_mm`` with bf16 weights: what a layer costs that is read from FP4 once, when it is loaded.

Routes are sorted by torch, in the timing; the weights take four times the memory, read outside of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from bench.peers.moe_layer import Layer, Weights, call_of
from torch_attnkit.oracle import fp4


@functools.lru_cache(maxsize=1)
def _dense(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """(E, N, 2M) and (E, M, N), each a view of rows along the axis that is summed over."""
    up, down = (_dequantised(w, layer.format).transpose(1, 2) for w in (layer.up, layer.down))
    return up, down


def _dequantised(w: Weights, format: str) -> torch.Tensor:
    out = w.codes.new_empty(len(w.codes), w.rows, w.depth, dtype=torch.bfloat16)
    for e, (codes, scale) in enumerate(zip(w.codes, w.scale, strict=True)):
        number = None if w.factor is None else 1 / w.factor[e]
        out[e] = fp4.dequantize(codes, scale, format, number, torch.bfloat16)
    return out


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    given = call_of(op, args, kwargs)
    if given is None:
        return None
    from bench.peers import moe_steps as steps

    x, weights, indices, layer, act = given.x, given.weights, given.indices, given.layer, given.act
    up, down = _dense(layer)
    experts = torch.arange(layer.experts, dtype=torch.int16, device=x.device)

    def call() -> torch.Tensor:
        order = steps.by_expert(indices, experts)
        rows = x.index_select(0, order.route // indices.shape[1])  # (R, N)
        both = torch._grouped_mm(rows, up, offs=order.ends)  # (R, 2M)
        h = steps.swiglu(both, act, layer.up.bias, order.expert)  # (R, M)
        y = torch._grouped_mm(h, down, offs=order.ends)  # (R, N)
        return steps.combine(y, weights, order.position, layer.down.bias, indices)

    return call
