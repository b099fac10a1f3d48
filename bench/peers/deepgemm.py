"""DeepGEMM's scores of the lightning indexer, FP8: of one request's tokens, or of a token each over pages of 64.

It comes with vLLM and compiles with nvcc on first use (``DG_JIT_CACHE_DIR`` keeps what it made). Keys in pages, weights
in float32 with the scales of q in them, and the schedule of a decode step are made outside of the timing. It does not
write -inf behind a row's entries, as vLLM does not ask for it. ``select`` is both launches of a decode step: these
scores, and vLLM's choice of the largest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from bench.peers import vllm_ops, vllm_topk

_PAGE = 64  # entries


def library() -> Any:
    """The package, by itself or as vLLM ships it."""
    try:
        import deep_gemm
    except ImportError:
        sys.path.append(str(vllm_ops.files("third_party/deep_gemm", "deep_gemm")[0].parent))
        import deep_gemm
    return deep_gemm


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    if op != "indexer_scores" or kwargs.get("format") != "fp8":
        return None
    q, k, weights, k_len, request_ids, table, q_scale, k_scale = (*args, *[None] * 8)[:8]
    tokens, requests = len(q), len(k if table is None else table)
    if request_ids is not None or (requests != tokens and (requests > 1 or table is not None)):
        return None
    weights = weights.float() if q_scale is None else weights.float() * q_scale[..., 0]  # (Tq, Hi)
    if requests < tokens:
        return _of_one_request(q, k[0], k_scale[0, :, 0].contiguous(), weights, k_len)
    return of_pages(q, *pages(k, k_scale, table), weights, k_len)


def select(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], torch.Tensor] | None:
    if op != "indexer_select":
        return None
    scores, tokens = adapt("indexer_scores", args, kwargs), len(args[0])
    if scores is None:
        return None
    choose = vllm_topk.shared(vllm_topk.of_few(tokens), args[3], kwargs["topk"])
    return lambda: choose(scores())


def _of_one_request(
    q: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor, weights: torch.Tensor, k_len: torch.Tensor
) -> Callable[[], torch.Tensor]:
    run, first = library().fp8_mqa_logits, torch.zeros_like(k_len)
    return lambda: run(q, (k, k_scale), weights, first, k_len, False)


def of_pages(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, weights: torch.Tensor, k_len: torch.Tensor
) -> Callable[[], torch.Tensor]:
    deep_gemm, lengths = library(), k_len[:, None].contiguous()  # (R, 1)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, _PAGE, deep_gemm.get_num_sms())
    run, most = deep_gemm.fp8_paged_mqa_logits, table.shape[1] * _PAGE
    return lambda: run(q[:, None], cache, weights, lengths, table, schedule, most, False)


def pages(
    k: torch.Tensor, k_scale: torch.Tensor, table: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Pages (Np, 64, 1, D + 4) of bytes, the codes of all 64 entries before their scales; the table (R, Mp)."""
    if table is None:
        requests, entries = k.shape[:2]
        k, k_scale = (torch.nn.functional.pad(t.view(torch.uint8), (0, 0, 0, -entries % _PAGE)) for t in (k, k_scale))
        k, k_scale = (t.reshape(-1, _PAGE, t.shape[-1]) for t in (k, k_scale))
        table = torch.arange(len(k), dtype=torch.int32, device=k.device).view(requests, -1)
    elif k.shape[1] != _PAGE:
        raise ValueError(f"DeepGEMM has pages of {_PAGE} entries, not of {k.shape[1]}")
    parts = [t.contiguous().view(torch.uint8).flatten(1) for t in (k, k_scale)]  # (Np, 64 D), (Np, 256)
    return torch.cat(parts, 1).view(len(k), _PAGE, 1, -1), table.contiguous()
