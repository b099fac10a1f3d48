"""vLLM's operators from its shared libraries by themselves.

vllm's Python needs not be importable; of 0.26 on they stand in libraries with torch's stable ABI.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch


def files(pattern: str, what: str) -> list[Path]:
    """What of vllm's folders fits the glob ``pattern``. Raises ImportError, which names ``what``, if nothing does."""
    spec = importlib.util.find_spec("vllm")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    found = [file for root in roots for file in sorted(root.glob(pattern))]
    if not found:
        raise ImportError(f"{what} is not installed")
    return found


def library(namespace: str, holds: str, pattern: str) -> Any:
    """``torch.ops.<namespace>``, whose operator ``holds`` is in one of the libraries that ``pattern`` finds."""
    found: Any = getattr(torch.ops, namespace)
    if not hasattr(found, holds):
        for file in files(pattern, f"vllm's {namespace}"):
            torch.ops.load_library(str(file))
    return found


def moe() -> Any:
    """Mixtures of experts."""
    return library("_moe_C", "topk_softmax", "_moe_C*.so")


def general() -> Any:
    """What most of vllm takes, top-k among it."""
    return library("_C", "persistent_topk", "_C_stable_libtorch*.so")


def caches() -> Any:
    """Caches, in the same library."""
    return library("_C_cache_ops", "concat_and_cache_mla", "_C_stable_libtorch*.so")


class Aligned:
    """Routes sorted by expert, each expert's padded to blocks of ``block``: what vLLM's indexed products read."""

    def __init__(self, indices: torch.Tensor, experts: int, block: int) -> None:
        most = indices.numel() + min(indices.numel(), experts) * (block - 1)
        most = -(-most // block) * block
        self.given = (indices, experts, block)
        self.ids = indices.new_empty(most, dtype=torch.int32)
        self.experts = indices.new_empty(most // block, dtype=torch.int32)
        self.padded = indices.new_empty(1, dtype=torch.int32)

    def sort(self) -> None:
        moe().moe_align_block_size(*self.given, self.ids, self.experts, self.padded, None)
