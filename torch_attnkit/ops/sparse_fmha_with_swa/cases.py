"""Inputs of sparse_fmha_with_swa for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.oracle import inputs

PARITY = {
    "prefill": dict(Tq=24, Hq=4, R=2, S=40, C=12, K=5, D=64, window=8),
    "decode": dict(Tq=3, Hq=16, R=3, S=130, C=50, K=20, D=64, window=128),
    "deepseek": dict(Tq=4, Hq=9, R=1, S=140, C=70, K=64, D=512, window=128),
}
DEGENERATE = {
    "one": dict(Tq=1, Hq=4, R=1, S=1, C=1, K=1, D=64, window=1),
    "nothing": dict(Tq=4, Hq=3, R=2, S=0, C=0, K=0, D=64, window=128),
    "empty": dict(Tq=0, Hq=4, R=2, S=8, C=4, K=2, D=64, window=4),
}
# "compressed" and "topk" name the two kinds of layer: CSA lists entries (topk), HCA sees all of them.
BENCH = {
    "csa-prefill": dict(Tq=4096, Hq=64, R=1, S=4096, C=1024, K=512, D=512, window=128, compressed=1, topk=1, sink=1),
    "hca-prefill": dict(Tq=4096, Hq=64, R=1, S=4096, C=32, K=0, D=512, window=128, compressed=1, sink=1),
    "csa-decode": dict(Tq=64, Hq=64, R=64, S=256, C=8192, K=512, D=512, window=128, compressed=1, topk=1, sink=1),
    "csa-decode-pro": dict(Tq=64, Hq=128, R=64, S=256, C=8192, K=1024, D=512, window=128, compressed=1, topk=1, sink=1),
    "hca-decode": dict(Tq=64, Hq=64, R=64, S=256, C=1024, K=0, D=512, window=128, compressed=1, sink=1),
    "window-prefill": dict(Tq=4096, Hq=64, R=1, S=4096, C=0, K=0, D=512, window=128, sink=1),
}  # fmt: skip


def _choose(gen: torch.Generator, Tq: int, C: int, K: int) -> torch.Tensor:
    """(Tq, K) distinct entries out of C in any order, a quarter of them absent; all absent beyond C."""
    order = torch.rand(Tq, C, generator=gen).argsort(-1)[:, :K].to(torch.int32)
    out = torch.full((Tq, K), -1, dtype=torch.int32)
    out[:, : order.shape[1]] = order
    return out.masked_fill(torch.rand(Tq, K, generator=gen) < 0.25, -1)


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    Tq, R, S, C, D = dims["Tq"], dims["R"], dims["S"], dims["C"], dims["D"]
    compressed = {"compressed", "topk", "compressed_len"} & set(features)
    args = (
        inputs.normal(gen, dtype, Tq, dims["Hq"], D),
        inputs.normal(gen, dtype, R, S, D),
        inputs.integers(gen, 0, S, Tq),
        inputs.normal(gen, dtype, R, C, D) if compressed else None,
        _choose(gen, Tq, C, dims["K"]) if "topk" in features else None,
        inputs.lengths(gen, Tq, C) if "compressed_len" in features else None,
        inputs.integers(gen, 0, R - 1, Tq) if "request_ids" in features else None,
        inputs.normal(gen, torch.float32, dims["Hq"]) if "sink" in features else None,
    )
    return args, dict(window=dims["window"], normalize="unnormalized" not in features)


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read q and both caches once, as far as any token can look, write out and lse."""
    near = min(dims["S"], dims["Tq"] // dims["R"] + dims["window"])  # tokens of a request see neighbouring windows
    far = min(dims["C"], dims["Tq"] // dims["R"] * dims["K"]) if dims.get("topk") else dims["C"]
    elements = dims["R"] * (near + far) * dims["D"] + 2 * dims["Tq"] * dims["Hq"] * dims["D"]
    return elements * dtype.itemsize + dims["Tq"] * (dims["Hq"] + 1 + dims["K"]) * 4


def flops(dims: dict[str, int]) -> int:
    """Two products, two operations a term."""
    seen = min(dims["S"], dims["window"]) + (dims["K"] if dims.get("topk") else dims["C"])
    return 4 * dims["Tq"] * dims["Hq"] * seen * dims["D"]
