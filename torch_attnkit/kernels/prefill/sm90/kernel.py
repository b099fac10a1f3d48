"""What to compile for the prefill kernels of Hopper."""

from __future__ import annotations

from typing import Any

from torch_attnkit.cuda import fake

from .. import arguments
from .prefill import Prefill
from .types import Config


def trace_dense(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """For batches of sequences."""
    config = Config(dtype=fake.dtype(dtype), **signature)
    return Prefill(config), arguments.dense(dtype, config)


def trace_packed(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """For sequences one after another."""
    config = Config(dtype=fake.dtype(dtype), varlen=True, **signature)
    return Prefill(config), arguments.packed(dtype, config)
