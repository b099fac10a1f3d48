"""Inputs of flash_attention_paged for parity and bench. L is the longest block of queries, S the longest sequence."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.oracle import cache_sampling, inputs, sampling
from torch_attnkit.oracle.attention import visible

# Pages that hold boxes of TMA and pages that are gathered; a tile of rows, several, enough for pairs of CTAs, and for
# every multiprocessor, whose persistent CTAs draw them. Pages of one size are compiled for once; random signatures have
# others.
PARITY = {
    "mixed": dict(B=4, L=37, S=150, Hq=8, Hkv=2, Np=13, Ps=48, Mp=4, D=64, Dv=64),
    "chunk": dict(B=1, L=50, S=200, Hq=64, Hkv=1, Np=6, Ps=48, Mp=5, D=64, Dv=64),
    "gather": dict(B=3, L=5, S=130, Hq=6, Hkv=2, Np=400, Ps=1, Mp=130, D=64, Dv=64, tail=3),
    "steps": dict(B=3, L=1, S=300, Hq=8, Hkv=2, Np=24, Ps=48, Mp=7, D=64, Dv=32),
    "many": dict(B=40, L=100, S=140, Hq=8, Hkv=4, Np=130, Ps=48, Mp=3, D=64, Dv=64),
}
# unseen=1: lengths of 0.
DEGENERATE = {
    "one": dict(B=1, L=1, S=1, Hq=4, Hkv=1, Np=1, Ps=48, Mp=1, D=64, Dv=64),
    "no-queries": dict(B=2, L=0, S=20, Hq=4, Hkv=2, Np=4, Ps=48, Mp=2, D=64, Dv=64),
    "only-tail": dict(B=2, L=0, S=20, Hq=4, Hkv=2, Np=4, Ps=48, Mp=2, D=64, Dv=64, tail=3),
    "no-pages": dict(B=2, L=3, S=0, Hq=4, Hkv=2, Np=0, Ps=48, Mp=0, D=64, Dv=64),
    "empty": dict(B=0, L=0, S=0, Hq=4, Hkv=2, Np=3, Ps=48, Mp=2, D=64, Dv=64),
    "short-cache": dict(B=2, L=9, S=4, Hq=2, Hkv=1, Np=2, Ps=48, Mp=1, D=64, Dv=64),
    "unseen": dict(B=4, L=3, S=60, Hq=4, Hkv=2, Np=16, Ps=48, Mp=2, D=64, Dv=64, unseen=1),
}
# Values of NaN: see flash_attention.
EXTRAS = (
    ("nan:q", "mixed", "all"),
    ("nan:k_cache", "mixed", "all"),
    ("nan:k_cache", "chunk", "bidirectional"),
    ("nan:v_cache", "mixed", "bidirectional"),
    ("nan:v_cache", "chunk", "bidirectional"),
    ("nan:sink", "mixed", "sink"),
    ("sink:-inf", "gather", "all"),
    ("sink:inf", "mixed", "sink"),
)
_OWN = 8  # query heads when each has a KV head of its own: more are only more of the same
_MIXED = dict(B=64, L=512, S=8192, Hq=32, Hkv=8, D=128, Dv=128)
_STEPS = dict(B=64, L=1, S=8192, Hq=32, Hkv=8, D=128, Dv=128)
BENCH = {
    f"{name}-page{page}": dict(sizes, Ps=page)
    for name, sizes in (("64x1..512x1..8192", _MIXED), ("64x1x1..8192", _STEPS)) for page in (16, 64)
} | {
    "64x1..512x1..8192-page1": dict(_MIXED, Ps=1),
    "e4m3-64x1..512x1..8192-page16": dict(_MIXED, Ps=16, bits=8),
}  # fmt: skip


_PAGES = (16, 16, 16, 32, 48, 64, 64, 128, 256)  # keys, as random signatures draw them


def _offsets(length: torch.Tensor) -> torch.Tensor:
    return torch.cat([length.new_zeros(1), length.cumsum(0, dtype=torch.int32)])  # (B + 1,)


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    B, L, S = dims["B"], dims["L"], dims["S"]
    Np, Ps = dims["Np"], dims["Ps"]
    Hq, Hkv = (dims["Hq"], dims["Hkv"]) if "gqa" in features else (min(dims["Hq"], _OWN),) * 2
    kv_len = inputs.lengths(gen, B, S, unseen=bool(dims.get("unseen")))
    len_q = inputs.lengths(gen, B, L).flip(0)
    stored = torch.float8_e4m3fn if dims.get("bits") == 8 else dtype
    args = (
        inputs.normal(gen, dtype, int(len_q.sum()) + dims.get("tail", 0), Hq, dims["D"]),
        inputs.normal(gen, stored, Np, Ps, Hkv, dims["D"]),
        inputs.normal(gen, stored, Np, Ps, Hkv, dims["Dv"]),
        _offsets(len_q),
        table := inputs.block_table(gen, kv_len, Ps, Np, dims["Mp"]),
        kv_len,
        inputs.normal(gen, torch.float32, Hq) if "sink" in features else None,
        *inputs.scales(gen, "scales" in features, B, Hkv),
    )
    kwargs: dict[str, Any] = dict(causal="bidirectional" not in features) | inputs.score_arguments(features, S)
    seen = seen_keys(len_q, kv_len, dims["Mp"] * Ps, kwargs["causal"], kwargs["window"], kwargs["sink_tokens"])
    kwargs |= dict(max_seqlen_q=L, max_seqlen_k=S)
    return (*args[:4], inputs.forgotten(table, seen, Ps), *args[5:]), kwargs


def seen_keys(
    len_q: torch.Tensor, kv_len: torch.Tensor, keys: int, causal: bool, window: int, sink_tokens: int
) -> torch.Tensor:
    """(B, keys): those that some query of each sequence sees."""
    seen = torch.zeros(len(kv_len), keys, dtype=torch.bool)
    for b, (t, n) in enumerate(zip(len_q.tolist(), kv_len.tolist(), strict=True)):
        pos = torch.arange(n - t, n)[None]  # (1, t)
        keep = visible(pos, n, 0, n, causal=causal, window=window, sink_tokens=sink_tokens)  # (1, t, n)
        seen[b, :n] = (keep & (pos >= 0)[..., None])[0].any(0)
    return seen


def _spread(dims: dict[str, int]) -> tuple[list[int], list[int]]:
    """Queries and keys of every sequence: lengths spread evenly over 1 to L and 1 to S, each in a random order; a
    sequence has at least the keys of its own queries."""
    B, L, S = dims["B"], dims["L"], dims["S"]
    queries, keys = ([1 + (most - 1) * i // (B - 1) for i in range(B)] for most in (L, S))
    random.Random(0).shuffle(queries)
    random.Random(1).shuffle(keys)
    return queries, [max(t, s) for t, s in zip(queries, keys, strict=True)]


def bench(dims: dict[str, int], dtype: torch.dtype, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pages in random order, without room for more keys."""
    queries, keys = _spread(dims)
    Ps, Hkv = dims["Ps"], dims["Hkv"]
    kv_len = torch.tensor(keys, dtype=torch.int32)
    Np, Mp = sum(-(-n // Ps) for n in keys), -(-max(keys) // Ps)
    stored = torch.float8_e4m3fn if dims.get("bits") == 8 else dtype
    args = (
        inputs.normal(gen, dtype, sum(queries), dims["Hq"], dims["D"]),
        inputs.normal(gen, stored, Np, Ps, Hkv, dims["D"]),
        inputs.normal(gen, stored, Np, Ps, Hkv, dims["Dv"]),
        torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32),
        inputs.block_table(gen, kv_len, Ps, Np, Mp).clamp(min=0),
        kv_len,
    )
    return args, dict(max_seqlen_q=max(queries), max_seqlen_k=max(keys))


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read q, the page table and every key and value once, write out and lse."""
    queries, keys = _spread(dims)
    T, Mp = sum(queries), -(-max(keys) // dims["Ps"])
    stored = 1 if dims.get("bits") == 8 else dtype.itemsize
    read = sum(keys) * dims["Hkv"] * (dims["D"] + dims["Dv"]) * stored + T * dims["Hq"] * dims["D"] * dtype.itemsize
    wrote = T * dims["Hq"] * (dims["Dv"] * max(2, dtype.itemsize) + 4)
    return read + wrote + (dims["B"] * (Mp + 2) + 1) * 4


def flops(dims: dict[str, int]) -> int:
    """Two products, two operations a term; query r of T leaves out the T - 1 - r keys behind it."""
    pairs = sum(t * s - t * (t - 1) // 2 for t, s in zip(*_spread(dims), strict=True))
    return 2 * dims["Hq"] * pairs * (dims["D"] + dims["Dv"])


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    facts, on = sampling.attention(d, row, (1, 1, 2, 3, 4, 6, 8, 16))
    facts |= cache_sampling.bits(row)
    boxes = any(why.startswith("Ps ") for why in row.needs)
    Ps = d.kernel.choice((8, 24, *_PAGES) if boxes else (1, 1, 5, *_PAGES))
    T = d.size(min(d.limits.keys, 300))
    Mp = 0 if d.sometimes(0.02) else d.size(max(1, min(d.limits.keys, sampling.most_keys(d, facts, T)) // Ps))
    facts |= dict(Ps=Ps, Mp=Mp, T=T, causal=int("bidirectional" not in on))
    facts |= sampling.batch(d, facts, T, Mp * Ps) | sampling.scores(d, facts, on, Mp * Ps)
    facts |= dict(len_q=d.ragged(facts["B"], T), kv_len=d.ragged(facts["B"], Mp * Ps))
    facts |= dict(pages=d.pick(("own", "own", "shared", "one")), spare=d.pick((0, 1, 3)))
    facts |= dict(
        unused=d.pick((-1, 2**31 - 1)),
        holes=d.pick((0, 1)),
        tail_q=d.pick((0, 0, 1, 5)),
        hints=d.pick(("", "exact", "more")),
    )
    step = sampling.aligned(row, cache_sampling.stored(facts))
    facts |= {"q.at": d.layout(3, (1,)), "block_table.at": d.layout(2)}
    return facts | {f"{name}.at": d.layout(4, (0, 2), step) for name in ("k_cache", "v_cache")}


def _generate_table(f: sampling.Facts, gen: torch.Generator, kv_len: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A (B, Mp) table and the number of pages: each sequence its ``own``, all ``shared``, or only ``one``."""
    used = [-(-n // f["Ps"]) for n in kv_len.tolist()]
    first = [sum(used[:b]) if f["pages"] == "own" else 0 for b in range(len(used))]
    kinds = max([a + n for a, n in zip(first, used, strict=True)] or [0])
    kinds = min(kinds, 1) if f["pages"] == "one" else kinds
    order = torch.randperm(kinds + f["spare"], generator=gen).to(torch.int32)
    table = torch.full((len(used), f["Mp"]), f["unused"], dtype=torch.int32)
    for b, n in enumerate(used):
        table[b, :n] = order[:1] if f["pages"] == "one" else order[first[b] : first[b] + n]
    return table, kinds + f["spare"]


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``T`` bounds the blocks of queries; ``unused`` is what the table holds past a sequence's length, and with
    ``holes`` for every second page of which nothing is seen; ``spare`` are the pages of nobody, ``tail_q`` tokens past
    the last offset; hints are "", "exact" or "more"."""
    B, Ps, most, Hkv, Hq = f["B"], f["Ps"], f["Mp"] * f["Ps"], f["Hkv"], f["Hkv"] * f["group"]
    len_q, kv_len = sampling.counts(f["len_q"], B, f["T"]), sampling.counts(f["kv_len"] or str(most), B, most)
    assert len_q is not None and kv_len is not None
    table, Np = _generate_table(f, gen, kv_len)
    keep = seen_keys(len_q, kv_len, most, bool(f["causal"]), f["window"], f["sink_tokens"])  # (B, Mp * Ps)
    b, key = keep.nonzero(as_tuple=True)
    seen = torch.zeros(Np, Ps, Hkv, dtype=torch.bool)
    seen[table[b, key // Ps].long(), key % Ps] = True
    table = inputs.forgotten(table, keep, Ps, f["unused"]) if f.get("holes") else table
    q, k, v = cache_sampling.qkv(f, gen, (int(len_q.sum()) + f["tail_q"], Hq), (Np, Ps, Hkv), seen)
    longest = [max(n.tolist(), default=0) + (f["hints"] == "more") * 100 if f["hints"] else -1 for n in (len_q, kv_len)]
    kwargs = dict(causal=bool(f["causal"])) | sampling.score_arguments(f)
    kwargs |= dict(max_seqlen_q=longest[0], max_seqlen_k=longest[1])
    rest = (sampling.sink(f, gen, Hq), *sampling.scales(f, gen, B, Hkv))
    return (q, k, v, _offsets(len_q), table, kv_len, *rest), kwargs
