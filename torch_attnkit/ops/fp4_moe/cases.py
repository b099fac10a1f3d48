"""Inputs of fp4_moe for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.oracle import fp4

from .op import ACTIVATIONS

# blk and act as in op.py: 16 NVFP4 weights, 32 MXFP4; activations 0 none, 1 nvfp4, 2 mxfp4, 3 mxfp8.
PARITY = {
    "some": dict(Tq=5, N=64, M=96, E=4, K=2, blk=16, act=0),
    "mxfp4": dict(Tq=9, N=96, M=160, E=5, K=3, blk=32, act=0),
    "nvfp4_both": dict(Tq=6, N=64, M=32, E=3, K=2, blk=16, act=1),
    "mxfp4_both": dict(Tq=6, N=64, M=32, E=3, K=2, blk=32, act=2),
    "mxfp8": dict(Tq=6, N=64, M=32, E=3, K=2, blk=32, act=3),
}
DEGENERATE = {
    "one": dict(Tq=1, N=32, M=32, E=1, K=1, blk=16, act=0),
    "no_choice": dict(Tq=3, N=32, M=32, E=2, K=0, blk=16, act=0),
    "empty": dict(Tq=0, N=64, M=32, E=4, K=2, blk=16, act=0),
}
_MODELS = {
    "deepseek_v4": dict(N=4096, M=2048, E=256, K=6, limit=10),
    "gptoss": dict(N=2880, M=2880, E=128, K=4, blk=32, limit=7, gptoss=1),
    "qwen3_next": dict(N=2048, M=512, E=512, K=10),
}
BENCH = {
    f"{name}-{tokens}{suffix}": dict(dict(Tq=tokens, blk=16, act=act) | model)
    for name, model in _MODELS.items()
    for tokens in (1, 16, 128, 4096)
    for act, suffix in ((0, ""), (1, "-nvfp4"))
}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    Tq, N, M, E, K, act = (dims[n] for n in ("Tq", "N", "M", "E", "K", "act"))
    scaled = "global_scale" in features
    format = "nvfp4" if dims["blk"] == 16 or (scaled and act != 1) else "mxfp4"  # only nvfp4 has global scales
    layout = "128x4" if "swizzled" in features else "linear"
    g13, g2 = (fp4.global_scales(gen, E) if scaled and format == "nvfp4" else None for _ in range(2))
    gx, gh = (fp4.global_scales(gen) if scaled and act == 1 else None for _ in range(2))
    choice = torch.rand(Tq, E, generator=gen).argsort(-1)[:, : min(K, E)]  # (Tq, K), distinct in a row
    choice = torch.where(torch.rand(choice.shape, generator=gen) < 0.1, -1, choice)
    args = (
        torch.randn(Tq, N, generator=gen).to(dtype),
        torch.rand(choice.shape, generator=gen),
        choice.to(torch.int32),
        *fp4.coded(gen, format, layout, (E, 2 * M, N), g13),
        *fp4.coded(gen, format, layout, (E, N, M), g2),
        g13,
        g2,
        torch.randn(E, 2 * M, generator=gen).to(dtype) if "bias" in features else None,
        torch.randn(E, N, generator=gen).to(dtype) if "bias" in features else None,
        gx,
        gh,
    )
    kwargs = dict(
        format=format,
        activations=ACTIVATIONS[act],
        swiglu="gptoss" if "gptoss" in features or dims.get("gptoss") else "silu",
        limit=float(dims.get("limit", 1)) if "limit" in features or "limit" in dims else None,
        interleaved="interleaved" in features or "gptoss" in dims,
        scale_layout=layout,
    )
    return args, kwargs


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read x, the routing and the experts that random routing is expected to hit, write out."""
    Tq, N, M, E, K = (dims[n] for n in ("Tq", "N", "M", "E", "K"))
    hit = E * (1 - (1 - K / E) ** Tq)
    return int(2 * Tq * N * dtype.itemsize + Tq * K * 8 + hit * 3 * M * N * (1 / 2 + 1 / dims["blk"]))


def flops(dims: dict[str, int]) -> int:
    """Three products of M x N for every token and choice."""
    return 6 * dims["Tq"] * dims["K"] * dims["M"] * dims["N"]
