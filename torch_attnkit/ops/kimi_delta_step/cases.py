"""Inputs of kimi_delta_step for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.ops.gated_delta_step.cases import states
from torch_attnkit.oracle import sampling

# decay: 1 as Kimi Linear begins, 2 next to none, 3 none at all; bound: lower_bound is its negative; alike=1: tokens of
# a sequence have one key, and beta is next to 1; absent: every so many sequences have no state, and as many states are
# not kept; joined=1: q, k and v are columns of one product; plain=1: no norm of q and k; drafts: accepted is given;
# t_gates=1: A_log and dt_bias in the model dtype.
PARITY = {
    "kimi": dict(B=2, n=1, H=3, K=128, V=128, decay=1, joined=1),
    "glm": dict(B=2, n=2, H=2, K=128, V=64, decay=1, bound=5),
    "drafts": dict(B=5, n=4, H=2, K=128, V=64, decay=2, drafts=1, absent=3, t_gates=1),
    "one-key": dict(B=2, n=8, H=2, K=128, V=48, decay=3, alike=1),
    "odd": dict(B=3, n=2, H=3, K=96, V=37, decay=1, absent=3, plain=1),
    "wide": dict(B=1, n=3, H=1, K=256, V=20, decay=1, drafts=1, bound=1),
}
DEGENERATE = {
    "one": dict(B=1, n=1, H=1, K=32, V=1, decay=1),
    "no-sequences": dict(B=0, n=1, H=2, K=64, V=64, decay=1),
    "no-state": dict(B=2, n=2, H=2, K=64, V=40, decay=1, absent=1),
    "no-values": dict(B=2, n=1, H=2, K=64, V=0, decay=1),
}
EXTRAS = (
    ("nan:q", "kimi"), ("nan:k", "kimi"), ("nan:v", "odd"), ("nan:a", "kimi"), ("nan:b", "odd"), ("nan:A_log", "glm"),
    ("nan:dt_bias", "kimi"), ("nan:state", "glm"),
)  # fmt: skip
_KIMI = dict(n=1, H=32, K=128, V=128, decay=1, joined=1)
BENCH = {f"kimi_linear-{b}": _KIMI | dict(B=b) for b in (1, 32, 128, 512)}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    gates = dtype if dims.get("t_gates") else torch.float32
    return made(dims, gen, lambda t: t.to(dtype), lambda t: t.to(gates))


def made(dims: dict[str, int], gen: torch.Generator, model: Any, gate: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``model`` and ``gate`` bring float32 to the dtypes of the tensors and of A_log and dt_bias."""
    B, n, H, K, V = (dims[axis] for axis in ("B", "n", "H", "K", "V"))
    randn = lambda *shape: torch.randn(*shape, generator=gen)
    heads = [randn(B, n, H, dim) for dim in (K, K, V)]
    a, b = randn(B, n, H, K), randn(B, n, H)
    if dims.get("alike"):
        heads[1], b = heads[1][:, :1].expand(B, n, H, K), b + 9
    heads = [model(x) for x in heads]
    if dims.get("joined"):
        widths = [H * dim for dim in (K, K, V)]
        whole = torch.cat([x.flatten(2) for x in heads], 2)
        heads = [x.unflatten(2, (H, -1)) for x in whole.split(widths, 2)]
    rate = 16 * torch.rand(H, generator=gen).clamp(min=1e-3)
    log = {1: rate.log(), 2: rate.log() - 8, 3: torch.full((H,), -torch.inf)}[dims["decay"]]
    state, index = states(dims | {"Hv": H}, gen)
    accepted = torch.randint(0, n + 2, (B,), generator=gen).int() if dims.get("drafts") else None  # cut off at 1 and n
    scalars: dict[str, Any] = dict(qk_l2norm=not dims.get("plain"))
    if dims.get("plain"):
        scalars["scale"] = 0.3
    if bound := dims.get("bound"):
        scalars["lower_bound"] = -float(bound)
    return (*heads, model(a), model(b), gate(log), gate(randn(H, K) + 1), state, index, accepted), scalars


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """A state read and one written a token, the rest once."""
    B, n, H, K, V = (dims[axis] for axis in ("B", "n", "H", "K", "V"))
    return B * H * (4 * (1 + n) * K * V + n * (3 * K + 2 * V + 1) * dtype.itemsize)


def flops(dims: dict[str, int]) -> int:
    """Three products with a state, and its decay."""
    return 7 * dims["B"] * dims["n"] * dims["H"] * dims["K"] * dims["V"]


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    k = d.kernel
    facts: sampling.Facts = dict(
        dtype=k.choice(row.dtypes.split()), ids=k.choice(("i32", "i64")), n=k.choice((1, 1, 1, 2, 3, 5, 8)),
        K=32 * k.choice((1, 2, 3, 4, 4, 8)), V=k.choice((1, 16, 37, 64, 128)), t_gates=k.choice((0, 1)),
        plain=k.choice((0, 0, 1)), drafts=k.choice((0, 1)), bound=k.choice((0, 0, 1, 5)),
    )  # fmt: skip
    facts |= dict(H=d.pick((1, 1, 2, 3, 5)), decay=d.pick((1, 1, 2, 3)), alike=d.pick((0, 0, 1)), joined=d.pick((0, 1)))
    most = d.limits.terms // (8 * facts["n"] * facts["H"] * facts["K"] * facts["V"])
    facts |= dict(absent=d.pick((0, 0, 1, 2, 3)), B=0 if d.sometimes(0.02) else d.size(max(1, min(most, 6))))
    return facts | {"seed": d.call.randrange(1 << 30), "a.at": d.layout(4), "state.at": d.layout(4)}


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dims = {"n": 1, "H": 1, "decay": 1} | {k: v for k, v in f.items() if isinstance(v, int)}
    gate = f["dtype"] if f.get("t_gates") else "f32"
    args, scalars = made(dims, gen, lambda t: sampling.cast(t, f["dtype"]), lambda t: sampling.cast(t, gate))
    key, ids = args[1], DTYPES[f["ids"]]
    if dims.get("plain"):  # about of length 1: longer keys make errors grow from token to token
        key = key * dims["K"] ** -0.5
    index, accepted = args[8].to(ids), None if args[9] is None else args[9].to(ids)
    return (args[0], key, *args[2:8], index, accepted), scalars
