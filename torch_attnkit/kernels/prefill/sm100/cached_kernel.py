"""What to compile for queries at the end of a cache on Blackwell: the kernel of dense batches."""

from __future__ import annotations

from typing import Any

from torch_attnkit.cuda import fake

from ..types import Outputs
from .kernel import trace_dense


def trace_cached(arch: str, *, split: bool = False, **signature: Any) -> tuple[Any, list[Any]]:
    """K and V come as (B, S, Hkv, D), whatever their strides.

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
