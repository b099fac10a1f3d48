"""Inputs of sparse_fmha_with_swa for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.formats import kv_cache
from torch_attnkit.kernels.sparse.sm90.plan import LEAST_BYTES
from torch_attnkit.oracle import fp4, fp4_rows, inputs, sampling

# fmt: 0 none, 1 fp8, 2 nvfp4 (gs=1: with a global scale), 3 mxfp4; rope: channels in bfloat16. Pages of Ps keys.
PARITY = {
    "prefill": dict(Tq=24, Hq=4, R=2, S=40, C=12, K=5, D=64, window=8, Ps=5),
    "decode": dict(Tq=3, Hq=16, R=3, S=130, C=50, K=20, D=64, window=128, Ps=16),
    "deepseek": dict(Tq=4, Hq=9, R=1, S=140, C=70, K=64, D=512, window=128, Ps=64),
    "long": dict(Tq=2, Hq=20, R=2, S=130, C=3000, K=2600, D=64, window=128, Ps=64),
    "fp8": dict(Tq=4, Hq=7, R=2, S=70, C=50, K=20, D=128, window=64, Ps=16, fmt=1, rope=64),
    "nvfp4": dict(Tq=2, Hq=5, R=1, S=70, C=30, K=20, D=128, window=64, Ps=8, fmt=2, rope=48, gs=1),
    "mxfp4": dict(Tq=2, Hq=5, R=1, S=70, C=30, K=20, D=128, window=64, Ps=8, fmt=3, rope=64),
}
DEGENERATE = {
    "one": dict(Tq=1, Hq=4, R=1, S=1, C=1, K=1, D=64, window=1, Ps=1),
    "nothing": dict(Tq=4, Hq=3, R=2, S=0, C=0, K=0, D=64, window=128, Ps=4),
    "empty": dict(Tq=0, Hq=4, R=2, S=8, C=4, K=2, D=64, window=4, Ps=4),
    "one_fp8": dict(Tq=1, Hq=4, R=1, S=1, C=1, K=1, D=128, window=1, Ps=1, fmt=1, rope=64),
    "bytes": dict(Tq=2, Hq=4, R=1, S=4, C=4, K=2, D=128, window=4, Ps=4, fmt=2, rope=0),
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
_FP4 = {"nvfp4": 2, "mxfp4": 3}
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
    | {f"fp8-64h-{t}": dict(Tq=t, Hq=64, R=t, S=256, C=8192, K=512, fmt=1, **_CSA) for t in (1, 8, 32, 128)}
    | {f"fp8-128h-{t}": dict(Tq=t, Hq=128, R=t, S=256, C=8192, K=1024, fmt=1, **_CSA) for t in (1, 8, 32, 128)}
    | {f"{name}-64h-32": dict(Tq=32, Hq=64, R=32, S=256, C=8192, K=512, fmt=n, **_CSA) for name, n in _FP4.items()}
    | {f"{name}-64h-32-page64": dict(Tq=32, Hq=64, R=32, S=256, C=8192, K=512, fmt=n, Ps=64, paged=1, **_CSA)
       for name, n in (("csa", 0), ("fp8", 1))}
)  # fmt: skip
_ENCODED = 1 << 16  # different rows of an encoded cache: those of a bench are gigabytes, which would take minutes


def _choose(gen: torch.Generator, Tq: int, C: int, K: int) -> torch.Tensor:
    """(Tq, K) distinct entries out of C in any order, a quarter of them absent; all absent beyond C."""
    order = torch.rand(Tq, C, generator=gen).argsort(-1)[:, :K].to(torch.int32)
    out = torch.full((Tq, K), -1, dtype=torch.int32)
    out[:, : order.shape[1]] = order
    return out.masked_fill(torch.rand(Tq, K, generator=gen) < 0.25, -1)


def _paged(
    gen: torch.Generator, rows: torch.Tensor, seen: torch.Tensor, page: int, unused: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (R, S, Rb) in pages (Np, Ps, Rb) in random order, and their table (R, M).

    ``seen`` (R, S) says at which keys somebody looks. For pages where nobody does the table has ``unused``, or None:
    one that is nobody's.
    """
    R, S, Rb = rows.shape
    M = -(-S // page)
    pages = torch.nn.functional.pad(rows, (0, 0, 0, M * page - S)).reshape(R * M, page, Rb)
    used = torch.nn.functional.pad(seen, (0, M * page - seen.shape[1])).reshape(R, M, page).any(-1)  # (R, M)
    order = torch.randperm(R * M + 1, generator=gen)
    cache = rows.new_zeros(R * M + 1, page, Rb)
    cache[order[:-1]] = pages
    absent = int(order[-1]) if unused is None else unused
    return cache, order[:-1].view(R, M).to(torch.int32).masked_fill(~used, absent)


def _seen(
    request: torch.Tensor,  # (Tq,)
    keep: torch.Tensor,  # (Tq, keys)
    requests: int,
) -> torch.Tensor:
    """(R, keys): which keys of a request some token of it sees."""
    return torch.zeros(requests, keep.shape[1]).index_add(0, request, keep.float()) > 0


def _near(end: torch.Tensor, keys: int, window: int) -> torch.Tensor:
    """(Tq, keys): the window."""
    key = torch.arange(keys)
    return (key < end[:, None]) & (key >= end[:, None] - min(window, keys))


def _far(chosen: torch.Tensor | None, limit: torch.Tensor | None, tokens: int, entries: int) -> torch.Tensor:
    """(Tq, C): the entries that count."""
    keep = torch.ones(tokens, entries, dtype=torch.bool)
    if limit is not None:
        keep = torch.arange(entries) < limit[:, None]
    if chosen is not None:
        listed = torch.zeros(tokens, entries + 1, dtype=torch.bool)  # -1 is the last
        keep = keep & listed.scatter(1, chosen.long() % (entries + 1), True)[:, :entries]
    return keep


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    Tq, R, S, C, D, Ps = (dims.get(name, 1) for name in ("Tq", "R", "S", "C", "D", "Ps"))
    format, rope = kv_cache.FORMATS[dims.get("fmt", 0)], dims.get("rope", 64)
    scale = fp4.global_scales(gen) if dims.get("gs") else None
    compressed = {"compressed", "topk", "compressed_len", "compressed_paged"} & set(features)

    def cache(keys: int) -> torch.Tensor:
        if format == "none":
            return inputs.normal(gen, dtype, R, keys, D)
        rows = kv_cache.encode_rows(inputs.normal(gen, dtype, min(R * keys, _ENCODED), D), format, rope, scale)
        if R * keys > _ENCODED:
            rows = rows[torch.randint(0, _ENCODED, (R * keys,), generator=gen)]
        return rows.view(R, keys, -1)

    q, near, end = inputs.normal(gen, dtype, Tq, dims["Hq"], D), cache(S), inputs.integers(gen, 0, S, Tq)
    far, near_table, far_table = cache(C) if compressed else None, None, None
    chosen = _choose(gen, Tq, C, dims["K"]) if "topk" in features else None
    limit = inputs.lengths(gen, Tq, C) if "compressed_len" in features else None
    named = inputs.integers(gen, 0, R - 1, Tq) if "request_ids" in features else None
    request = torch.arange(Tq) * R // max(Tq, 1) if named is None else named.long()
    if "swa_paged" in features:
        near, near_table = _paged(gen, near, _seen(request, _near(end, S, dims["window"]), R), Ps)
    if "compressed_paged" in features and far is not None:
        C += -C % Ps  # without a list or a length a token sees all slots of its pages
        far, far_table = _paged(gen, far, _seen(request, _far(chosen, limit, Tq, C), R), Ps)
    sink = inputs.normal(gen, torch.float32, dims["Hq"]) if "sink" in features else None
    args = (q, near, end, far, chosen, limit, named, sink, near_table, far_table, scale)
    return args, dict(window=dims["window"], normalize="unnormalized" not in features, format=format, rope_dim=rope)


def bench(dims: dict[str, int], dtype: torch.dtype, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Full windows and lists: the last token of a request ends its window at the last key, those before it earlier."""
    Tq, R, C, K = dims["Tq"], dims["R"], dims["C"], dims["K"]
    features = tuple(name for name in ("compressed", "topk", "sink") if dims.get(name))
    args, kwargs = make(dims | dict(Tq=Tq, C=C, K=0), dtype, features, gen)
    end = dims["S"] - Tq // R + 1 + torch.arange(Tq) % (Tq // R)
    chosen = torch.rand(Tq, C, generator=gen).topk(K).indices.to(torch.int32) if dims.get("topk") else None
    caches: Any = [(args[1], None), (args[3], None)]
    if dims.get("paged"):
        caches = [_paged(gen, t, torch.ones(t.shape[:2], dtype=torch.bool), dims["Ps"]) for t, _ in caches]
    (near, near_table), (far, far_table) = caches
    return (
        args[0], near, end.to(torch.int32), far, chosen, *args[5:8], near_table, far_table, *args[10:]
    ), kwargs  # fmt: skip


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read q and both caches once, as far as any token can look, write out and lse."""
    each = dims["Tq"] // dims["R"]
    near = min(dims["S"], each - 1 + dims["window"])  # tokens of a request see neighbouring windows
    far = min(dims["C"], each * dims["K"]) if dims.get("topk") else dims["C"]
    format = kv_cache.FORMATS[dims.get("fmt", 0)]
    row = kv_cache.row_bytes(format, dims["D"], 64) * (dtype.itemsize if format == "none" else 1)
    outside = 2 * dims["Tq"] * dims["Hq"] * dims["D"] * dtype.itemsize
    return dims["R"] * (near + far) * row + outside + dims["Tq"] * (dims["Hq"] + 1 + dims["K"]) * 4


def flops(dims: dict[str, int]) -> int:
    """Two products, two operations a term."""
    seen = min(dims["S"], dims["window"]) + (dims["K"] if dims.get("topk") else dims["C"])
    return 4 * dims["Tq"] * dims["Hq"] * seen * dims["D"]


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    """The facts ``kv_len`` are the windows' ends, ``kv_start`` the numbers of entries that count. ``near_page`` and
    ``far_page`` are the keys of a page, 0 for a cache without."""
    k = d.kernel
    on = {name for name in sorted(row.features.split()) if k.random() < 0.5}
    if {"sink", "unnormalized"} <= on:
        on.remove(k.choice(("sink", "unnormalized")))
    facts: sampling.Facts = dict(
        dtype=k.choice(row.dtypes.split()), D=k.choice(row.dims["D"]), normalize=int("unnormalized" not in on),
        far="" if not {"compressed", "topk", "compressed_len"} & on else "list" if "topk" in on else "all",
        format=k.choice(("none", *kv_cache.FORMATS)), rope=0, gs="",
    )  # fmt: skip
    if facts["format"] != "none":
        block = kv_cache.BLOCK[facts["format"]]
        facts["rope"] = k.choice([n for n in (64, 64, 0, 16, 48, 128) if (facts["D"] - n) % block == 0])
    if facts["format"] == "nvfp4" and k.random() < 0.7:
        facts |= dict(gs=d.pick((1.0, 731.37, 1 / 3)))
    near_page, far_page = "swa_paged" in on, "compressed_paged" in on and facts["far"] != ""
    H, R = d.pick((1, 2, 3, 8, 16, 20, 33, 64, 65, 128)), d.pick((1, 1, 2, 3))
    most = max(2, d.limits.terms // (max(H, 16) * 2 * facts["D"]))  # keys of all tokens
    S = 0 if d.sometimes(0.05) else d.size(min(d.limits.keys, most))
    C = 0 if not facts["far"] or d.sometimes(0.05) else d.size(min(d.limits.keys, most))
    facts |= dict(near_page=d.pick((1, 7, 16, 64)) * near_page, far_page=d.pick((1, 7, 16, 64)) * far_page)
    S, C = (n + -n % max(1, page) for n, page in ((S, facts["near_page"]), (C, facts["far_page"])))
    facts |= dict(H=H, R=R, S=S, C=C, K=d.size(min(C + 3, d.limits.keys)) if facts["far"] == "list" else 0)
    # Few tokens are split over clusters, and many take turns on a multiprocessor.
    each = min(d.pick((1, 1, 2, 5, 17, 33, 140, 300)), max(1, most // (R * max(1, S + C))))
    T = 0 if d.sometimes(0.02) else R * each
    chosen = sampling.scores(d, facts, on | {"window"}, S)
    facts |= {name: chosen[name] for name in ("scale", "window", "sink", "q_by", "hidden", "nan", "seed")}
    facts |= dict(unused=d.pick((-1, 2**31 - 1)), T=T, named=int("request_ids" in on), kv_len=d.ragged(T, S))
    facts["kv_start"] = d.ragged(T, C) if "compressed_len" in on else ""
    step = sampling.aligned(row, facts["dtype"])
    of_bytes = step if facts["format"] == "none" else LEAST_BYTES
    facts |= {"q.at": d.layout(3, (0, 1), step)}
    facts |= {f"{name}.at": d.layout(3, (0, 1), of_bytes) for name in ("swa_kv", "compressed_kv")}
    facts |= {f"{name}_block_table.at": d.layout(2) for name in ("swa", "compressed")}
    return facts | {"topk_indices.at": d.layout(2, (0,)), "swa_end.at": d.layout(1, (0,))}


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What no token sees of the keys may hold garbage."""
    T, R, S, C, H, D = (f[name] for name in ("T", "R", "S", "C", "H", "D"))
    T = T // R * R
    S, C = (n + -n % max(1, f.get(page, 0)) for n, page in ((S, "near_page"), (C, "far_page")))
    ends, limits = sampling.counts(f["kv_len"] or str(S), T, S), sampling.counts(f["kv_start"], T, C)
    assert ends is not None
    if "x0" in f.get("swa_end.at", ""):
        ends = ends[:1].expand(T).clone()
    named = inputs.integers(gen, 0, R - 1, T) if f.get("named") else None
    request = torch.arange(T) // max(1, T // R) if named is None else named.long()
    chosen = None
    if f.get("far") == "list":
        chosen = _choose(gen, T, C, f["K"])
        chosen = chosen[:1].expand(T, -1).clone() if "x0" in f.get("topk_indices.at", "") else chosen
    q = sampling.randn(gen, T, H, D) * f["q_by"]
    if f["nan"] == "q" and q.numel():
        q[0, 0] = torch.nan
    near = _generate_cache(f, gen, "swa", _seen(request, _near(ends, S, f["window"]), R), f.get("near_page", 0))
    far: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
    if f.get("far"):
        seen = _seen(request, _far(chosen, limits, T, C), R)
        far = _generate_cache(f, gen, "compressed", seen, f.get("far_page", 0))
    args = (
        sampling.cast(q, f["dtype"]), near[0], ends, far[0], chosen, limits, named, sampling.sink(f, gen, H), near[1],
        far[1], fp4_rows.global_of(f),
    )  # fmt: skip
    scale = None if f["scale"] == "" else f["scale"]
    kwargs = dict(scale=scale, window=max(0, f["window"]), normalize=bool(f["normalize"]))
    return args, kwargs | dict(format=f.get("format") or "none", rope_dim=f.get("rope", 0))


def _generate_cache(
    f: sampling.Facts, gen: torch.Generator, name: str, seen: torch.Tensor, page: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A cache of which the keys ``seen`` (R, keys) are looked at, and its table, if it lies in pages."""
    format = f.get("format") or "none"
    rows = sampling.randn(gen, *seen.shape, f["D"])  # (R, keys, D)
    if f["nan"] == "k" and bool(seen.any()):
        rows[tuple(seen.nonzero()[0])] = torch.nan
    if format == "none":
        rows = sampling.cast(rows, f["dtype"])
    else:
        rows = kv_cache.encode_rows(rows, format, f.get("rope", 0), fp4_rows.global_of(f))
    table = None
    if page:
        # Where nobody looks is a matter of pages, too, and of the places that these get.
        (rows, table), (shown, _) = (
            _paged(torch.Generator().manual_seed(f["seed"]), t, seen, page, f["unused"])
            for t in (rows, seen[..., None])
        )
        seen = shown[..., 0]
    if format == "none":
        return sampling.hide(rows, seen, f, f"{name}_kv"), table
    if f["hidden"]:  # bytes that are NaN in every format
        for axis in sampling.expanded(f.get(f"{name}_kv.at", "")):
            seen = seen.any(axis, keepdim=True)
        rows = rows.masked_fill(~seen[..., None], 0xFF)
    return rows, table
