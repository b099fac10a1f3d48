"""What to compile for the prefill kernels of Blackwell."""

from __future__ import annotations

from typing import Any

from torch_attnkit.cuda import fake

from .. import arguments
from ..types import Outputs
from . import one_cta, two_cta
from .prefill import Prefill
from .types import OneCta, TwoCta


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


def trace_cached(arch: str, *, split: bool = False, **signature: Any) -> tuple[Any, list[Any]]:
    """For queries at the end of a cache, as a dense batch: K and V come as (B, S, Hkv, D), whatever their strides.

    With ``split`` the outputs are those of splits of the keys, (splits * B, T, Hq, Dv) and (splits * B, T, Hq) in f32.
    """
    host, (ins, outs, scalars, stream) = trace_dense(arch, kv_len=True, ends_at_kv_len=True, split=split, **signature)
    if split:
        sequences, tokens, heads = (fake.dim32() for _ in range(3))
        outs = Outputs(
            fake.tensor("f32", (sequences, tokens, heads, signature["dim_v"]), (*(fake.dim(4) for _ in range(3)), 1)),
            fake.tensor("f32", (sequences, tokens, heads), align=4),
            None,
        )
    return host, [ins, outs, scalars, stream]
