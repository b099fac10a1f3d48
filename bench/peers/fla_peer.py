"""flash-linear-attention's fused gated RMS norm (Triton)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    if op != "gated_rmsnorm":
        return None
    from fla.modules.norm.fused_norm_gate import layer_norm_gated_fwd

    y, z = (a.reshape(-1, a.shape[-1]) for a in args[:2])
    forward = functools.partial(
        layer_norm_gated_fwd,
        y,
        z,
        args[2],
        None,
        activation="swish",
        eps=kwargs["eps"],
        out_dtype=z.dtype,
        is_rms_norm=True,
    )
    return lambda: forward()[0].view(args[1].shape)
