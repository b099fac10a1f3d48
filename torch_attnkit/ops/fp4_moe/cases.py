"""Inputs of fp4_moe for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.oracle import fp4, sampling

ACTIVATIONS = ("none", *fp4.BLOCK)  # by the position that the table calls act

# blk and act as in op.py: 16 NVFP4 weights, 32 MXFP4; activations 0 none, 1 nvfp4, 2 mxfp4, 3 mxfp8. "token" and "four"
# are one launch on Hopper, with x in shared memory.
PARITY = {
    "some": dict(Tq=5, N=64, M=96, E=4, K=2, blk=16, act=0),
    "mxfp4": dict(Tq=9, N=96, M=160, E=5, K=3, blk=32, act=0),
    "nvfp4_both": dict(Tq=6, N=64, M=32, E=3, K=2, blk=16, act=1),
    "mxfp4_both": dict(Tq=6, N=64, M=32, E=3, K=2, blk=32, act=2),
    "mxfp8": dict(Tq=6, N=64, M=32, E=3, K=2, blk=32, act=3),
    "many": dict(Tq=70, N=96, M=160, E=3, K=2, blk=32, act=0),
    "many_both": dict(Tq=70, N=160, M=96, E=3, K=2, blk=16, act=1),
    "long_both": dict(Tq=34, N=2112, M=64, E=3, K=1, blk=16, act=1),
    "odd": dict(Tq=7, N=112, M=304, E=3, K=2, blk=16, act=0),
    "token": dict(Tq=1, N=544, M=288, E=6, K=4, blk=32, act=0),
    "four": dict(Tq=4, N=288, M=160, E=5, K=2, blk=16, act=0),
}
DEGENERATE = {
    "one": dict(Tq=1, N=32, M=32, E=1, K=1, blk=16, act=0),
    "no_choice": dict(Tq=3, N=32, M=32, E=2, K=0, blk=16, act=0),
    "empty": dict(Tq=0, N=64, M=32, E=4, K=2, blk=16, act=0),
}
_MODELS = {
    "deepseek_v4-nvfp4": dict(N=4096, M=2048, E=256, K=6, blk=16, limit=10),
    "deepseek_v4-mxfp4": dict(N=4096, M=2048, E=256, K=6, blk=32, limit=10),
    "gptoss": dict(N=2880, M=2880, E=128, K=4, blk=32, limit=7, gptoss=1, bias=1),
    "qwen3_next": dict(N=2048, M=512, E=512, K=10, blk=16),
}
_TOKENS = (1, 8, 32, 64, 128, 256, 512, 2048, 8192)
_PLAIN = {f"{name}-{tokens}": dict(Tq=tokens, act=0) | dims for name, dims in _MODELS.items() for tokens in _TOKENS}
# Models stand together, so that their lines share weights. zipf and same say which experts are popular.
_SKEWED = {
    f"{name}-{routes}-{tokens}": _PLAIN[f"{name}-{tokens}"] | {routes: 1}
    for name in ("deepseek_v4-nvfp4", "deepseek_v4-mxfp4")
    for routes in ("zipf", "same")
    for tokens in (128, 8192)
}
_QUANTISED = {
    f"{name}-{tokens}-x_nvfp4": _PLAIN[f"{name}-{tokens}"] | dict(act=1) for name in _MODELS for tokens in (8, 512)
}
BENCH = {
    case: dims for name in _MODELS for case, dims in (_PLAIN | _SKEWED | _QUANTISED).items() if case.startswith(name)
}
# GPT-OSS-20B, which fits where 120B, the "gptoss" above, does not.
BENCH |= {f"gptoss20b-{tokens}": _PLAIN["gptoss-1"] | dict(Tq=tokens, E=32) for tokens in (1, 4, 512)}
LAYER = ("N", "M", "E", "blk", "bias")  # sizes that the weights of a bench case depend on


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


def layer(dims: dict[str, int], dtype: torch.dtype, gen: torch.Generator) -> tuple[Any, ...]:
    """The weights of a bench case, w13 to bias2; like a checkpoint's, with a global number per expert in NVFP4."""
    N, M, E = dims["N"], dims["M"], dims["E"]
    format = "nvfp4" if dims["blk"] == 16 else "mxfp4"
    g13, g2 = (fp4.global_scales(gen, E) if format == "nvfp4" else None for _ in range(2))
    up, down = fp4.coded(gen, format, "linear", (E, 2 * M, N), g13), fp4.coded(gen, format, "linear", (E, N, M), g2)
    biases = (torch.randn(E, r, generator=gen).to(dtype) if dims.get("bias") else None for r in (2 * M, N))
    return *up, *down, g13, g2, *biases


def routed(
    dims: dict[str, int], dtype: torch.dtype, layer: tuple[Any, ...], gen: torch.Generator, variant: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call of a bench case through a layer; every turn has other routes."""
    x = torch.randn(dims["Tq"], dims["N"], generator=gen).to(dtype)
    weights = torch.rand(dims["Tq"], dims["K"], generator=gen) + 0.1
    weights = weights / weights.sum(-1, keepdim=True)
    kwargs = dict(
        format="nvfp4" if dims["blk"] == 16 else "mxfp4",
        activations=ACTIVATIONS[dims["act"]],
        swiglu="gptoss" if dims.get("gptoss") else "silu",
        limit=float(dims["limit"]) if "limit" in dims else None,
        interleaved=bool(dims.get("gptoss")),
    )
    return (x, weights, _routes(dims, variant).to(x.device), *layer), kwargs


def bench(dims: dict[str, int], dtype: torch.dtype, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return routed(dims, dtype, layer(dims, dtype, gen), gen)


def _routes(dims: dict[str, int], variant: int) -> torch.Tensor:
    """The experts of each token (Tq, K), distinct, made on the CPU so that `bytes` can count them.

    All experts are equally popular; with ``zipf`` the r-th of them is chosen as 1/r, with ``same`` K of them are all
    that is chosen. The K that win a race of exponential clocks, each as fast as its expert is popular, are a sample
    without replacement.
    """
    gen = torch.Generator().manual_seed(variant)
    rank = torch.randperm(dims["E"], generator=gen, device="cpu")  # (E,)
    popular = 1 / (1 + rank) if dims.get("zipf") else (rank < dims["K"]).float() if dims.get("same") else rank * 0 + 1
    clock = -torch.rand(dims["Tq"], dims["E"], generator=gen, device="cpu").log() / popular  # (Tq, E)
    return clock.topk(dims["K"], largest=False).indices.to(torch.int32)


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read x, the routing and the experts that the first turn's routes reach, write out."""
    Tq, N, M, K = (dims[n] for n in ("Tq", "N", "M", "K"))
    reached = len(_routes(dims, 0).unique())
    return int(2 * Tq * N * dtype.itemsize + Tq * K * 8 + reached * 3 * M * N * (1 / 2 + 1 / dims["blk"]))


def flops(dims: dict[str, int]) -> int:
    """Three products of M x N for every token and choice."""
    return 6 * dims["Tq"] * dims["K"] * dims["M"] * dims["N"]


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    k = d.kernel
    act, blk = k.choice((0, 0, 1, 2, 3)), k.choice((16, 32))
    sizes: tuple[int, ...] = (32, 64, 96, 128, 160, 256, 288, 544)
    if blk == 16 and act in (0, 1):
        sizes += (16, 48, 112, 304, 528)
    facts: sampling.Facts = dict(
        dtype=k.choice(row.dtypes.split()), N=k.choice(sizes), M=k.choice(sizes), blk=blk, act=act,
        E=k.choice((1, 2, 3, 5, 8, 40)), ids=k.choice(("i32", "i32", "i64")), swizzled=k.choice((0, 0, 1)),
    )  # fmt: skip
    facts["K"] = min(facts["E"], d.pick((1, 1, 2, 3, 6)))
    most = max(1, d.limits.terms // (6 * facts["K"] * facts["M"] * facts["N"]))
    facts["T"] = 0 if d.sometimes(0.02) else min(most, d.pick((1, 1, 2, 3, 7, 8, 9, 16, 17, 33, 70, 150)))
    facts |= dict(routes=d.pick(("", "", "one", "few", "none")), missing=d.pick((0, 0, 10, 60)))
    facts |= dict(gptoss=d.pick((0, 1)), limit=d.pick((0.0, 0.0, 1.0, 7.0)), alpha=d.pick((1.702, 1.702, 0.5)))
    facts |= dict(interleaved=d.pick((0, 1)), biases=d.pick((0, 0, 1, 2, 3)), globals=d.pick((0, 0, 1, 2, 3)))
    facts |= dict(q_by=d.pick((1, 1, 1, 30, 0.01)), seed=d.call.randrange(1 << 30))
    facts |= {"x.at": d.layout(2, (0,)), "weights.at": d.layout(2, (0,)), "indices.at": d.layout(2)}
    return facts | {f"{name}.at": d.layout(3) for name in ("w13_scale", "w2_scale")}


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``routes``: "one" expert for all tokens, a "few", "none"; ``missing``: percent of the routes that are -1.

    ``biases`` and ``globals``: which of two there are, by their bits; global scales are those of nvfp4 alone.
    """
    T, N, M, E, K, act = (f[n] for n in ("T", "N", "M", "E", "K", "act"))
    format, layout = "nvfp4" if f["blk"] == 16 else "mxfp4", "128x4" if f["swizzled"] else "linear"
    g13, g2 = (fp4.global_scales(gen, E) if f["globals"] & bit and format == "nvfp4" else None for bit in (1, 2))
    gx, gh = (fp4.global_scales(gen) if f["globals"] & bit and act == 1 else None for bit in (1, 2))
    among = {"": E, "one": 1, "few": min(3, E), "none": E}[f["routes"]]
    choice = torch.rand(T, K, E, generator=gen)[..., :among].argmax(-1)  # (T, K), with repetition
    gone = torch.rand(T, K, generator=gen) * 100 < (100 if f["routes"] == "none" else f["missing"])
    dtype = DTYPES[f["dtype"]]
    bias13, bias2 = (
        torch.randn(E, rows, generator=gen).to(dtype) if f["biases"] & bit else None
        for rows, bit in ((2 * M, 1), (N, 2))
    )
    args = (
        (torch.randn(T, N, generator=gen) * f["q_by"]).to(dtype),
        torch.rand(T, K, generator=gen),
        choice.masked_fill(gone, -1).to(DTYPES[f["ids"]]),
        *fp4.coded(gen, format, layout, (E, 2 * M, N), g13),
        *fp4.coded(gen, format, layout, (E, N, M), g2),
        g13, g2, bias13, bias2, gx, gh,
    )  # fmt: skip
    kwargs = dict(
        format=format, activations=ACTIVATIONS[act], swiglu="gptoss" if f["gptoss"] else "silu", alpha=f["alpha"],
        limit=f["limit"] or None, interleaved=bool(f["interleaved"]), scale_layout=layout,
    )  # fmt: skip
    return args, kwargs
