"""vLLM's operators for mixtures of experts (``_moe_C``), from the shared library by itself.

vllm's Python needs not be importable; of 0.26 on they stand in a library with torch's stable ABI.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch


def moe() -> Any:
    if not hasattr(torch.ops._moe_C, "topk_softmax"):
        spec = importlib.util.find_spec("vllm")
        roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
        found = [p for root in roots for p in sorted(root.glob("_moe_C*.so"))]
        if not found:
            raise ImportError("vllm's _moe_C is not installed")
        for library in found:
            torch.ops.load_library(str(library))
    return torch.ops._moe_C


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
