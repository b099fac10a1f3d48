"""What sparse_fmha_inverse_rope_fp4 computes: attention, then what is made of its output; and when codes are right."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.formats import rope
from torch_attnkit.formats.scale_layout import from_128x4, to_128x4
from torch_attnkit.ops.inverse_rope_fp4.reference import reference as quantised
from torch_attnkit.ops.sparse_fmha_with_swa.reference import NAME as ATTENTION
from torch_attnkit.ops.sparse_fmha_with_swa.reference import reference as attention
from torch_attnkit.oracle import fp4, fp4_results

NAME = "sparse_fmha_inverse_rope_fp4"
_COS = 3  # where cos and sin are among the arguments, and o_global
_SIN, _GLOBAL = _COS + 1, 13


def reference(
    q: torch.Tensor,
    swa_kv: torch.Tensor,
    swa_end: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    compressed_kv: torch.Tensor | None = None,
    topk_indices: torch.Tensor | None = None,
    compressed_len: torch.Tensor | None = None,
    request_ids: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    swa_block_table: torch.Tensor | None = None,
    compressed_block_table: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    o_global: torch.Tensor | None = None,
    scale: float | None = None,
    window: int = 128,
    format: str = "none",
    rope_dim: int = 64,
    groups: int = 1,
    o_format: str = "nvfp4",
    scale_layout: str = "linear",
) -> tuple[torch.Tensor, torch.Tensor]:
    fp4.check_global(NAME, o_global=o_global)
    tensors = (
        q, swa_kv, swa_end, compressed_kv, topk_indices, compressed_len, request_ids, sink, swa_block_table,
        compressed_block_table, global_scale,
    )  # fmt: skip
    try:
        out, _, _ = attention(*tensors, scale=scale, window=window, format=format, rope_dim=rope_dim)  # (Tq, Hq, D)
    except ValueError as refusal:
        raise ValueError(str(refusal).replace(ATTENTION, NAME, 1)) from None
    return quantised(out, cos, sin, o_global, groups, o_format, scale_layout)


def numbers(*args: Any, **kwargs: Any) -> torch.Tensor:
    """What ``reference`` quantises for the same arguments, (Tq, Hq, D): the output of attention, rotated back."""
    tensors = (*args[:_COS], *args[_SIN + 1 : _GLOBAL])
    out, _, _ = attention(*tensors, **{n: kwargs[n] for n in ("scale", "window", "format", "rope_dim") if n in kwargs})
    return rope.apply(out, args[_COS][:, None], args[_SIN][:, None], interleaved=True, inverse=True)


def check(
    name: str,
    got: list[torch.Tensor],
    found: list[tuple[torch.Tensor, torch.Tensor]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> float:
    """Raise AssertionError unless the codes and scales are those of ``numbers`` as exact as attention has to be.

    ``found`` are what ``numbers`` gives in float64 and in the call's dtype, for this call and for others like it, by
    which only their errors count.
    """
    (exact, ref), *_ = found
    codes, scale = (t.to(exact.device) for t in got)
    bound = max(fp4_results.tolerance(e, r, exact) for e, r in found)
    form, swizzled = kwargs.get("o_format", "nvfp4"), kwargs.get("scale_layout") == "128x4"
    if swizzled:
        groups, (Tq, Hq, D) = kwargs.get("groups", 1), exact.shape
        linear = from_128x4(scale, Tq, Hq // groups * D // fp4.BLOCK[form])  # (groups, Tq, heads of a group * D/block)
        if not torch.equal(to_128x4(linear), scale):
            raise AssertionError(f"{name} o_scale: padding of the 128x4 layout that is not 0")
        scale = linear.transpose(0, 1).reshape(Tq, Hq, D // fp4.BLOCK[form])
    o_global = args[_GLOBAL] if len(args) > _GLOBAL else None
    return fp4_results.check(name, codes, scale, exact, ref, bound, form, o_global)
