"""What fp4_moe computes."""

from __future__ import annotations

import torch

from torch_attnkit.oracle import checks, fp4


def _swiglu(both: torch.Tensor, swiglu: str, alpha: float, limit: float | None, interleaved: bool) -> torch.Tensor:
    """(n, 2M) to (n, M)."""
    gate, up = (both[:, 0::2], both[:, 1::2]) if interleaved else both.chunk(2, -1)  # (n, M) each
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if swiglu == "silu":
        return gate * gate.sigmoid() * up
    return gate * (alpha * gate).sigmoid() * (up + 1)


def reference(
    x: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w13_global: torch.Tensor | None = None,
    w2_global: torch.Tensor | None = None,
    bias13: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    x_global: torch.Tensor | None = None,
    h_global: torch.Tensor | None = None,
    format: str = "nvfp4",
    activations: str = "none",
    swiglu: str = "silu",
    alpha: float = 1.702,
    limit: float | None = None,
    interleaved: bool = False,
    scale_layout: str = "linear",
) -> torch.Tensor:
    (E, M2, _), (_, N, M_bytes), block = w13.shape, w2.shape, fp4.BLOCK[format]
    checks.in_range("fp4_moe", "indices", indices, -1, E - 1)
    chosen = indices.unique()
    chosen = chosen[chosen >= 0].long()  # nobody looks at the others
    fp4.check_experts("fp4_moe", chosen, w13_global=w13_global, w2_global=w2_global)
    fp4.check_global("fp4_moe", x_global=x_global, h_global=h_global)
    acc = torch.promote_types(x.dtype, torch.float32)
    s13 = fp4.load_scale(w13_scale, scale_layout, M2, N // block)  # (E, 2M, N/block)
    s2 = fp4.load_scale(w2_scale, scale_layout, N, 2 * M_bytes // block)  # (E, N, M/block)
    tokens = fp4.round_trip(x, activations, x_global, acc)  # (Tq, N)
    parts = torch.zeros(*indices.shape, N, dtype=acc, device=x.device)  # (Tq, K, N)
    for e in chosen.tolist():
        t, k = (indices == e).nonzero(as_tuple=True)  # (n,) each
        up = fp4.dequantize(w13[e], s13[e], format, None if w13_global is None else w13_global[e], acc)  # (2M, N)
        down = fp4.dequantize(w2[e], s2[e], format, None if w2_global is None else w2_global[e], acc)  # (N, M)
        both = tokens[t] @ up.T  # (n, 2M)
        if bias13 is not None:
            both = both + bias13[e].to(acc)
        h = _swiglu(both, swiglu, alpha, limit, interleaved)  # (n, M)
        h = fp4.round_trip(h if activations != "none" else h.to(x.dtype), activations, h_global, acc)
        y = h @ down.T  # (n, N)
        if bias2 is not None:
            y = y + bias2[e].to(acc)
        parts[t, k] = y * weights[t, k, None].to(acc)
    out = torch.zeros(x.shape, dtype=acc, device=x.device)  # (Tq, N)
    for k in range(indices.shape[1]):  # in the order of k, so that the sum does not depend on the loop over experts
        out = out + parts[:, k]
    return out.to(x.dtype)
