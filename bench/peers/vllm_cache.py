"""vLLM's kernels for rows of latent caches, of numbers (``_C_cache_ops``), and for DeepSeek-V4's rows (``_C``).

The former's encoded rows are others: those of ``fp8_ds_mla`` have 656 bytes under float32 scales. The latter, in
bfloat16 or in 584 bytes, are written together with norms and rotations of all query heads, as rope_kv_cache_write does;
but the scales of 64 rows stand behind their codes, so what is compared is q.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.peers import vllm_ops

_ROPE = 64  # channels, which its kernel takes from a tensor of their own
_DIM, _PAGE, _PAGE_BYTES = 512, 64, 65 * 576  # of DeepSeek-V4's rows


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    if op == "rope_kv_cache_write":
        return _rope_write(args, kwargs)
    if op not in ("kv_cache_write", "kv_cache_gather") or kwargs["format"] != "none":
        return None
    return _write(*args[:3]) if op == "kv_cache_write" else _gather(*args[:2], kwargs.get("dtype"))


def _write(kv: torch.Tensor, cache: torch.Tensor, slot: torch.Tensor) -> Callable[[], torch.Tensor]:
    run, pages, slot = vllm_ops.caches().concat_and_cache_mla, cache[:, None], slot.long()  # pages of one row
    parts, scale = kv.split((kv.shape[1] - _ROPE, _ROPE), 1), torch.ones(1, device=kv.device)

    def call() -> torch.Tensor:
        run(*parts, pages, slot, "auto", scale)
        return cache

    return call


def _rope_write(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], torch.Tensor] | None:
    """With a cache of its own, in pages; of bfloat16 rows q is normed in place."""
    q, kv, cache, slot, cos, sin, _ = args
    format, eps = kwargs["format"], kwargs["eps"]
    if format not in ("none", "fp8") or q.dtype != torch.bfloat16 or (q.shape[2], kwargs["rope_dim"]) != (_DIM, _ROPE):
        return None
    library, slot, position = vllm_ops.general(), slot.long(), torch.arange(len(q), device=q.device)
    angles, pages = torch.cat((cos, sin), 1).float(), -(-len(cache) // _PAGE)
    if format == "fp8":
        run = library.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
        rows = cache.new_zeros(pages, _PAGE_BYTES)[:, : _PAGE * cache.shape[1]]
        return lambda: run(q, kv, rows, slot, position, angles, q.shape[1], eps, _PAGE)
    run, own = library.fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert, q.clone()
    rows = cache.new_zeros(pages, _PAGE, _DIM)

    def call() -> torch.Tensor:
        run(own, kv, rows, slot, position, angles, eps, _PAGE)
        return own

    return call


def _gather(
    cache: torch.Tensor, slot: torch.Tensor, dtype: torch.dtype | None
) -> Callable[[], torch.Tensor] | None:  # fmt: skip
    """One sequence whose pages are the rows."""
    if dtype not in (None, cache.dtype) or bool((slot < 0).any()):
        return None
    run, pages, table = vllm_ops.caches().cp_gather_cache, cache[:, None], slot.int()[None]
    ends = torch.tensor([0, len(slot)], dtype=torch.int32, device=slot.device)
    out = cache.new_empty(len(slot), cache.shape[1])

    def call() -> torch.Tensor:
        run(pages, out, table, ends, 1, None)
        return out

    return call
