"""Inputs of sdpa_decode for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.kernels.decode.problem import LATENTS
from torch_attnkit.oracle import cache_sampling, inputs, sampling
from torch_attnkit.oracle.attention import visible

# Lengths beside the borders of tiles of 16 to 128 keys, and beside the 512 keys up to which one block attends a group.
PARITY = {
    "ragged": dict(B=3, Hq=8, Hkv=2, S=65, D=64, Dv=64),
    "mqa": dict(B=2, Hq=6, Hkv=1, S=129, D=64, Dv=32),
    "long": dict(B=2, Hq=16, Hkv=2, S=513, D=64, Dv=64),
    "many-heads": dict(B=2, Hq=70, Hkv=1, S=700, D=64, Dv=64),
    "many-parts": dict(B=1, Hq=2, Hkv=1, S=3000, D=64, Dv=64),
}
# unseen=1: lengths of 0, and starts at the end.
DEGENERATE = {
    "one": dict(B=1, Hq=4, Hkv=1, S=1, D=64, Dv=64),
    "no-keys": dict(B=2, Hq=4, Hkv=2, S=0, D=64, Dv=64),
    "empty": dict(B=0, Hq=4, Hkv=2, S=8, D=64, Dv=64),
    "unseen": dict(B=4, Hq=4, Hkv=2, S=64, D=64, Dv=64, unseen=1),
}
EXTRAS = inputs.DECODE_EXTRAS
_OWN = 16  # query heads when each has a KV head of its own: more are only more of the same
_STEPS = ((1, 1024), (1, 8192), (1, 131072), (16, 8192), (64, 4096), (128, 8192))  # sequences, and keys of each
BENCH = (
    {f"{b}x{s}": dict(B=b, Hq=32, Hkv=8, S=s, D=128, Dv=128) for b, s in _STEPS}
    | {"ragged-64x8192": dict(B=64, Hq=32, Hkv=8, S=8192, D=128, Dv=128, ragged=1)}
    | {f"gptoss-{b}x8192": dict(B=b, Hq=64, Hkv=8, S=8192, D=64, Dv=64, window=128, sink=1) for b in (1, 16, 128)}
    | {f"D256-{b}x8192": dict(B=b, Hq=16, Hkv=8, S=8192, D=256, Dv=256) for b in (1, 16, 128)}
    | {f"group16-{b}x8192": dict(B=b, Hq=64, Hkv=4, S=8192, D=128, Dv=128) for b in (1, 16, 128)}
    | {f"mqa-D512-{b}x8192": dict(B=b, Hq=64, Hkv=1, S=8192, D=512, Dv=512) for b in (1, 16, 128)}
    | {
        f"mla-{h}h-{b}x8192": dict(B=b, Hq=h, Hkv=1, S=8192, D=512, Dv=512, same=1)
        for h in (16, 64, 128)
        for b in (1, 16, 128)
    }
    | {
        f"latents-{h}h-{b}x8192": dict(B=b, Hq=h, Hkv=1, S=8192, D=576, Dv=512, same=1)
        for h in (16, 64, 128)
        for b in (1, 16, 128)
    }
    | {f"e4m3-{b}x{s}": dict(B=b, Hq=32, Hkv=8, S=s, D=128, Dv=128, bits=8) for b, s in _STEPS}
    | {f"e4m3-D{d}-16x8192": dict(B=16, Hq=4096 // d, Hkv=8, S=8192, D=d, Dv=d, bits=8) for d in (64, 256)}
)


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    B, S = dims["B"], dims["S"]
    Hq, Hkv = (dims["Hq"], dims["Hkv"]) if "gqa" in features else (min(dims["Hq"], _OWN),) * 2
    kv_len = inputs.lengths(gen, B, S, unseen=bool(dims.get("unseen")))
    stored = torch.float8_e4m3fn if dims.get("bits") == 8 else dtype
    args = (
        inputs.normal(gen, dtype, B, Hq, dims["D"]),
        inputs.normal(gen, stored, B, Hkv, S, dims["D"]),
        inputs.normal(gen, stored, B, Hkv, S, dims["Dv"]),
        kv_len,
        inputs.normal(gen, torch.float32, Hq) if "sink" in features else None,
        inputs.starts(gen, kv_len, unseen=bool(dims.get("unseen"))) if "kv_start" in features else None,
        *inputs.scales(gen, "scales" in features, B, Hkv),
    )
    return args, inputs.score_arguments(features, S)


def bench(dims: dict[str, int], dtype: torch.dtype, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Full caches, or with ``ragged`` the lengths of a batch in service, evenly spread over 1..S.

    With ``same`` one tensor is keys and, in its first Dv columns, values, as the latent vectors of MLA are once its
    projections are absorbed.
    """
    args, kwargs = make(dims, dtype, ("gqa",) + ("sink",) * dims.get("sink", 0), gen)
    k, v = args[1:3]
    if dims.get("same"):
        v = k if dims["Dv"] == dims["D"] else k[..., : dims["Dv"]]
    return (*args[:2], v, torch.tensor(_lengths(dims), dtype=torch.int32), *args[4:]), kwargs | dict(
        window=dims.get("window", -1)
    )


def _lengths(dims: dict[str, int]) -> list[int]:
    B, S = dims["B"], dims["S"]
    return [1 + (S - 1) * i // (B - 1) for i in range(B)] if dims.get("ragged") else [S] * B


def _seen(dims: dict[str, int]) -> int:
    """Visible keys of all sequences."""
    return sum(min(n, dims.get("window", n)) for n in _lengths(dims))


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read q and the visible K and V once, write out and lse."""
    tokens = _seen(dims) * dims["Hkv"] * (dims["D"] + (0 if dims.get("same") else dims["Dv"]))
    heads = dims["B"] * dims["Hq"]
    inside = tokens * (1 if dims.get("bits") == 8 else dtype.itemsize) + heads * dims["D"] * dtype.itemsize
    return inside + heads * dims["Dv"] * max(2, dtype.itemsize) + heads * 4


def flops(dims: dict[str, int]) -> int:
    """Two products, two operations a term."""
    return 2 * dims["Hq"] * _seen(dims) * (dims["D"] + dims["Dv"])


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    facts, on = sampling.attention(d, row, (1, 1, 2, 3, 4, 7, 8, 9, 16, 20, 70))
    facts |= cache_sampling.bits(row)
    S = d.size(d.limits.keys * 4 if d.sometimes(0.1) else d.limits.keys)
    S = 0 if d.sometimes(0.02) else min(S, sampling.most_keys(d, facts, 1))
    facts |= dict(S=S) | sampling.batch(d, facts, 1, S) | sampling.scores(d, facts, on, S)
    facts["kv_len"] = d.ragged(facts["B"], S)
    facts["kv_start"] = d.ragged(facts["B"], S) if "kv_start" in on else ""
    step = sampling.aligned(row, cache_sampling.stored(facts))
    facts["q.at"] = d.layout(3, (0, 1), min(step, 4))
    facts |= {f"{name}.at": d.layout(4, (0, 1), step) for name in ("k_cache", "v_cache")}
    share = 0.5 if (facts["D"], facts["Dv"]) in LATENTS else 0.2 if facts["D"] == facts["Dv"] else 0.0
    return facts | dict(same=int(d.sometimes(share)))


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """With ``same`` one tensor is keys and, in its first Dv columns, values."""
    B, S, Hkv, Hq = f["B"], f["S"], f["Hkv"], f["Hkv"] * f["group"]
    kv_len = sampling.counts(f["kv_len"] or str(S), B, S)
    kv_start = sampling.counts(f["kv_start"], B, S)
    assert kv_len is not None
    scores = sampling.score_arguments(f)
    keep = visible(
        kv_len[:, None] - 1, S, 0 if kv_start is None else kv_start[:, None], kv_len[:, None], causal=True,
        window=f["window"], sink_tokens=f["sink_tokens"],
    )  # fmt: skip
    seen = keep.expand(B, Hkv, S)
    q, k, v = cache_sampling.qkv(f, gen, (B, Hq), (B, Hkv, S), seen)
    rest = (sampling.sink(f, gen, Hq), kv_start, *sampling.scales(f, gen, B, Hkv))
    return (q, k, k[..., : f["Dv"]] if f["same"] else v, kv_len, *rest), scores


def shared(row: Kernel, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Of a row of latents on NVIDIA GPUs, a case's arguments with the first columns of k_cache as v_cache.

    One tensor for both has kernels of its own there, so parity judges the case on it, too.
    """
    if row.on == "mps" or (row.dims.get("D"), row.dims.get("Dv")) not in [((d,), (dv,)) for d, dv in LATENTS]:
        return None
    return (*args[:2], args[1][..., : args[2].shape[-1]], *args[3:])
