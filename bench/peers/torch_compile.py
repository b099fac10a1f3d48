"""``torch.compile`` of the op's reference, as a user without kernels would have it. Norms, merges and quantisers only.

Attention references build the whole score matrix and check data on the host; nobody would run them compiled. A global
scale of FP4 is checked on the host, too.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

OPS = (
    "gated_rmsnorm", "merge_partials", "nvfp4_quantize", "nvfp4_dequantize", "mxfp4_quantize", "mxfp4_dequantize",
)  # fmt: skip


@functools.cache
def _compiled(op: str) -> Callable[..., Any]:
    torch._dynamo.config.cache_size_limit = 64
    return torch.compile(importlib.import_module(f"torch_attnkit.ops.{op}.reference").reference, dynamic=False)


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    checked = "nvfp4" in op and any(isinstance(a, torch.Tensor) and a.dim() == 0 for a in args)
    return functools.partial(_compiled(op), *args, **kwargs) if op in OPS and not checked else None
