"""cuDNN's attention, through torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.attention import SDPBackend

from bench.peers import sdpa


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    return sdpa.adapt(SDPBackend.CUDNN_ATTENTION, op, args, kwargs)
