"""Inputs of sparse_fmha_with_swa for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.oracle import draws, inputs

PARITY = {
    "prefill": dict(Tq=24, Hq=4, R=2, S=40, C=12, K=5, D=64, window=8),
    "decode": dict(Tq=3, Hq=16, R=3, S=130, C=50, K=20, D=64, window=128),
    "deepseek": dict(Tq=4, Hq=9, R=1, S=140, C=70, K=64, D=512, window=128),
    "long": dict(Tq=2, Hq=20, R=2, S=130, C=3000, K=2600, D=64, window=128),
}
DEGENERATE = {
    "one": dict(Tq=1, Hq=4, R=1, S=1, C=1, K=1, D=64, window=1),
    "nothing": dict(Tq=4, Hq=3, R=2, S=0, C=0, K=0, D=64, window=128),
    "empty": dict(Tq=0, Hq=4, R=2, S=8, C=4, K=2, D=64, window=4),
}
EXTRAS = (
    ("nan:q", "decode", "all"),
    ("nan:swa_kv", "prefill", "all"),
    ("nan:compressed_kv", "prefill", "all"),
    ("nan:sink", "decode", "sink"),
    ("sink:-inf", "decode", "all"),
    ("sink:inf", "long", "sink"),
)
# CSA lists K entries a token (topk), HCA sees all C of them; decode has a request for each token.
_CSA = dict(D=512, window=128, compressed=1, topk=1, sink=1)
_HCA = dict(D=512, window=128, compressed=1, sink=1, K=0)
BENCH = (
    {f"csa-64h-{t}": dict(Tq=t, Hq=64, R=t, S=256, C=8192, K=512, **_CSA) for t in (1, 8, 32, 128)}
    | {"csa-64h-4096": dict(Tq=4096, Hq=64, R=1, S=4224, C=8192, K=512, **_CSA)}
    | {f"csa-128h-{t}": dict(Tq=t, Hq=128, R=t, S=256, C=8192, K=1024, **_CSA) for t in (1, 32, 128)}
    | {"csa-128h-4096": dict(Tq=4096, Hq=128, R=1, S=4224, C=8192, K=1024, **_CSA)}
    | {"csa-64h-128x8320": dict(Tq=128, Hq=64, R=1, S=256, C=131072, K=8192, **_CSA)}
    | {f"csa-{h}h-32": dict(Tq=32, Hq=h, R=32, S=256, C=8192, K=512, **_CSA) for h in (8, 16)}
    | {f"hca-64h-{t}x8320": dict(Tq=t, Hq=64, R=t, S=256, C=8192, **_HCA) for t in (1, 32, 128)}
    | {"hca-64h-4096x160": dict(Tq=4096, Hq=64, R=1, S=4224, C=32, **_HCA)}
    | {"window-64h-4096": dict(Tq=4096, Hq=64, R=1, S=4224, C=0, K=0, D=512, window=128, sink=1)}
)


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


def bench(dims: dict[str, int], dtype: torch.dtype, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Full windows and lists: the last token of a request ends its window at the last key, those before it earlier."""
    Tq, R, C, K = dims["Tq"], dims["R"], dims["C"], dims["K"]
    features = tuple(name for name in ("compressed", "topk", "sink") if dims.get(name))
    args, kwargs = make(dims | dict(Tq=Tq, C=C, K=0), dtype, features, gen)
    end = dims["S"] - Tq // R + 1 + torch.arange(Tq) % (Tq // R)
    chosen = torch.rand(Tq, C, generator=gen).topk(K).indices.to(torch.int32) if dims.get("topk") else None
    return (*args[:2], end.to(torch.int32), args[3], chosen, *args[5:]), kwargs


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read q and both caches once, as far as any token can look, write out and lse."""
    each = dims["Tq"] // dims["R"]
    near = min(dims["S"], each - 1 + dims["window"])  # tokens of a request see neighbouring windows
    far = min(dims["C"], each * dims["K"]) if dims.get("topk") else dims["C"]
    elements = dims["R"] * (near + far) * dims["D"] + 2 * dims["Tq"] * dims["Hq"] * dims["D"]
    return elements * dtype.itemsize + dims["Tq"] * (dims["Hq"] + 1 + dims["K"]) * 4


def flops(dims: dict[str, int]) -> int:
    """Two products, two operations a term."""
    seen = min(dims["S"], dims["window"]) + (dims["K"] if dims.get("topk") else dims["C"])
    return 4 * dims["Tq"] * dims["Hq"] * seen * dims["D"]


def draw(d: draws.Draw, row: Kernel) -> draws.Facts:
    """The facts ``kv_len`` are the windows' ends, ``kv_start`` the numbers of entries that count."""
    k = d.kernel
    on = {name for name in sorted(row.features.split()) if k.random() < 0.5}
    if {"sink", "unnormalized"} <= on:
        on.remove(k.choice(("sink", "unnormalized")))
    facts: draws.Facts = dict(
        dtype=k.choice(row.dtypes.split()), D=k.choice(row.dims["D"]), normalize=int("unnormalized" not in on),
        far="" if not {"compressed", "topk", "compressed_len"} & on else "list" if "topk" in on else "all",
    )  # fmt: skip
    H, R = d.pick((1, 2, 3, 8, 16, 20, 33, 64, 65, 128)), d.pick((1, 1, 2, 3))
    room = max(2, d.room.terms // (max(H, 16) * 2 * facts["D"]))  # keys of all tokens
    S = 0 if d.sometimes(0.05) else d.size(min(d.room.keys, room))
    C = 0 if not facts["far"] or d.sometimes(0.05) else d.size(min(d.room.keys, room))
    facts |= dict(H=H, R=R, S=S, C=C, K=d.size(min(C + 3, d.room.keys)) if facts["far"] == "list" else 0)
    # Few tokens are split over clusters, and many take turns on a multiprocessor.
    each = min(d.pick((1, 1, 2, 5, 17, 33, 140, 300)), max(1, room // (R * max(1, S + C))))
    T = 0 if d.sometimes(0.02) else R * each
    chosen = draws.scores(d, facts, on | {"window"}, S)
    facts |= {name: chosen[name] for name in ("scale", "window", "sink", "q_by", "hidden", "nan", "seed")}
    facts |= dict(T=T, named=int("request_ids" in on), kv_len=d.ragged(T, S))
    facts["kv_start"] = d.ragged(T, C) if "compressed_len" in on else ""
    step = draws.aligned(row, facts["dtype"])
    facts |= {f"{name}.at": d.place(3, (0, 1), step) for name in ("q", "swa_kv", "compressed_kv")}
    return facts | {"topk_indices.at": d.place(2, (0,)), "swa_end.at": d.place(1, (0,))}


def drawn(f: draws.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What no token sees of the keys may hold garbage."""
    T, R, S, C, H, D = (f[name] for name in ("T", "R", "S", "C", "H", "D"))
    T = T // R * R
    ends, limits = draws.counts(f["kv_len"] or str(S), T, S), draws.counts(f["kv_start"], T, C)
    assert ends is not None
    if "x0" in f.get("swa_end.at", ""):
        ends = ends[:1].expand(T).clone()
    named = inputs.integers(gen, 0, R - 1, T) if f.get("named") else None
    request = torch.arange(T) // max(1, T // R) if named is None else named.long()
    key, entry = torch.arange(S), torch.arange(C)
    near = (key < ends[:, None]) & (key >= ends[:, None] - min(f["window"], S))  # (T, S)
    chosen, far = None, entry < (C if limits is None else limits[:, None])  # (T, C)
    if f.get("far") == "list":
        chosen = _choose(gen, T, C, f["K"])
        chosen = chosen[:1].expand(T, -1).clone() if "x0" in f.get("topk_indices.at", "") else chosen
        listed = torch.zeros(T, C + 1, dtype=torch.bool).scatter(1, chosen.long() % (C + 1), True)  # -1 is the last
        far = far & listed[:, :C]
    q = draws.numbers(gen, T, H, D) * f["q_by"]
    if f["nan"] == "q" and q.numel():
        q[0, 0] = torch.nan

    def cache(name: str, keys: int, seen: torch.Tensor) -> torch.Tensor:
        """(R, keys, D), of which the tokens see ``seen`` (T, keys)."""
        by_request = torch.zeros(R, keys).index_add(0, request, seen.expand(T, keys).float()) > 0
        rows = draws.numbers(gen, R, keys, D)
        if f["nan"] == "k" and bool(by_request.any()):
            rows[tuple(by_request.nonzero()[0])] = torch.nan
        return draws.cast(draws.hide(rows, by_request, f, name), f["dtype"])

    args = (
        draws.cast(q, f["dtype"]), cache("swa_kv", S, near), ends,
        cache("compressed_kv", C, far) if f.get("far") else None, chosen, limits, named, draws.sink(f, gen, H),
    )  # fmt: skip
    scale = None if f["scale"] == "" else f["scale"]
    return args, dict(scale=scale, window=max(0, f["window"]), normalize=bool(f["normalize"]))
