"""Inputs of gated_delta_rule for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.oracle import sampling

# Lengths beside the borders of chunks (8, 16, 32, 64 tokens). decay: 1 as Qwen3-Next begins, 2 next to none, 3 none at
# all; alike=1: tokens of a sequence have one key, 2: two in turn that differ by a hundredth, and beta is next to its
# largest; twice=1: beta up to 2; past: 1 every other sequence begins anew, in a slot of garbage; absent: every so many
# sequences have no slot; joined=1: q, k and v are columns of one product; plain=1: no norm of q and k; t_beta=1: beta
# in the model dtype; tail: tokens behind the last sequence.
PARITY = {
    "qwen": dict(lengths=(65, 31), Hk=1, Hv=2, K=128, V=128, decay=1, joined=1, past=1),
    "borders": dict(lengths=(1, 32, 0, 33, 16), Hk=2, Hv=2, K=64, V=24, decay=2, past=1, absent=4, tail=3, t_beta=1),
    "one-key": dict(lengths=(96,), Hk=1, Hv=2, K=128, V=40, decay=3, alike=1),
    "two-keys": dict(lengths=(70, 8), Hk=1, Hv=1, K=128, V=32, decay=3, alike=2),
    "twice": dict(lengths=(9, 3), Hk=1, Hv=1, K=96, V=64, decay=2, alike=1, twice=1),
    "plain": dict(lengths=(40, 9), Hk=2, Hv=4, K=32, V=16, decay=1, plain=1),
}
DEGENERATE = {
    "one": dict(lengths=(1,), Hk=1, Hv=1, K=32, V=8, decay=1),
    "no-sequences": dict(lengths=(), Hk=2, Hv=2, K=64, V=64, decay=1),
    "no-tokens": dict(lengths=(0, 0), Hk=1, Hv=1, K=64, V=64, decay=1, past=1),
    "no-state": dict(lengths=(17, 2), Hk=1, Hv=2, K=64, V=40, decay=1, absent=1),
    "no-values": dict(lengths=(5,), Hk=1, Hv=2, K=64, V=0, decay=1),
}
# Prompts of Qwen3.5: of 4B to 35B, of 397B, and one of eight shares of it.
BENCH = {
    "qwen3_5-35b-8192": dict(lengths=(8192,), Hk=16, Hv=32, K=128, V=128, decay=1, joined=1, past=1),
    "qwen3_5-397b-4x8192": dict(lengths=(8192,) * 4, Hk=16, Hv=64, K=128, V=128, decay=1, joined=1, past=1),
    "qwen3_5-397b-share-8192": dict(lengths=(8192,), Hk=2, Hv=8, K=128, V=128, decay=1, joined=1, past=1),
}


def make(
    dims: dict[str, Any], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    beta = dtype if dims.get("t_beta") else torch.float32
    return made(dims, gen, lambda t: t.to(dtype), lambda t: t.to(beta))


def made(
    dims: dict[str, Any], gen: torch.Generator, model: Any, strength: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``model`` and ``strength`` bring float32 to the dtypes of the tensors and of beta."""
    Hk, Hv, K, V = (dims[axis] for axis in ("Hk", "Hv", "K", "V"))
    lengths = torch.tensor(dims["lengths"], dtype=torch.int32)
    B, tokens = len(lengths), int(lengths.sum()) + dims.get("tail", 0)
    randn = lambda *shape: torch.randn(*shape, generator=gen)
    q, k, v, b = randn(tokens, Hk, K), randn(tokens, Hk, K), randn(tokens, Hv, V), randn(tokens, Hv)
    if alike := dims.get("alike"):
        differ = randn(alike, Hk, K) * (0.01 if alike > 1 else 1.0)
        k = (randn(Hk, K) + differ)[torch.arange(tokens) % alike]
        b = b + 9
    if dims.get("joined"):
        both = model(torch.cat([x.flatten(1) for x in (q, k, v)], 1))
        heads = both.split((Hk * K, Hk * K, Hv * V), 1)
        q, k, v = (x.unflatten(1, (count, -1)) for x, count in zip(heads, (Hk, Hk, Hv), strict=True))
    else:
        q, k, v = map(model, (q, k, v))
    rate = 16 * torch.rand(Hv, generator=gen).clamp(min=1e-3)
    rate = {1: rate, 2: rate * 2.0**-11, 3: torch.zeros(Hv)}[dims["decay"]]
    g = -rate * torch.nn.functional.softplus(randn(tokens, Hv) + 1)
    beta = b.sigmoid() * (2.0 if dims.get("twice") else 1.0)
    state, index, past = states(dims, B, gen)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0).int()])
    scalars: dict[str, Any] = dict(qk_l2norm=not dims.get("plain"))
    if dims.get("plain"):
        scalars["scale"] = 0.3
        k = k * 0.1
    return (q, k, v, g, strength(beta), state, offsets, index, past), scalars


def states(dims: dict[str, Any], B: int, gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Slots in a random order, with two that nobody names."""
    Hv, K, V = (dims[axis] for axis in ("Hv", "K", "V"))
    index = torch.randperm(B + 2, generator=gen)[:B].int()
    state = torch.randn(B + 2, Hv, V, K, generator=gen)
    past = None
    if dims.get("past"):
        past = torch.arange(B, dtype=torch.int32) % 2 * 7
        state[index[past == 0].long()] = 1e30  # nobody reads it
    if absent := dims.get("absent", 0):
        index[absent - 1 :: absent] = -1
    return state, index, past


def _tokens(dims: dict[str, Any]) -> int:
    return int(sum(dims["lengths"]))


def bytes(dims: dict[str, Any], dtype: torch.dtype) -> int:
    """Tokens and gates once, a state read and written a sequence."""
    Hk, Hv, K, V = (int(dims[axis]) for axis in ("Hk", "Hv", "K", "V"))
    token = (2 * Hk * K + 2 * Hv * V) * dtype.itemsize + 8 * Hv
    return _tokens(dims) * token + 8 * len(dims["lengths"]) * Hv * K * V


def flops(dims: dict[str, Any]) -> int:
    """Three products with a state a token, and its decay."""
    return 7 * _tokens(dims) * int(dims["Hv"] * dims["K"] * dims["V"])


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    k = d.kernel
    facts: sampling.Facts = dict(
        dtype=k.choice(row.dtypes.split()), ids=k.choice(("i32", "i64")), K=16 * k.choice((1, 2, 4, 6, 8, 8)),
        V=8 * k.choice((1, 2, 5, 8, 16)), t_beta=k.choice((0, 1)), plain=k.choice((0, 0, 1)),
    )  # fmt: skip
    facts |= dict(Hk=d.pick((1, 1, 2, 3)), decay=d.pick((1, 1, 2, 3)), alike=d.pick((0, 0, 1, 2)), twice=d.pick((0, 1)))
    facts |= dict(Hv=facts["Hk"] * d.pick((1, 2, 4)), absent=d.pick((0, 0, 1, 2, 3)), joined=d.pick((0, 1)))
    facts |= dict(tail=d.pick((0, 0, 3)), past=d.pick((0, 1)))
    most = d.limits.terms // (8 * facts["Hv"] * facts["K"] * facts["V"])
    B = 0 if d.sometimes(0.02) else d.pick((1, 1, 2, 3))
    facts |= dict(len_q=d.ragged(B, d.size(max(1, min(most // max(B, 1), 200)))) if B else "")
    return facts | {"seed": d.call.randrange(1 << 30), "state.at": d.layout(4), "state_index.at": d.layout(1)}


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dims: dict[str, Any] = {"Hk": 1, "Hv": 1, "decay": 1} | {k: v for k, v in f.items() if isinstance(v, int)}
    dims["lengths"] = tuple(int(n) for n in f["len_q"].split("/") if n)
    # A correction of twice what is wrong, or more, makes errors grow from token to token.
    if dims.get("plain"):
        dims["alike"] = 0
    if dims.get("plain") or dims.get("alike"):
        dims["twice"] = 0
    strength = f["dtype"] if f.get("t_beta") else "f32"
    args, scalars = made(dims, gen, lambda t: sampling.cast(t, f["dtype"]), lambda t: sampling.cast(t, strength))
    ids = DTYPES[f["ids"]]
    whole = [t if t is None else t.to(ids) for t in args[6:]]
    return (*args[:6], *whole), scalars
