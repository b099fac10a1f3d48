"""Rows of numbers by torch's own indexing kernels: ``index_select`` and ``index_copy_``, which need every slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    if op not in ("kv_cache_write", "kv_cache_gather") or kwargs["format"] != "none":
        return None
    if op == "kv_cache_gather":
        cache, slot = args[:2]
        same = kwargs.get("dtype") in (None, cache.dtype)
        return (lambda: cache.index_select(0, slot)) if same and bool((slot >= 0).all()) else None
    kv, cache, slot = args[:3]
    slot = slot.long()
    return (lambda: cache.index_copy_(0, slot, kv)) if bool((slot >= 0).all()) else None
