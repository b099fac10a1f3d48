"""Inputs of route_hash for parity and bench."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.oracle import inputs, sampling

# wide: token ids and table are int64, else int32.
PARITY = {
    "odd": dict(R=5, E=144, V=33, K=6, wide=1),
    "flash": dict(R=9, E=256, V=100, K=6, wide=0),
    "deep": dict(R=3, E=70, V=5, K=40, wide=0),
}
DEGENERATE = {
    "one": dict(R=1, E=1, V=1, K=1, wide=0),
    "empty": dict(R=0, E=16, V=10, K=2, wide=0),
}
EXTRAS = (("logits:-inf", "odd", "all"),)
BENCH = {
    f"{e}-{r}": dict(R=r, E=e, V=129280, K=6, wide=0, renormalize=1) for e in (256, 384) for r in (1, 64, 1024, 8192)
}


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    integer = torch.int64 if dims["wide"] else torch.int32
    args = (
        inputs.normal(gen, dtype, dims["R"], dims["E"]),
        inputs.integers(gen, 0, dims["V"] - 1, dims["R"]).to(integer),
        inputs.integers(gen, 0, dims["E"] - 1, dims["V"], dims["K"]).to(integer),
    )
    return args, dict(route_scale=1.5, renormalize="renormalize" in features)


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """Read the token's id, its table row and the K logits that it names; write weights and indices."""
    integer = 8 if dims["wide"] else 4
    return dims["R"] * (integer + dims["K"] * (integer + dtype.itemsize + 8))


def flops(dims: dict[str, int]) -> int:
    """The score counted as eight operations an expert."""
    return dims["R"] * dims["K"] * 10


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    k = d.kernel
    facts: sampling.Facts = dict(
        dtype=k.choice(row.dtypes.split()), K=k.choice((1, 2, 3, 6, 8, 17, 32, 33, 70)), renormalize=k.choice((0, 1)),
        ids=k.choice(("i32", "i64")), table=k.choice(("i32", "i64")),
    )  # fmt: skip
    facts |= dict(E=d.pick((1, 2, 7, 33, 144, 256, 1000)), V=d.pick((1, 2, 13, 100)))
    facts |= dict(R=sampling.tokens(d, facts["E"]), by=d.pick((1, 1, 20, 200)), steps=d.pick((0, 0, 1)))
    facts |= dict(off=d.pick(("", "", "some", "row")), route_scale=d.pick((1.0, 1.5, -2.0, 0.0)))
    facts |= {"seed": d.call.randrange(1 << 30), "logits.at": d.layout(2, (0,))}
    return facts | {"token_ids.at": d.layout(1), "tid2eid.at": d.layout(2, (0,))}


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Rows of the table that no token uses hold what is no expert, unless all its rows are one and the same."""
    logits = sampling.cast(sampling.logits(f, gen), f["dtype"])
    ids = inputs.integers(gen, 0, f["V"] - 1, f["R"])
    table = inputs.integers(gen, 0, f["E"] - 1, f["V"], f["K"])
    if not sampling.expanded(f.get("tid2eid.at", "")):
        used = torch.zeros(f["V"], dtype=torch.bool).index_fill(0, ids.long(), True)
        table = torch.where(used[:, None], table, torch.tensor((-(2**31), 2**31 - 1), dtype=torch.int32)[f["V"] % 2])
    args = (logits, ids.to(DTYPES[f["ids"]]), table.to(DTYPES[f["table"]]))
    return args, dict(route_scale=f["route_scale"], renormalize=bool(f["renormalize"]))
