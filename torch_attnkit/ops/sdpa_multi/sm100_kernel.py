"""Device side of sdpa_multi on Blackwell: flash_attention's, with queries that end where a sequence's keys do."""

from typing import Any

from torch_attnkit.ops.flash_attention import sm100_kernel


def trace(arch: str, **signature: Any) -> tuple[Any, list[Any]]:
    """What to compile. K and V come as (B, S, Hkv, D), whatever their strides."""
    return sm100_kernel.trace(arch, kv_len=True, at_end=True, **signature)
