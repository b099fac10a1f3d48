"""FlashAttention 3 as vLLM builds it (``_vllm_fa3_C``), with packed sequences or a page table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.peers import vllm_ops


def _fwd() -> Any:
    return vllm_ops.library("_vllm_fa3_C", "fwd", "vllm_flash_attn/_vllm_fa3_C*.so").fwd.default


def _call(tensors: tuple[torch.Tensor, ...], **given: Any) -> Callable[[], torch.Tensor]:
    """The operator with ``given`` by name and the neutral value of every other argument."""
    fwd, rest = _fwd(), {}
    neutral = {
        "softmax_scale": tensors[0].shape[-1] ** -0.5, "is_causal": False, "window_size_left": -1,
        "window_size_right": -1, "softcap": 0.0, "is_rotary_interleaved": True, "num_splits": 0, "sm_margin": 0,
        "cp_world_size": 1, "cp_rank": 0,
    }  # fmt: skip
    for argument in fwd._schema.arguments[3:]:
        rest[argument.name] = given.pop(argument.name, neutral.get(argument.name))
    if given:
        raise TypeError(f"FA3's operator has no arguments {', '.join(given)}")
    return lambda: fwd(*tensors, *rest.values())[0]


def _offsets(batch: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)  # (B + 1,)


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    window, causal = kwargs.get("window", -1), bool(kwargs.get("causal", op.startswith("sdpa") or op.endswith("paged")))
    if kwargs.get("sink_tokens") or not kwargs.get("normalize", True):
        return None
    shared: dict[str, Any] = dict(is_causal=causal, softcap=kwargs.get("softcap", 0.0))
    if kwargs.get("scale") is not None:
        shared |= dict(softmax_scale=kwargs["scale"])
    if window >= 0:  # ours counts the query itself
        shared |= dict(window_size_left=window - 1, window_size_right=0 if causal else window - 1)
    if op == "flash_attention_varlen":
        q, k, v, cu_q, cu_k, sink = (*args, None)[:6]
        longest = [int((c[1:] - c[:-1]).max()) for c in (cu_q, cu_k)]
        shared |= dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=longest[0], max_seqlen_k=longest[1])
        tensors = (q, k, v)
    elif op == "flash_attention":
        q, k, v, sink, kv_len, kv_start = (*args, None, None, None)[:6]
        if kv_len is not None or kv_start is not None:
            return None
        tensors = tuple(t.flatten(0, 1) for t in (q, k, v))
        shared |= dict(cu_seqlens_q=_offsets(*q.shape[:2], q.device), cu_seqlens_k=_offsets(*k.shape[:2], k.device))
        shared |= dict(max_seqlen_q=q.shape[1], max_seqlen_k=k.shape[1])
    elif op in ("sdpa_decode", "sdpa_decode_paged", "sdpa_multi"):
        paged = op.endswith("paged")
        q, k, v, *others = args
        table = others.pop(0).clamp(min=0) if paged else None
        kv_len, sink, kv_start = (*others, None, None)[:3]
        if kv_start is not None or q.dtype != k.dtype:
            return None
        if not paged:  # one page a sequence
            k, v = (t.transpose(1, 2) for t in (k, v))
            table = torch.arange(len(q), dtype=torch.int32, device=q.device)[:, None]
        queries = q.shape[1] if op == "sdpa_multi" else 1
        tensors = (q.flatten(0, 1) if op == "sdpa_multi" else q, k, v)
        shared |= dict(cu_seqlens_q=_offsets(len(q), queries, q.device), max_seqlen_q=queries)
        shared |= dict(seqused_k=kv_len, page_table=table)
        shared |= dict(max_seqlen_k=table.shape[1] * k.shape[1])
    elif op == "flash_attention_paged":
        q, k, v, cu_q, table, kv_len, sink = (*args, None)[:7]
        longest = int((cu_q[1:] - cu_q[:-1]).max()), int(kv_len.max())
        tensors = (q, k, v)
        shared |= dict(cu_seqlens_q=cu_q, seqused_k=kv_len)
        shared |= dict(page_table=table, max_seqlen_q=longest[0], max_seqlen_k=longest[1])
    else:
        return None
    call = _call(tensors, s_aux=None if sink is None else sink.to(torch.bfloat16), **shared)
    if op in ("flash_attention", "sdpa_multi"):
        return lambda: call().unflatten(0, args[0].shape[:2])
    return call
