"""Inputs of causal_conv1d for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.oracle import sampling

# Lengths beside the borders of runs of 1, 4 and 16 tokens, all 1 in steps; in "steps-padded" their mean is below that.
# past=1: every other sequence begins anew, in a slot of garbage; absent: every so many sequences have no slot; tail:
# tokens behind the last sequence; view=1: x is columns of a wider tensor, wide=1: states are; none=1: no activation.
PARITY = {
    "qwen": dict(lengths=(40, 3), C=136, W=4, Ws=4, past=1),
    "steps": dict(lengths=(1, 1, 1, 1), C=64, W=4, Ws=3, absent=3),
    "steps-four": dict(lengths=(1, 1, 1), C=72, W=4, Ws=4, past=1, absent=3),
    "steps-odd": dict(lengths=(1, 1, 1), C=19, W=4, Ws=4),
    "steps-padded": dict(lengths=(1, 3, 0, 0, 0), C=136, W=3, Ws=2, past=1, tail=1),
    "drafts": dict(lengths=(4, 1, 0, 9), C=72, W=4, Ws=6, past=1, wide=1),
    "borders": dict(lengths=(16, 0, 17, 2, 33), C=24, W=3, Ws=5, past=1, tail=3, view=1),
    "two": dict(lengths=(20, 1), C=19, W=2, Ws=1, none=1),
}
DEGENERATE = {
    "one": dict(lengths=(1,), C=1, W=4, Ws=3),
    "no-sequences": dict(lengths=(), C=8, W=4, Ws=3),
    "no-tokens": dict(lengths=(0, 0), C=8, W=4, Ws=4, past=1),
    "no-state": dict(lengths=(5,), C=8, W=4, Ws=3, absent=1),
    "no-channels": dict(lengths=(5,), C=0, W=4, Ws=3),
}
# Qwen3.5's q, k and v of 16 and 32 heads of 128.
BENCH = {
    "qwen3_5-8192": dict(lengths=(8192,), C=8192, W=4, Ws=4, past=1),
    **{f"qwen3_5-steps-{b}": dict(lengths=(1,) * b, C=8192, W=4, Ws=4) for b in (1, 32, 512)},
}


def make(
    dims: dict[str, Any], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return made(dims | {"bias": int("bias" in features)}, gen, lambda t: t.to(dtype))


def made(dims: dict[str, Any], gen: torch.Generator, model: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``model`` brings float32 to the dtype of the tensors."""
    C, W, Ws = (dims[axis] for axis in ("C", "W", "Ws"))
    lengths = torch.tensor(dims["lengths"], dtype=torch.int32)
    B, tokens = len(lengths), int(lengths.sum()) + dims.get("tail", 0)
    randn = lambda *shape: torch.randn(*shape, generator=gen)
    more = 16 * dims.get("view", 0)
    x, weight = model(randn(tokens, C + more))[:, more:], model(randn(C, W))
    bias = model(randn(C)) if dims.get("bias") else None
    index = torch.randperm(B + 2, generator=gen)[:B].int()
    state = model(randn(B + 2, C, Ws + dims.get("wide", 0)))[:, :, dims.get("wide", 0) :]
    past = None
    if dims.get("past"):
        past = torch.arange(B, dtype=torch.int32) % 2 * 7
        state[index[past == 0].long()] = 1e4  # nobody reads it
    if absent := dims.get("absent", 0):
        index[absent - 1 :: absent] = -1
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0).int()])
    return (x, weight, state, offsets, index, bias, past), dict(activation="none" if dims.get("none") else "silu")


def bytes(dims: dict[str, Any], dtype: torch.dtype) -> int:
    """Read x, write out; weights once, and a state read and written a sequence."""
    C, W, Ws = (int(dims[axis]) for axis in ("C", "W", "Ws"))
    return (2 * int(sum(dims["lengths"])) + W + 2 * Ws * len(dims["lengths"])) * C * dtype.itemsize


def flops(dims: dict[str, Any]) -> int:
    """A product and a sum a term."""
    return 2 * int(sum(dims["lengths"])) * int(dims["C"] * dims["W"])


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    k = d.kernel
    facts: sampling.Facts = dict(
        dtype=k.choice(row.dtypes.split()), ids=k.choice(("i32", "i64")), W=k.choice((2, 3, 4, 4)),
        none=k.choice((0, 0, 1)), bias=k.choice(("", "1")), past=k.choice((0, 1)),
    )  # fmt: skip
    facts |= dict(Ws=facts["W"] - 1 + k.choice((0, 1, 3)), C=d.size(300), absent=d.pick((0, 0, 1, 2, 3)))
    facts |= dict(tail=d.pick((0, 0, 3)), view=d.pick((0, 0, 1)), wide=d.pick((0, 0, 1)))
    B = 0 if d.sometimes(0.02) else d.pick((1, 1, 2, 3, 5))
    facts |= dict(len_q=d.ragged(B, d.size(100)) if B else "")
    return facts | {"seed": d.call.randrange(1 << 30), "x.at": d.layout(2), "state_index.at": d.layout(1)}


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dims: dict[str, Any] = {"C": 1, "W": 2} | {k: v for k, v in f.items() if isinstance(v, int)}
    dims |= dict(lengths=tuple(int(n) for n in f["len_q"].split("/") if n), bias=int(bool(f.get("bias"))))
    args, scalars = made(dims, gen, lambda t: sampling.cast(t, f["dtype"]))
    ids = DTYPES[f["ids"]]
    offsets, index, bias, past = args[3:]
    return (*args[:3], offsets.to(ids), index.to(ids), bias, None if past is None else past.to(ids)), scalars
