"""FlashAttention 4: the CuTeDSL kernels of the ``flash-attn-4`` package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    window = kwargs.get("window", -1)
    shared = dict(softmax_scale=kwargs.get("scale"), softcap=kwargs.get("softcap") or None)
    if kwargs.get("sink_tokens") or not kwargs.get("normalize", True):
        return None
    if op == "sdpa_decode":
        q, k, v, kv_len, sink, kv_start = (*args, None, None)[:6]
        if kv_start is not None:
            return None
        tensors = (q[:, None], k.transpose(1, 2), v.transpose(1, 2))
        shared |= dict(causal=True, seqused_k=kv_len)
        back = lambda o: o[:, 0]
    elif op == "sdpa_decode_paged":
        q, k, v, table, kv_len, sink, kv_start = (*args, None, None)[:7]
        if kv_start is not None:
            return None
        tensors = (q[:, None], k, v)
        shared |= dict(causal=True, seqused_k=kv_len, page_table=table.clamp(min=0))
        back = lambda o: o[:, 0]
    elif op == "sdpa_multi":
        q, k, v, kv_len, sink, kv_start = (*args, None, None)[:6]
        if kv_start is not None:
            return None
        tensors, back = (q, k.transpose(1, 2), v.transpose(1, 2)), lambda o: o
        shared |= dict(causal=bool(kwargs.get("causal", True)), seqused_k=kv_len)
    elif op == "flash_attention":
        q, k, v, sink, kv_len, kv_start = (*args, None, None, None)[:6]
        if kv_start is not None or kv_len is not None:
            return None
        tensors, back = (q, k, v), lambda o: o
        shared |= dict(causal=bool(kwargs.get("causal")))
    elif op == "flash_attention_varlen":
        q, k, v, cu_q, cu_k, sink = (*args, None)[:6]
        tensors, back = (q, k, v), lambda o: o
        lengths = [int((c[1:] - c[:-1]).max()) for c in (cu_q, cu_k)]
        shared |= dict(causal=bool(kwargs.get("causal")), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        shared |= dict(max_seqlen_q=lengths[0], max_seqlen_k=lengths[1])
    else:
        return None
    from flash_attn.cute.interface import _flash_attn_fwd

    if window >= 0:  # ours counts the query itself
        shared |= dict(window_size_left=window - 1, window_size_right=0 if shared.get("causal") else window - 1)
    if sink is not None:
        shared |= dict(learnable_sink=sink.to(torch.bfloat16))

    def call() -> torch.Tensor:
        return back(_flash_attn_fwd(*tensors, **shared)[0])

    return call
