"""What users would call instead: one file a peer, with ``adapt(op, args, kwargs) -> call``.

``adapt`` gets the op's own inputs and does everything that a user does once (views, plans, packing); what it returns
is timed. It returns None if the peer has no such op or cannot take these inputs, and raises ImportError if it is not
installed: the bench names it as missing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Peer:
    """A peer: its file here, which function of it adapts, and whether CUDA graphs can capture its calls."""

    name: str
    file: str
    graphs: bool = True
    by: str = "adapt"

    def adapt(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        function = getattr(importlib.import_module(f"bench.peers.{self.file}"), self.by)
        call: Callable[[], Any] | None = function(op, args, kwargs)
        return call


ALL = (
    Peer("compile", "torch_compile"),
    Peer("cuDNN", "sdpa_cudnn"),
    Peer("FA2", "sdpa_flash"),
    Peer("FA3", "flash_attention_3"),
    Peer("FA4", "flash_attention_4"),
    Peer("FlashInfer", "flashinfer_peer"),
    Peer("fla", "fla_peer"),
    Peer("quack", "quack_peer"),
    Peer("vLLM", "vllm_routers"),
    Peer("Marlin", "marlin_moe"),
    Peer("Humming", "humming_moe"),
    Peer("Humming grouped", "humming_grouped"),
    Peer("triton_kernels", "triton_kernels_moe"),
    Peer("grouped_mm", "torch_grouped_mm"),
    Peer("FlashMLA", "flashmla"),
    Peer("DeepGEMM", "deepgemm"),
    Peer("DeepGEMM, vLLM", "deepgemm", by="select"),
    Peer("topk", "vllm_topk", by="torch_topk"),
    Peer("vLLM cooperative", "vllm_topk", by="cooperative"),
    Peer("vLLM persistent", "vllm_topk", by="persistent"),
    Peer("vLLM per row", "vllm_topk", by="per_row"),
    Peer("vLLM per row, decode", "vllm_topk", by="per_row_decode"),
    Peer("vLLM cache", "vllm_cache"),
    Peer("index", "torch_rows"),
    Peer("cuBLAS", "torch_bmm"),
)
