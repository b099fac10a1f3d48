"""Inputs of sdpa_decode_paged for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.kernels.decode.problem import LATENTS
from torch_attnkit.ops.sdpa_decode.cases import shared as shared
from torch_attnkit.oracle import cache_sampling, inputs, sampling
from torch_attnkit.oracle.attention import visible

# Lengths as in sdpa_decode, S where the last page is not to be full.
PARITY = {
    "ragged": dict(B=3, Hq=8, Hkv=2, Np=16, Ps=16, Mp=5, S=65, D=64, Dv=64),
    "odd-page": dict(B=2, Hq=6, Hkv=1, Np=20, Ps=13, Mp=9, D=64, Dv=32),
    "long": dict(B=2, Hq=16, Hkv=2, Np=20, Ps=64, Mp=9, S=513, D=64, Dv=64),
    "many-heads": dict(B=2, Hq=70, Hkv=1, Np=90, Ps=16, Mp=44, D=64, Dv=64),
    "many-parts": dict(B=1, Hq=2, Hkv=1, Np=190, Ps=16, Mp=190, D=64, Dv=64),
}
# unseen=1: lengths of 0, and starts at the end.
DEGENERATE = {
    "one": dict(B=1, Hq=4, Hkv=1, Np=1, Ps=1, Mp=1, D=64, Dv=64),
    "one-key": dict(B=1, Hq=4, Hkv=1, Np=1, Ps=16, Mp=1, S=1, D=64, Dv=64),
    "no-pages": dict(B=2, Hq=4, Hkv=2, Np=0, Ps=16, Mp=0, D=64, Dv=64),
    "empty": dict(B=0, Hq=4, Hkv=2, Np=3, Ps=16, Mp=2, D=64, Dv=64),
    "unseen": dict(B=4, Hq=4, Hkv=2, Np=20, Ps=16, Mp=4, D=64, Dv=64, unseen=1),
}
EXTRAS = inputs.DECODE_EXTRAS
_OWN = 16  # query heads when each has a KV head of its own: more are only more of the same
_MODELS = {
    "gptoss": dict(Hq=64, Hkv=8, D=64, Dv=64, window=128, sink=1),
    "D256": dict(Hq=16, Hkv=8, D=256, Dv=256),
    "mqa-D512": dict(Hq=64, Hkv=1, D=512, Dv=512),
}
BENCH = {
    f"{b}x{s}-page{p}": dict(B=b, Hq=32, Hkv=8, Np=b * s // p, Ps=p, Mp=s // p, D=128, Dv=128)
    for b, s, p in (
        (1, 8192, 16), (1, 8192, 64), (1, 131072, 64), (16, 8192, 16), (16, 8192, 64), (128, 8192, 16), (128, 8192, 64),
    )
} | {
    f"{name}-{b}x8192-page{p}": dict(B=b, Np=b * 8192 // p, Ps=p, Mp=8192 // p, **model)
    for name, model in _MODELS.items() for b in (1, 16, 128) for p in (16, 64)
} | {
    f"e4m3-{b}x{s}-page{p}": dict(B=b, Hq=32, Hkv=8, Np=b * s // p, Ps=p, Mp=s // p, D=128, Dv=128, bits=8)
    for b, s in ((1, 1024), (1, 8192), (1, 131072), (16, 8192), (64, 4096), (128, 8192)) for p in (16, 64)
}  # fmt: skip


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    B, D, Dv = dims["B"], dims["D"], dims["Dv"]
    Np, Ps, S = dims["Np"], dims["Ps"], dims.get("S", dims["Mp"] * dims["Ps"])
    Hq, Hkv = (dims["Hq"], dims["Hkv"]) if "gqa" in features else (min(dims["Hq"], _OWN),) * 2
    kv_len = inputs.lengths(gen, B, S, unseen=bool(dims.get("unseen")))
    stored = torch.float8_e4m3fn if dims.get("bits") == 8 else dtype
    q, k, v = (
        inputs.normal(gen, dtype, B, Hq, D),
        inputs.normal(gen, stored, Np, Ps, Hkv, D),
        inputs.normal(gen, stored, Np, Ps, Hkv, Dv),
    )
    table = inputs.block_table(gen, kv_len, Ps, Np, dims["Mp"])
    sink = inputs.normal(gen, torch.float32, Hq) if "sink" in features else None
    start = inputs.starts(gen, kv_len, unseen=bool(dims.get("unseen"))) if "kv_start" in features else None
    scores = inputs.score_arguments(features, S)
    seen = seen_keys(kv_len, start, dims["Mp"] * Ps, int(scores["window"]), int(scores["sink_tokens"]))
    table = inputs.forgotten(table, seen, Ps)
    return (q, k, v, table, kv_len, sink, start, *inputs.scales(gen, "scales" in features, B, Hkv)), scores


def seen_keys(
    kv_len: torch.Tensor, kv_start: torch.Tensor | None, keys: int, window: int, sink_tokens: int
) -> torch.Tensor:
    """(B, keys): those that the query of each sequence sees."""
    start = 0 if kv_start is None else kv_start[:, None]
    pos, end = kv_len[:, None] - 1, kv_len[:, None]
    return visible(pos, keys, start, end, causal=True, window=window, sink_tokens=sink_tokens)[:, 0]


def bench(dims: dict[str, int], dtype: torch.dtype, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Full caches whose pages lie in random order."""
    B, Np, Ps, Mp, Hkv = (dims[axis] for axis in ("B", "Np", "Ps", "Mp", "Hkv"))
    stored = torch.float8_e4m3fn if dims.get("bits") == 8 else dtype
    args = (
        inputs.normal(gen, dtype, B, dims["Hq"], dims["D"]),
        inputs.normal(gen, stored, Np, Ps, Hkv, dims["D"]),
        inputs.normal(gen, stored, Np, Ps, Hkv, dims["Dv"]),
        torch.randperm(Np, generator=gen).to(torch.int32)[: B * Mp].view(B, Mp),
        torch.tensor([Mp * Ps] * B, dtype=torch.int32),
        inputs.normal(gen, torch.float32, dims["Hq"]) if "sink" in dims else None,
    )
    return args, dict(window=dims.get("window", -1))


def _seen(dims: dict[str, int]) -> int:
    """Visible keys of all sequences."""
    keys = dims["Mp"] * dims["Ps"]
    return dims["B"] * min(keys, dims.get("window", keys))


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read q, the page table and every visible key and value once, write out and lse."""
    tokens = _seen(dims) * dims["Hkv"] * (dims["D"] + dims["Dv"])
    heads = dims["B"] * dims["Hq"]
    inside = tokens * (1 if dims.get("bits") == 8 else dtype.itemsize) + heads * dims["D"] * dtype.itemsize
    return inside + heads * dims["Dv"] * max(2, dtype.itemsize) + (heads + dims["B"] * (dims["Mp"] + 1)) * 4


def flops(dims: dict[str, int]) -> int:
    """Two products, two operations a term."""
    return 2 * dims["Hq"] * _seen(dims) * (dims["D"] + dims["Dv"])


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    facts, on = sampling.attention(d, row, (1, 1, 2, 3, 4, 7, 8, 9, 16, 20, 70))
    facts |= cache_sampling.bits(row)
    pages = next((why for why in row.needs if why.startswith("Ps ")), "")
    ones = (1,) if "be 1 or" in pages else ()
    Ps = d.kernel.choice((*ones, 16, 16, 32, 48, 64, 128) if pages else (1, 5, 8, 13, 16, 64, 100))
    Mp = 0 if d.sometimes(0.02) else d.size(max(1, min(d.limits.keys, sampling.most_keys(d, facts, 1)) // Ps))
    facts |= dict(Ps=Ps, Mp=Mp) | sampling.batch(d, facts, 1, Mp * Ps) | sampling.scores(d, facts, on, Mp * Ps)
    facts["kv_len"] = d.ragged(facts["B"], Mp * Ps)
    facts["kv_start"] = d.ragged(facts["B"], Mp * Ps) if "kv_start" in on else ""
    facts |= dict(pages=d.pick(("own", "own", "shared", "one")), spare=d.pick((0, 1, 3)))
    facts |= dict(unused=d.pick((-1, 2**31 - 1)), holes=d.pick((0, 1)))
    step = sampling.aligned(row, cache_sampling.stored(facts))
    facts |= {"q.at": d.layout(3, (0, 1), min(step, 4)), "block_table.at": d.layout(2)}
    facts |= {f"{name}.at": d.layout(4, (0, 2), step) for name in ("k_cache", "v_cache")}
    share = 0.5 if (facts["D"], facts["Dv"]) in LATENTS else 0.2 if facts["D"] == facts["Dv"] else 0.0
    return facts | dict(same=int(d.sometimes(share)))


def _generate_table(f: sampling.Facts, gen: torch.Generator, kv_len: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A (B, Mp) table and the number of pages: ``own`` ones in random order, ``shared`` by all, or only ``one``."""
    used = [-(-n // f["Ps"]) for n in kv_len.tolist()]
    needed = dict(own=sum(used), shared=max(used, default=0), one=int(sum(used) > 0))[f["pages"]]
    order = torch.randperm(needed + f["spare"], generator=gen).to(torch.int32)
    table = torch.full((len(used), f["Mp"]), f["unused"], dtype=torch.int32)
    taken = 0
    for b, n in enumerate(used):
        table[b, :n] = order[:1] if f["pages"] == "one" else order[taken : taken + n]
        taken += n if f["pages"] == "own" else 0
    return table, needed + f["spare"]


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``unused`` is what the table holds past a sequence's length, and with ``holes`` for every second page of which
    nothing is seen; ``spare`` are the pages of nobody."""
    B, Ps, most, Hkv, Hq = f["B"], f["Ps"], f["Mp"] * f["Ps"], f["Hkv"], f["Hkv"] * f["group"]
    kv_len, kv_start = sampling.counts(f["kv_len"] or str(most), B, most), sampling.counts(f["kv_start"], B, most)
    assert kv_len is not None
    table, Np = _generate_table(f, gen, kv_len)
    keep = seen_keys(kv_len, kv_start, most, f["window"], f["sink_tokens"])  # (B, Mp * Ps)
    b, key = keep.nonzero(as_tuple=True)
    seen = torch.zeros(Np, Ps, Hkv, dtype=torch.bool)
    seen[table[b, key // Ps].long(), key % Ps] = True
    table = inputs.forgotten(table, keep, Ps, f["unused"]) if f.get("holes") else table
    q, k, v = cache_sampling.qkv(f, gen, (B, Hq), (Np, Ps, Hkv), seen)
    rest = (sampling.sink(f, gen, Hq), kv_start, *sampling.scales(f, gen, B, Hkv))
    return (q, k, k[..., : f["Dv"]] if f["same"] else v, table, kv_len, *rest), sampling.score_arguments(f)
