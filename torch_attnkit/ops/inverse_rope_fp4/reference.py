"""What inverse_rope_fp4 computes."""

from __future__ import annotations

import torch

from torch_attnkit.formats import mxfp4, nvfp4, rope
from torch_attnkit.formats.scale_layout import to_128x4
from torch_attnkit.oracle import fp4


def reference(
    o: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    groups: int = 1,
    format: str = "nvfp4",
    scale_layout: str = "linear",
) -> tuple[torch.Tensor, torch.Tensor]:
    fp4.check_factor("inverse_rope_fp4", global_scale)
    Tq, Hq, D = o.shape
    turned = rope.apply(o, cos[:, None], sin[:, None], interleaved=True, inverse=True)  # (Tq, Hq, D)
    codes, scale = nvfp4.quantize(turned, global_scale) if format == "nvfp4" else mxfp4.quantize(turned)
    if scale_layout == "linear":
        return codes, scale  # (Tq, Hq, D/2), (Tq, Hq, D/block)
    scale = scale.reshape(Tq, groups, Hq // groups * scale.shape[-1])  # (Tq, groups, heads of a group * D/block)
    return codes, to_128x4(scale.transpose(0, 1))
