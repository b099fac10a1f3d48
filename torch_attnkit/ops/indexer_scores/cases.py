"""Inputs of indexer_scores for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.formats import mxfp4
from torch_attnkit.oracle import inputs, sampling

FORMATS = {16: "none", 8: "fp8", 4: "mxfp4"}

# S entries per request (with pages: rounded up to whole pages of Ps); Qb stored elements per head, with bits=4
# bytes of two numbers. bits=16 is the model dtype with float32 weights; the other formats have weights in the
# model dtype. q_scale=1: fp8 with scales of q.
PARITY = {
    "decode": dict(Tq=3, R=3, S=37, Hi=4, Qb=64, Ps=8, bits=16),
    "heads": dict(Tq=2, R=1, S=130, Hi=64, Qb=128, Ps=64, bits=16),
    "tokens": dict(Tq=40, R=2, S=300, Hi=10, Qb=128, Ps=32, bits=16),
    "fp8": dict(Tq=10, R=2, S=65, Hi=3, Qb=128, Ps=16, bits=8),
    "fp8_heads": dict(Tq=3, R=1, S=600, Hi=64, Qb=128, Ps=64, bits=8),
    "fp8_q_scale": dict(Tq=4, R=4, S=9, Hi=2, Qb=128, Ps=4, bits=8, q_scale=1),
    "mxfp4": dict(Tq=10, R=2, S=65, Hi=3, Qb=64, Ps=16, bits=4),
}
DEGENERATE = {
    "one": dict(Tq=1, R=1, S=1, Hi=1, Qb=32, Ps=1, bits=16),
    "no_entries": dict(Tq=2, R=2, S=0, Hi=2, Qb=32, Ps=4, bits=16),
    "empty": dict(Tq=0, R=2, S=8, Hi=2, Qb=32, Ps=4, bits=16),
}
EXTRAS = (
    ("nan:q", "tokens", "all"),
    ("nan:k", "tokens", "all"),
    ("nan:weights", "heads"),
    ("nan:q", "fp8"),
    ("nan:k", "fp8", "paged"),
    ("k_scale:255", "mxfp4"),
    ("q_scale:0", "mxfp4"),
)
ALL, CAUSAL = 1, 2  # ``seen``: every token sees all entries; token t of T the first (t + 1) / T of them


def _bench(bits: int, tokens: int, requests: int, entries: int, **more: int) -> tuple[str, dict[str, int]]:
    """A line's name and sizes: an indexer of 64 heads of 128, all entries seen unless ``more`` says otherwise."""
    parts = [FORMATS[bits], str(tokens), f"{requests}x{entries}"]
    parts += [word for word, on in (("causal", more.get("seen") == CAUSAL), ("paged", more.get("paged"))) if on]
    sizes = dict(Tq=tokens, R=requests, S=entries, Hi=64, Qb=min(bits, 8) * 16, Ps=64, bits=bits, seen=ALL)
    return "-".join(parts), sizes | more


BENCH = dict(
    [_bench(8, 4096, 1, 32768), _bench(8, 4096, 1, 32768, seen=CAUSAL), _bench(8, 1024, 1, 131072)]
    + [_bench(8, n, n, s, paged=1) for s in (65536, 262144) for n in (1, 8, 32)]
    + [_bench(8, 1, 1, 2048), _bench(8, 1, 1, 262144), _bench(8, 128, 128, 8192, paged=1)]
    + [
        _bench(bits, *sizes)
        for bits in (16, 4)
        for sizes in ((1, 1, 2048), (1, 1, 262144), (16, 16, 8192), (128, 128, 8192), (4096, 1, 32768))
    ]
)


def _coded(
    gen: torch.Generator, dtype: torch.dtype, bits: int, *shape: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Random rows in a format, and their scales."""
    if bits == 16:
        return inputs.normal(gen, dtype, *shape), None
    if bits == 8:
        x = inputs.normal(gen, torch.float8_e4m3fn, *shape)
        return x, torch.rand(*shape[:-1], 1, generator=gen) + 0.5
    return mxfp4.quantize(inputs.normal(gen, torch.float32, *shape[:-1], 2 * shape[-1]))


def _lengths(gen: torch.Generator, dims: dict[str, int]) -> torch.Tensor:
    Tq, S = dims["Tq"], dims["S"]
    if dims.get("seen") == ALL:
        return torch.full((Tq,), S, dtype=torch.int32)
    if dims.get("seen") == CAUSAL:
        return ((torch.arange(Tq) + 1) * S // Tq).to(torch.int32)
    return inputs.lengths(gen, Tq, S)


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    Tq, R, S, Hi, Qb, Ps, bits = (dims[n] for n in ("Tq", "R", "S", "Hi", "Qb", "Ps", "bits"))
    paged, Mp = "paged" in features, -(-S // Ps)
    Np = R * Mp + 1
    k_len = _lengths(gen, dims)
    request_ids = inputs.integers(gen, 0, R - 1, Tq) if "request_ids" in features else None
    owner = torch.arange(Tq) * R // max(Tq, 1) if request_ids is None else request_ids.long()
    longest = torch.zeros(R, dtype=torch.int32).scatter_reduce(0, owner, k_len, "amax")  # (R,)
    q, q_scale = _coded(gen, dtype, bits, Tq, Hi, Qb)
    k, k_scale = _coded(gen, dtype, bits, *((Np, Ps, Qb) if paged else (R, S, Qb)))
    weights = torch.randn(Tq, Hi, generator=gen) * (Hi * Qb) ** -0.5
    args = (
        q,
        k,
        weights.to(torch.float32 if bits == 16 else dtype),
        k_len,
        request_ids,
        inputs.block_table(gen, longest, Ps, Np, Mp) if paged else None,
        q_scale if bits == 4 or dims.get("q_scale") else None,
        k_scale,
    )
    return args, dict(format=FORMATS[bits])


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    k = d.kernel
    format = next(name for name in FORMATS.values() if f"format must be {name!r}" in row.needs)
    facts: sampling.Facts = dict(
        dtype=k.choice(row.dtypes.split()), Qb=k.choice(row.dims.get("Qb", (17, 32, 64, 128))), format=format
    )
    facts |= dict(
        H=k.choice((1, 2, 3, 8, 17, 32, 64, 96, 128)),
        paged=int(k.random() < 0.5 and "paged" in row.features),
        named=int(k.random() < 0.5 and "request_ids" in row.features),
    )
    facts |= dict(w32=int(k.random() < 0.5), q_scale=int(k.random() < 0.5))
    R = d.pick((1, 1, 2, 3))
    most = max(1, min(d.limits.keys, d.limits.terms // (facts["H"] * facts["Qb"] * R * 2)))
    facts["Ps"], S = d.pick((1, 7, 16, 64)), d.size(min(most, 700))
    S = -(-S // facts["Ps"]) * facts["Ps"] if facts["paged"] else S
    T = d.pick((0, 1, 2, 3, 11)) if most < 200 else d.pick((1, 2, 5, 33))
    facts |= dict(R=R, S=S, T=T if facts["named"] else T * R)
    facts |= dict(kv_len=d.ragged(min(facts["T"], 6), S), negative=int(d.sometimes(0.2)))
    facts |= dict(hidden="nan" if d.sometimes(0.6) else "", nan=d.pick("qk") if d.sometimes(0.05) else "")
    facts |= {"q.at": d.layout(3), "k.at": d.layout(3), "weights.at": d.layout(2), "k_len.at": d.layout(1)}
    return facts | {"k_scale.at": d.layout(3), "q_scale.at": d.layout(3), "seed": d.call.randrange(1 << 30)}


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``negative``: every third scale is; ``hidden``: what keys, their scales and tables hold where nobody looks."""
    T, R, S, H, Ps, form = (f[n] for n in ("T", "R", "S", "H", "Ps", "format"))
    D = f["Qb"] * (2 if form == "mxfp4" else 1)
    k_len = sampling.counts(f["kv_len"], T, S)
    assert k_len is not None
    ids = inputs.integers(gen, 0, R - 1, T) if f["named"] else None
    owner = torch.arange(T) * R // max(T, 1) if ids is None else ids.long()
    longest = torch.zeros(R, dtype=torch.int32).scatter_reduce(0, owner, k_len, "amax")  # (R,)
    seen = torch.arange(S) < longest[:, None]  # (R, S)
    table, shape = None, (R, S)
    if f["paged"]:
        Mp = S // Ps
        shape = (R * Mp + 1, Ps)
        table = inputs.block_table(gen, longest, Ps, shape[0], Mp)
        by_page = torch.zeros(shape, dtype=torch.bool)
        for r, m in (table >= 0).nonzero().tolist():
            by_page[table[r, m]] = seen[r, m * Ps : (m + 1) * Ps]
        seen = by_page
    q, k = sampling.randn(gen, T, H, D), sampling.randn(gen, *shape, D)
    if f["nan"] == "q" and q.numel():
        q.view(-1, D)[0, 0] = torch.nan
    if f["nan"] == "k" and bool(seen.any()):
        k[tuple(seen.nonzero()[0])] = torch.nan
    scales = []
    for x in (q, k):
        scale = 0.5 + torch.rand(*x.shape[:-1], 1, generator=gen)
        scale.view(-1)[::3] *= -1 if f["negative"] else 1
        scales.append(scale)
    weights = (sampling.randn(gen, T, H) * (H * D) ** -0.5).to(DTYPES[f["dtype"]])
    if form == "mxfp4":
        (q, scales[0]), (k, scales[1]) = mxfp4.quantize(q), mxfp4.quantize(k)
        if f["hidden"]:
            scales[1][~seen] = 255
    else:
        k, scales[1] = (sampling.hide(x, seen, f, name) for x, name in ((k, "k"), (scales[1], "k_scale")))
        q, k = (sampling.cast(x, "f8e4m3" if form == "fp8" else f["dtype"]) for x in (q, k))
    args = (
        q,
        k,
        weights.float() if form == "none" and f["w32"] else weights,
        k_len,
        ids,
        table,
        scales[0] if form == "mxfp4" or (form == "fp8" and f["q_scale"]) else None,
        scales[1] if form != "none" else None,
    )
    return args, dict(format=form)


def _seen(dims: dict[str, int]) -> int:
    """Entries that the tokens of a bench case see, added up."""
    if dims["seen"] == CAUSAL:
        return sum((t + 1) * dims["S"] // dims["Tq"] for t in range(dims["Tq"]))
    return dims["Tq"] * dims["S"]


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read q, its weights, and what is seen of k with its scales once, write the scores; some token sees all of k."""
    Qb, bits = dims["Qb"], dims["bits"]
    q = {16: Qb * dtype.itemsize, 8: Qb, 4: Qb + Qb // 16}[bits]
    k = q + (4 if bits == 8 else 0)
    weight = 4 if bits == 16 else dtype.itemsize
    return dims["Tq"] * (dims["Hi"] * (q + weight) + 4 + dims["S"] * 4) + dims["R"] * dims["S"] * k


def flops(dims: dict[str, int]) -> int:
    """One product over the numbers of a head for each head and entry that a token sees, then relu, weight and sum."""
    channels = dims["Qb"] * (2 if dims["bits"] == 4 else 1)
    return _seen(dims) * dims["Hi"] * (2 * channels + 3)
