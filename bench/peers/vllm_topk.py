"""The choice of the largest scores: ``torch.topk``, and vLLM's kernels for DeepSeek's indexer (``_C``).

vLLM takes the cooperative kernel for up to 32 rows of a decode step, the persistent one for more, and of a prefill the
one that works row by row. They read float32 and leave the order open; here all are timed wherever they accept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.peers import vllm_ops

_SIZES = (512, 1024, 2048)  # of which there are kernels that share a row
_WORKSPACE = 1 << 20  # bytes
_COOPERATIVE = 32  # rows, at most
Call = Callable[[], torch.Tensor] | None


def torch_topk(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Of whole rows: it takes no lengths."""
    if op != "indexer_topk":
        return None
    scores, k_len = (*args, None)[:2]
    if k_len is not None or scores.shape[1] < kwargs["topk"]:
        return None
    return lambda: scores.topk(kwargs["topk"], sorted=False).indices


def of_few(rows: int) -> str:
    """What vLLM takes for so many rows of a decode step."""
    return "cooperative_topk" if rows <= _COOPERATIVE else "persistent_topk"


def cooperative(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    if op != "indexer_topk" or args[0].stride(0) % 4 or len(args[0]) > _COOPERATIVE:
        return None
    return _shared("cooperative_topk", args, kwargs["topk"])


def persistent(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return _shared("persistent_topk", args, kwargs["topk"]) if op == "indexer_topk" else None


def per_row(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Of a prefill: each row between a start and an end of its own."""
    if op != "indexer_topk" or args[0].dtype != torch.float32:
        return None
    scores, lengths, out = _given(args, kwargs["topk"])
    starts, run, K = torch.zeros_like(lengths), vllm_ops.general().top_k_per_row_prefill, kwargs["topk"]

    def call() -> torch.Tensor:
        run(scores, starts, lengths, out, len(scores), scores.stride(0), scores.stride(1), K)
        return out

    return call


def per_row_decode(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    if op != "indexer_topk" or args[0].dtype != torch.float32:
        return None
    scores, lengths, out = _given(args, kwargs["topk"])
    run, K = vllm_ops.general().top_k_per_row_decode, kwargs["topk"]

    def call() -> torch.Tensor:
        run(scores, 1, lengths, out, len(scores), scores.stride(0), scores.stride(1), K)
        return out

    return call


def _shared(name: str, args: tuple[Any, ...], topk: int) -> Call:
    if args[0].dtype != torch.float32 or topk not in _SIZES:
        return None
    scores, lengths, _ = _given(args, topk)
    choose = shared(name, lengths, topk)
    return lambda: choose(scores)


def shared(name: str, lengths: torch.Tensor, topk: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The kernels in which thread blocks share a row through a workspace, for scores (Tq, S) in float32."""
    run = getattr(vllm_ops.general(), name)
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=lengths.device)
    out = torch.full((len(lengths), topk), -1, dtype=torch.int32, device=lengths.device)

    def choose(scores: torch.Tensor) -> torch.Tensor:
        run(scores, lengths, out, workspace, topk, scores.shape[1])
        return out

    return choose


def _given(args: tuple[Any, ...], topk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores (Tq, S), how many of each row count (Tq,), and where indices go (Tq, K)."""
    scores, k_len = (*args, None)[:2]
    if k_len is None:
        k_len = torch.full(scores.shape[:1], scores.shape[1], dtype=torch.int32, device=scores.device)
    return scores, k_len, scores.new_full((len(scores), topk), -1, dtype=torch.int32)
