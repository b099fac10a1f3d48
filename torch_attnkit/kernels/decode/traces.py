"""What to compile for a decode step, over a contiguous cache or, where a page has keys, over pages.

Each function imports its kernel, and with it cutlass, when it is called. Rows of the caches start at multiples of 16
bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_attnkit.cuda.compile import Traced


def trace_mma(arch: str, *, dtype: str, fp8_kv: bool = False, **sizes: Any) -> Traced:
    """For few query heads a KV head; ``fp8_kv``: over caches of E4M3."""
    from torch_attnkit.cuda import fake

    from .arguments import arguments
    from .config import Fp8KvConfig, MmaConfig
    from .mma import decode_mma

    if fp8_kv:
        config = Fp8KvConfig(fake.dtype(dtype), **sizes)
        return decode_mma(config), arguments(arch, dtype, config, config.scales, kv="f8e4m3")
    plain = MmaConfig(fake.dtype(dtype), **sizes)
    return decode_mma(plain), arguments(arch, dtype, plain)


def trace_wgmma(arch: str, *, dtype: str, **sizes: Any) -> Traced:
    """Hopper, up to 64 query heads a KV head."""
    from torch_attnkit.cuda import fake

    from .arguments import arguments
    from .sm90.config import WgmmaConfig
    from .sm90.wgmma import decode_wgmma

    config = WgmmaConfig(fake.dtype(dtype), **sizes)
    return decode_wgmma(config), arguments(arch, dtype, config)


def trace_mla(arch: str, *, dtype: str, **sizes: Any) -> Traced:
    """Hopper, values that are the first 512 of a key's 512 or 576 columns."""
    from torch_attnkit.cuda import fake

    from .arguments import arguments
    from .sm90.config import MlaConfig
    from .sm90.mla import DecodeMla

    config = MlaConfig(fake.dtype(dtype), **sizes)
    return DecodeMla(config), arguments(arch, dtype, config)


def trace_tcgen05(arch: str, *, dtype: str, **sizes: Any) -> Traced:
    """Blackwell, many query heads a KV head, latents, and E4M3 queries."""
    from torch_attnkit.cuda import fake

    from .arguments import arguments
    from .sm100.config import Tcgen05Config
    from .sm100.tcgen05 import DecodeTcgen05

    config = Tcgen05Config(fake.dtype(dtype), **sizes)
    return DecodeTcgen05(config), arguments(arch, dtype, config, config.scales)
