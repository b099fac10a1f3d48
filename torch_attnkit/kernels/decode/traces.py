"""The kernels of a decode step by function: each imports its module, and with it cutlass, when it is compiled."""

from __future__ import annotations

from typing import Any

from torch_attnkit.cuda.compile import Traced


def trace_mma(arch: str, **signature: Any) -> Traced:
    """Few query heads a KV head, by ``mma.sync``."""
    if arch == "sm90":
        from .sm90 import kernel as hopper

        return hopper.trace_mma(arch, **signature)
    from .sm100 import kernel as blackwell

    return blackwell.trace_mma(arch, **signature)


def trace_codes(arch: str, **signature: Any) -> Traced:
    """The same over caches of E4M3."""
    if arch == "sm90":
        from .sm90 import kernel as hopper

        return hopper.trace_codes(arch, **signature)
    from .sm100 import kernel as blackwell

    return blackwell.trace_codes(arch, **signature)


def trace_wgmma(arch: str, **signature: Any) -> Traced:
    """Hopper, up to 64 query heads a KV head."""
    from .sm90.kernel import trace_wgmma as traced

    return traced(arch, **signature)


def trace_mla(arch: str, **signature: Any) -> Traced:
    """Hopper, 512 columns where keys are values, too."""
    from .sm90.kernel import trace_mla as traced

    return traced(arch, **signature)


def trace_latent(arch: str, **signature: Any) -> Traced:
    """Hopper, latents."""
    from .sm90.latent_kernel import trace_latent as traced

    return traced(arch, **signature)


def trace_tcgen05(arch: str, **signature: Any) -> Traced:
    """Blackwell, many query heads a KV head, and latents."""
    from .sm100.kernel import trace_tcgen05 as traced

    return traced(arch, **signature)
