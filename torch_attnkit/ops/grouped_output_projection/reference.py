"""What grouped_output_projection computes."""

from __future__ import annotations

import torch

from torch_attnkit.oracle import fp4


def reference(
    o: torch.Tensor,
    wo_a: torch.Tensor,
    o_scale: torch.Tensor | None = None,
    wo_scale: torch.Tensor | None = None,
    o_global: torch.Tensor | None = None,
    wo_global: torch.Tensor | None = None,
    format: str = "none",
    scale_layout: str = "linear",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    fp4.check_global("grouped_output_projection", o_global=o_global, wo_global=wo_global)
    (Tq, _, Ko), R = o.shape, wo_a.shape[1]
    if o_scale is None or wo_scale is None:
        acc = torch.promote_types(o.dtype, torch.float32)
        a, w, store = o.to(acc), wo_a.to(acc), dtype or o.dtype  # (Tq, G, K), (G, R, K)
    else:
        acc, store = torch.float64 if dtype == torch.float64 else torch.float32, dtype or torch.float32
        kb = 2 * Ko // fp4.BLOCK[format]
        so = fp4.load_scale(o_scale, scale_layout, Tq, kb)  # (Tq, G, K/block) or (G, Tq, K/block)
        so = so if scale_layout == "linear" else so.transpose(0, 1)
        a = fp4.dequantize(o, so, format, o_global, acc)  # (Tq, G, K)
        w = fp4.dequantize(wo_a, fp4.load_scale(wo_scale, scale_layout, R, kb), format, wo_global, acc)  # (G, R, K)
    return torch.einsum("tgk,grk->tgr", a, w).to(store).contiguous()
