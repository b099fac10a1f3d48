"""Inputs of paged_kv_cache_write for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.oracle import sampling

# joined=1: tokens are views of one product of q, k and v; sided=1: caches are halves of one buffer; long=1: slots are
# int64; bits=8: caches are E4M3; one=1: a scale is one number.
PARITY = {
    "joined": dict(R=7, Hkv=2, D=64, Dv=64, Np=5, Ps=16, joined=1, sided=1, long=1),
    "apart": dict(R=5, Hkv=3, D=40, Dv=24, Np=9, Ps=5),
    "odd": dict(R=5, Hkv=3, D=33, Dv=33, Np=4, Ps=16, sided=1),
    "e4m3": dict(R=6, Hkv=2, D=64, Dv=64, Np=5, Ps=16, joined=1, sided=1, bits=8),
    "e4m3-odd": dict(R=6, Hkv=3, D=33, Dv=20, Np=20, Ps=1, bits=8, long=1, one=1),
}
DEGENERATE = {
    "one": dict(R=1, Hkv=1, D=1, Dv=1, Np=1, Ps=1),
    "no-tokens": dict(R=0, Hkv=2, D=64, Dv=64, Np=2, Ps=16),
    "no-pages": dict(R=2, Hkv=2, D=64, Dv=64, Np=0, Ps=16, absent=1),
}
_MODELS = {"gptoss": dict(Hkv=8, D=64, Dv=64), "llama": dict(Hkv=8, D=128, Dv=128)}
BENCH = {
    f"{name}{'-e4m3' if bits else ''}-{r}": model | dict(R=r, Np=max(64, r // 8), Ps=16, joined=1, sided=1, bits=bits)
    for name, model in _MODELS.items() for bits in (0, 8) for r in (1, 64, 8192)
}  # fmt: skip


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    R, Np, Ps = dims["R"], dims["Np"], dims["Ps"]
    stored = torch.float8_e4m3fn if dims.get("bits") == 8 or "scales" in features else dtype
    tokens = _tokens(gen, dims, lambda *shape: (8 * torch.randn(*shape, generator=gen)).to(dtype))
    caches = _caches(dims, lambda *shape: torch.randn(*shape, generator=gen).to(stored))
    slot = torch.randperm(max(Np * Ps, R), generator=gen)[:R]
    slot[(1 if R > 2 else 0) :: 1 if dims.get("absent") else max(R, 1)] = -1
    if R == 1 and not dims.get("absent"):
        slot[:] = 0
    scales: tuple[Any, ...] = (None, None)
    if "scales" in features:
        size = () if dims.get("one") else (dims["Hkv"],)
        scales = tuple(torch.rand(size, generator=gen) / 16 + 1 / 64 for _ in range(2))
    return (*tokens, *caches, slot.to(torch.int64 if dims.get("long") else torch.int32), *scales), {}


def _tokens(gen: torch.Generator, dims: dict[str, int], randn: Any) -> tuple[torch.Tensor, ...]:
    R, Hkv, D, Dv = (dims[axis] for axis in ("R", "Hkv", "D", "Dv"))
    if not dims.get("joined"):
        return randn(R, Hkv, D), randn(R, Hkv, Dv)
    joined = randn(R, 4 * Hkv * D + Hkv * D + Hkv * Dv)  # q is four times as wide
    k, v = joined[:, 4 * Hkv * D :].split((Hkv * D, Hkv * Dv), -1)
    return k.unflatten(-1, (Hkv, D)), v.unflatten(-1, (Hkv, Dv))


def _caches(dims: dict[str, int], randn: Any) -> tuple[torch.Tensor, ...]:
    Np, Ps, Hkv, D, Dv = (dims[axis] for axis in ("Np", "Ps", "Hkv", "D", "Dv"))
    if dims.get("sided"):
        k, v = randn(Np, Ps, Hkv, D + Dv).split((D, Dv), -1)
        return k, v
    return randn(Np, Ps, Hkv, D), randn(Np, Ps, Hkv, Dv)


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read tokens and slots, write the tokens to the caches."""
    elements = dims["R"] * dims["Hkv"] * (dims["D"] + dims["Dv"])
    return elements * (dtype.itemsize + (1 if dims.get("bits") == 8 else dtype.itemsize)) + 4 * dims["R"]


def flops(dims: dict[str, int]) -> int:
    """None: numbers are moved."""
    return 0


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    k = d.kernel
    facts: sampling.Facts = dict(
        dtype=k.choice(row.dtypes.split()), ids=k.choice(("i32", "i64")), bits=k.choice((0, 8)),
        Hkv=k.choice((1, 2, 3, 8)), D=k.choice((1, 7, 33, 64, 96, 128, 256)), Ps=k.choice((1, 5, 16, 64)),
    )  # fmt: skip
    facts |= dict(Dv=k.choice((facts["D"], facts["D"], 24, 64)), joined=k.choice((0, 1)), sided=k.choice((0, 1)))
    most = max(1, min(200, d.limits.terms // (64 * facts["Hkv"] * (facts["D"] + facts["Dv"]))))
    facts |= dict(R=0 if d.sometimes(0.02) else d.size(most), Np=d.size(max(1, most // facts["Ps"])))
    facts |= dict(absent=d.pick((0, 0, 3, 10)), scales=k.choice(("", "one", "heads")) if facts["bits"] else "")
    return facts | {"seed": d.call.randrange(1 << 30), "slot.at": d.layout(1)}


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dims = {k: v for k, v in f.items() if isinstance(v, int)}
    stored = "f8e4m3" if f.get("bits") == 8 else f["dtype"]
    tokens = _tokens(gen, dims, lambda *shape: sampling.cast(sampling.randn(gen, *shape), f["dtype"]))
    caches = _caches(dims, lambda *shape: sampling.cast(sampling.randn(gen, *shape), stored))
    R, slots = f["R"], f["Np"] * f["Ps"]
    slot = torch.nn.functional.pad(torch.randperm(slots, generator=gen)[:R], (0, max(0, R - slots)), value=-1)
    if f.get("absent"):
        slot[:: f["absent"]] = -1
    size = dict(one=(), heads=(f["Hkv"],)).get(f.get("scales", ""))
    scales = [None, None] if size is None else [torch.rand(size, generator=gen) + 0.01 for _ in range(2)]
    return (*tokens, *caches, slot.to(DTYPES[f["ids"]]), *scales), {}
