"""What to compile for the prefill kernels of Blackwell."""

from __future__ import annotations

from typing import Any

from torch_attnkit.cuda import fake

from .. import arguments
from . import one_cta, two_cta
from .prefill import Prefill
from .two_cta_types import TwoCta
from .types import OneCta


def _prefill(*, dtype: str, dim: int, **signature: Any) -> Prefill:
    """The kernel that a signature asks for: the output of a head of 512 takes two CTAs."""
    if dim > 256:
        return Prefill(TwoCta(dtype=fake.dtype(dtype), dim=dim, **signature), two_cta.parts)
    return Prefill(OneCta(dtype=fake.dtype(dtype), dim=dim, **signature), one_cta.parts)


def trace_dense(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """For batches of sequences."""
    kernel = _prefill(dtype=dtype, **signature)
    return kernel, arguments.dense(dtype, kernel.c)


def trace_packed(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """For sequences one after another."""
    kernel = _prefill(dtype=dtype, varlen=True, **signature)
    return kernel, arguments.packed(dtype, kernel.c)
