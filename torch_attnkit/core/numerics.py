"""The arithmetic that references are defined in: each operation in the dtype that it names, whatever is switched on."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

# Since torch 2.9 the CPU's products have a setting of their own, before that they share that of the GPU.
if hasattr(torch._C, "_get_fp32_precision_getter"):
    _get: Callable[[], str] = functools.partial(torch._C._get_fp32_precision_getter, "mkldnn", "matmul")
    _put: Callable[[str], Any] = functools.partial(torch._C._set_fp32_precision_setter, "mkldnn", "matmul")
    _full, _rounded = "ieee", {"bf16", "tf32"}
else:
    _get, _put = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    _full, _rounded = "highest", {"high", "medium"}


class _FullProducts:
    """Float32 products of the CPU in float32, also where ``torch.set_float32_matmul_precision`` allows less.

    The setting belongs to the process: the first that enters stores it, and the last that leaves puts it back.
    """

    def __init__(self) -> None:
        self.lock, self.inside, self.before = threading.Lock(), 0, _full

    def __enter__(self) -> None:
        with self.lock:
            self.inside += 1
            if (now := _get()) in _rounded:
                self.before = now
                _put(_full)

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0 and self.before in _rounded:
                _put(self.before)
                self.before = _full


_full_products = _FullProducts()


def calls_no_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that computes nothing by PyTorch's operators: nothing that is switched on reaches it."""
    function.calls_no_torch = True  # type: ignore[attr-defined]
    return function


def exact(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` without autocast, whose casts would be its roundings, and with float32 products in float32."""
    if getattr(function, "calls_no_torch", False):
        return function

    def run(*args: Any) -> Any:
        if not (torch._C._is_any_autocast_enabled() or _full_products.inside or _get() in _rounded):
            return function(*args)
        with torch._C._DisableAutocast(), _full_products:
            return function(*args)

    return run
