"""vLLM's kernels for rows of latent caches (``_C_cache_ops``), rows of numbers only.

Its encoded rows are others: those of ``fp8_ds_mla`` have 656 bytes under float32 scales, and DeepSeek-V4's 584 bytes
are written together with norms and rotations of all query heads, with the scales of 64 rows behind their codes.
Neither is what kv_cache_write and kv_cache_gather compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.peers import vllm_ops

_ROPE = 64  # channels, which its kernel takes from a tensor of their own


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
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
