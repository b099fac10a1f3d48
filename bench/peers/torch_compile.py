"""``torch.compile`` of what a user without kernels would write: norms, merges and quantisers as their references,
routers, rows of a cache, products of groups, and scores of an indexer in 16 bits.

Attention references build the whole score matrix and check data on the host; nobody would run them compiled. A global
scale of FP4 is checked on the host, too. So are the inputs of routers: theirs here are without the checks, and with
``torch.topk``, which leaves the order of equal keys open. Rows of a cache are for slots that are all there. Scores are
products rounded to the model dtype, as torch's are, and only of so many that memory holds those of each head.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.formats import kv_cache, rope

OPS = (
    "gated_rmsnorm", "merge_partials", "nvfp4_quantize", "nvfp4_dequantize", "mxfp4_quantize", "mxfp4_dequantize",
    "inverse_rope_fp4",
)  # fmt: skip
_MOST = 1 << 30  # products of heads and entries
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


def kv_cache_write(
    kv: torch.Tensor, cache: torch.Tensor, slot: torch.Tensor, global_scale: torch.Tensor | None = None,
    format: str = "none", rope_dim: int = 64,
) -> torch.Tensor:  # fmt: skip
    cache[slot.long()] = kv if format == "none" else kv_cache.encode_rows(kv, format, rope_dim, global_scale)
    return cache


def rope_kv_cache_write(
    q: torch.Tensor, kv: torch.Tensor, cache: torch.Tensor, slot: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    global_scale: torch.Tensor | None = None, eps: float = 1e-6, format: str = "none", rope_dim: int = 64,
) -> torch.Tensor:  # fmt: skip
    kv_cache_write(rope.apply(kv, cos, sin, interleaved=True), cache, slot, global_scale, format, rope_dim)
    x = q.float() * (q.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    return rope.apply(x, cos[:, None], sin[:, None], interleaved=True).to(q.dtype)


def kv_cache_gather(
    cache: torch.Tensor, slot: torch.Tensor, global_scale: torch.Tensor | None = None, format: str = "none",
    head_dim: int = 0, rope_dim: int = 64, dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    rows = cache[slot.long()]
    if format == "none":
        return rows.to(dtype or cache.dtype)
    return kv_cache.decode_rows(rows, format, head_dim, rope_dim, global_scale, dtype or torch.float32)


def grouped_output_projection(
    o: torch.Tensor, wo_a: torch.Tensor, *, format: str = "none", dtype: torch.dtype | None = None
) -> torch.Tensor:
    return torch.einsum("tgk,grk->tgr", o, wo_a).to(dtype or o.dtype)


def indexer_scores(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, k_len: torch.Tensor, *unused: None, format: str = "none"
) -> torch.Tensor:
    products = torch.bmm(q.view(len(k), -1, q.shape[2]), k.transpose(1, 2)).view(*q.shape[:2], -1)  # (Tq, Hi, S)
    scores = (products.relu().float() * weights.float()[..., None]).sum(1)
    return scores.masked_fill(torch.arange(k.shape[1], device=k.device) >= k_len[:, None], -torch.inf)


OWN = {
    f.__name__: f
    for f in (
        route_softmax, route_sqrt_softplus, route_hash, kv_cache_write, rope_kv_cache_write, kv_cache_gather,
        grouped_output_projection, indexer_scores,
    )
}  # fmt: skip


@functools.cache
def _compiled(op: str) -> Callable[..., Any]:
    torch._dynamo.config.cache_size_limit = 64
    plain = OWN.get(op) or importlib.import_module(f"torch_attnkit.ops.{op}.reference").reference
    return torch.compile(plain, dynamic=False)


def _scores_fit(args: tuple[Any, ...], format: str) -> bool:
    """Whether q (Tq, Hi, D) and k (R, S, D) are numbers, one request after the other, with few enough products."""
    q, k, others = args[0], args[1], args[4:]
    return format == "none" and all(a is None for a in others) and q.shape[0] * q.shape[1] * k.shape[1] <= _MOST


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    if op == "grouped_output_projection" and kwargs["format"] != "none":
        return None
    if op == "indexer_scores" and not _scores_fit(args, kwargs["format"]):
        return None
    checked = "nvfp4" in op and any(isinstance(a, torch.Tensor) and a.dim() == 0 for a in args)
    return functools.partial(_compiled(op), *args, **kwargs) if op in (*OPS, *OWN) and not checked else None
