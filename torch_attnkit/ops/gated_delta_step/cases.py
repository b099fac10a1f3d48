"""Inputs of gated_delta_step for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.oracle import sampling

# decay: 1 as Qwen3-Next begins, 2 next to none, 3 none at all; alike=1: tokens of a sequence have one key, and beta is
# next to its largest; absent: every so many sequences have no state, and as many states are not kept; joined=1: q, k
# and v are columns of one product; plain=1: no norm of q and k; twice=1: beta up to 2; drafts: accepted is given;
# t_gates=1: A_log and dt_bias in the model dtype.
PARITY = {
    "qwen": dict(B=2, n=1, Hk=2, Hv=4, K=128, V=128, decay=1, joined=1),
    "drafts": dict(B=5, n=4, Hk=2, Hv=4, K=128, V=64, decay=2, drafts=1, absent=3, t_gates=1),
    "one-key": dict(B=2, n=8, Hk=1, Hv=2, K=128, V=48, decay=3, alike=1, twice=1),
    "odd": dict(B=3, n=2, Hk=3, Hv=3, K=96, V=37, decay=1, absent=3, plain=1),
    "wide": dict(B=1, n=3, Hk=1, Hv=1, K=256, V=20, decay=1, drafts=1),
}
DEGENERATE = {
    "one": dict(B=1, n=1, Hk=1, Hv=1, K=32, V=1, decay=1),
    "no-sequences": dict(B=0, n=1, Hk=2, Hv=2, K=64, V=64, decay=1),
    "no-state": dict(B=2, n=2, Hk=1, Hv=2, K=64, V=40, decay=1, absent=1),
    "no-values": dict(B=2, n=1, Hk=1, Hv=2, K=64, V=0, decay=1),
}
EXTRAS = (
    ("nan:q", "qwen"), ("nan:k", "qwen"), ("nan:v", "odd"), ("nan:a", "qwen"), ("nan:b", "odd"), ("nan:A_log", "qwen"),
    ("nan:dt_bias", "drafts"), ("nan:state", "drafts"),
)  # fmt: skip
_QWEN = dict(n=1, Hk=16, Hv=32, K=128, V=128, decay=1, joined=1)
BENCH = {f"qwen3_next-{b}": _QWEN | dict(B=b) for b in (1, 32, 128, 512)}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    gates = dtype if dims.get("t_gates") else torch.float32
    return made(dims, gen, lambda t: t.to(dtype), lambda t: t.to(gates))


def made(dims: dict[str, int], gen: torch.Generator, model: Any, gate: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``model`` and ``gate`` bring float32 to the dtypes of the tensors and of A_log and dt_bias."""
    B, n, Hk, Hv, K, V = (dims[axis] for axis in ("B", "n", "Hk", "Hv", "K", "V"))
    randn = lambda *shape: torch.randn(*shape, generator=gen)
    q, k, v = randn(B, n, Hk, K), randn(B, n, Hk, K), randn(B, n, Hv, V)
    a, b = randn(B, n, Hv), randn(B, n, Hv)
    if dims.get("alike"):
        k, b = k[:, :1].expand_as(k), b + 9
    if dims.get("joined"):
        both = model(torch.cat([x.flatten(2) for x in (q, k, v)], 2))
        heads = both.split((Hk * K, Hk * K, Hv * V), 2)
        q, k, v = (x.unflatten(2, (count, -1)) for x, count in zip(heads, (Hk, Hk, Hv), strict=True))
    else:
        q, k, v = map(model, (q, k, v))
    rate = 16 * torch.rand(Hv, generator=gen).clamp(min=1e-3)
    log = {1: rate.log(), 2: rate.log() - 8, 3: torch.full((Hv,), -torch.inf)}[dims["decay"]]
    state, index = states(dims, gen)
    accepted = None
    if dims.get("drafts"):
        accepted = torch.randint(0, n + 2, (B,), generator=gen).int()  # cut off at 1 and n
    scalars = dict(qk_l2norm=not dims.get("plain"), beta_scale=2.0 if dims.get("twice") else 1.0)
    if not scalars["qk_l2norm"]:
        scalars["scale"] = 0.3
    return (q, k, v, model(a), model(b), gate(log), gate(randn(Hv) + 1), state, index, accepted), scalars


def states(dims: dict[str, int], gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots in a random order, with two that nobody names."""
    B, n, Hv, K, V = (dims[axis] for axis in ("B", "n", "Hv", "K", "V"))
    index = torch.randperm(B * n + 2, generator=gen)[: B * n].view(B, n).int()
    state = torch.randn(B * n + 2, Hv, V, K, generator=gen)
    if absent := dims.get("absent", 0):
        index[::absent] = -1
        index[:, n - 1 :: absent + 1] = -1
    return state, index


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """A state read and one written a token, the rest once."""
    B, n, Hk, Hv, K, V = (dims[axis] for axis in ("B", "n", "Hk", "Hv", "K", "V"))
    return B * (4 * (1 + n) * Hv * K * V + n * (2 * Hk * K + 2 * Hv * V + 2 * Hv) * dtype.itemsize)


def flops(dims: dict[str, int]) -> int:
    """Three products with a state, and its decay."""
    return 7 * dims["B"] * dims["n"] * dims["Hv"] * dims["K"] * dims["V"]


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    k = d.kernel
    facts: sampling.Facts = dict(
        dtype=k.choice(row.dtypes.split()), ids=k.choice(("i32", "i64")), n=k.choice((1, 1, 1, 2, 3, 5, 8)),
        K=32 * k.choice((1, 2, 3, 4, 4, 8)), V=k.choice((1, 16, 37, 64, 128)), t_gates=k.choice((0, 1)),
        plain=k.choice((0, 0, 1)), drafts=k.choice((0, 1)),
    )  # fmt: skip
    facts |= dict(Hk=d.pick((1, 1, 2, 3)), decay=d.pick((1, 1, 2, 3)), alike=d.pick((0, 0, 1)), twice=d.pick((0, 1)))
    facts |= dict(Hv=facts["Hk"] * d.pick((1, 2, 4)), absent=d.pick((0, 0, 1, 2, 3)), joined=d.pick((0, 1)))
    most = d.limits.terms // (8 * facts["n"] * facts["Hv"] * facts["K"] * facts["V"])
    facts |= dict(B=0 if d.sometimes(0.02) else d.size(max(1, min(most, 6))))
    return facts | {"seed": d.call.randrange(1 << 30), "state.at": d.layout(4), "state_index.at": d.layout(2)}


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dims = {"n": 1, "Hk": 1, "Hv": 1, "decay": 1} | {k: v for k, v in f.items() if isinstance(v, int)}
    gate = f["dtype"] if f.get("t_gates") else "f32"
    args, scalars = made(dims, gen, lambda t: sampling.cast(t, f["dtype"]), lambda t: sampling.cast(t, gate))
    key, ids = args[1], DTYPES[f["ids"]]
    if dims.get("plain"):  # about of length 1: longer keys make errors grow from token to token
        key = key * dims["K"] ** -0.5
    index, accepted = args[8].to(ids), None if args[9] is None else args[9].to(ids)
    return (args[0], key, *args[2:8], index, accepted), scalars
