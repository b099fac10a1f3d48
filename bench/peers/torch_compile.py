"""``torch.compile`` of what a user without kernels would write: norms, merges and quantisers as their references, and
routers.

Attention references build the whole score matrix and check data on the host; nobody would run them compiled. A global
scale of FP4 is checked on the host, too. So are the inputs of routers: theirs here are without the checks, and with
``torch.topk``, which leaves the order of equal keys open.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

OPS = (
    "gated_rmsnorm", "merge_partials", "nvfp4_quantize", "nvfp4_dequantize", "mxfp4_quantize", "mxfp4_dequantize",
)  # fmt: skip
Routed = tuple[torch.Tensor, torch.Tensor]


def _scaled(chosen: torch.Tensor, index: torch.Tensor, renormalize: bool, route_scale: float) -> Routed:
    if renormalize:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    return chosen * route_scale, index.int()


def route_softmax(
    logits: torch.Tensor, topk: int, softmax_first: bool = False, renormalize: bool = False, route_scale: float = 1.0
) -> Routed:
    x = logits.float()
    values, index = (x.softmax(-1) if softmax_first else x).topk(topk)
    return _scaled(values if softmax_first else values.softmax(-1), index, renormalize, route_scale)


def route_sqrt_softplus(
    logits: torch.Tensor, bias: torch.Tensor | None, topk: int, route_scale: float = 1.0, renormalize: bool = True
) -> Routed:
    s = torch.nn.functional.softplus(logits.float()).sqrt()
    index = (s if bias is None else s + bias).topk(topk).indices
    return _scaled(s.gather(-1, index), index, renormalize, route_scale)


def route_hash(
    logits: torch.Tensor, token_ids: torch.Tensor, tid2eid: torch.Tensor, route_scale: float = 1.0,
    renormalize: bool = True,
) -> Routed:  # fmt: skip
    index = tid2eid[token_ids.long()].long()
    s = torch.nn.functional.softplus(logits.gather(-1, index).float()).sqrt()
    return _scaled(s, index, renormalize, route_scale)


ROUTERS = {f.__name__: f for f in (route_softmax, route_sqrt_softplus, route_hash)}


@functools.cache
def _compiled(op: str) -> Callable[..., Any]:
    torch._dynamo.config.cache_size_limit = 64
    plain = ROUTERS.get(op) or importlib.import_module(f"torch_attnkit.ops.{op}.reference").reference
    return torch.compile(plain, dynamic=False)


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    checked = "nvfp4" in op and any(isinstance(a, torch.Tensor) and a.dim() == 0 for a in args)
    return functools.partial(_compiled(op), *args, **kwargs) if op in (*OPS, *ROUTERS) and not checked else None
