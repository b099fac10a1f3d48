"""Continuous batching of transformers (``generate_batch``): attention over its PagedAttentionCache.

Layers with full attention run over the pages as they lie: ``sdpa_decode_paged`` where every request has one token, else
``flash_attention_paged``. Layers with a window keep a ring of keys, which no block table describes: the cache gathers
them, and ``flash_attention_varlen`` runs on what it returns, as on a batch of whole prompts. No call waits for the
device.
Source: transformers/generation/continuous_batching (5.23).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache

from torch_attnkit.core import UnsupportedError

ops = torch.ops.attnkit
_choose = ContinuousBatchingManager.switch_to_cb_friendly_attn


def register() -> None:
    """Let the manager take a model whose attention is "attnkit". It knows two names, and whatever has "flash" in it."""
    ContinuousBatchingManager.switch_to_cb_friendly_attn = _keep_ours


def _keep_ours(self: Any, model: Any, auto_switch_to_flash: bool = True) -> None:
    if model.config._attn_implementation != "attnkit":
        _choose(self, model, auto_switch_to_flash)


def over_pages(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sink: torch.Tensor | None,
    causal: bool,
    options: dict[str, Any],
    batch: dict[str, Any],
) -> torch.Tensor:
    """Write key and value (1, Hkv, T, D) of the batch into the cache, and attend it with query (1, Hq, T, D), causally:
    (1, T, Hq, D).

    ``batch`` is what the manager gives a forward: the cache, offsets of queries and keys, where to write, what to read.
    ``causal`` is what the mask says, ``options`` are scale, window and softcap of the ops.

    Raises:
        UnsupportedError: the mask is not causal, the cache is not a PagedAttentionCache, or the batch has block tables,
            which transformers makes for two versions of flash-attn alone.
    """
    cache = batch["cache"]
    if not isinstance(cache, PagedAttentionCache):
        raise UnsupportedError(
            f"attnkit attention: cache is a {type(cache).__name__}, accepted: the PagedAttentionCache of generate_batch"
        )
    if not causal and query.shape[2] > 1:
        raise UnsupportedError("attnkit attention: the mask is not causal beside a paged cache, accepted: a causal one")
    if batch.get("block_table") is not None:
        raise UnsupportedError("attnkit attention: block_table is given, accepted: None (indices to read and write)")
    allocator = cache.layer_to_allocator[layer]
    reads = batch["read_index"][allocator.index]  # (sum of kv_len,) rows of the cache; empty: there are prompts alone
    cu_q, cu_k = batch["cu_seq_lens_q"], batch["cu_seq_lens_k"][allocator.layer_type]  # (B+1,), (B+1,) int32
    longest_q, longest_k = batch["max_length_q"], batch["max_length_k"][allocator.layer_type]
    q = query[0].transpose(0, 1)  # (T, Hq, D)
    if reads.numel() == 0 or not allocator.supports_block_table:
        key, value = cache.update(key, value, layer, dict(batch))  # (1, Hkv, S, D) each
        k, v = (t[0].transpose(0, 1) for t in (key, value))  # (S, Hkv, D) each
        hints = dict(max_seqlen_q=longest_q, max_seqlen_k=longest_k)
        return ops.flash_attention_varlen(q, k, v, cu_q, cu_k, sink, causal=True, **hints, **options)[0][None]
    k_pages, v_pages = allocator.get_cache_for_block_table(layer)  # (Np, Ps, Hkv, D) each
    for pages, new in ((k_pages, key), (v_pages, value)):
        # Tokens that pad the batch share one row, which is nobody's; kv_cache_write would not have that.
        pages.flatten(0, 1).index_copy_(0, batch["write_index"][allocator.index], new[0].transpose(0, 1))
    table, kv_len = _block_table(reads, cu_k, k_pages.shape[1], longest_k), cu_k.diff()
    if longest_q == 1 and q.shape[0] == kv_len.shape[0]:
        return ops.sdpa_decode_paged(q, k_pages, v_pages, table, kv_len, sink, **options)[0][None]
    return ops.flash_attention_paged(q, k_pages, v_pages, cu_q, table, kv_len, sink, **options)[0][None]


def _block_table(reads: torch.Tensor, cu_seqlens_k: torch.Tensor, page: int, longest: int) -> torch.Tensor:
    """The pages (B, Mp) of requests whose keys stand in the rows ``reads`` of the cache, request by request."""
    first = torch.arange(0, max(longest, 1), page, device=reads.device)  # (Mp,) the first key of each page
    at = (cu_seqlens_k[:-1, None] + first).clamp(max=reads.shape[0] - 1)  # (B, Mp)
    return (reads[at] // page).int()
