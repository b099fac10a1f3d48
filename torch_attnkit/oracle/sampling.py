"""Random signatures, as a user could call an op with: what ``sample`` and ``generate`` of the ops' cases share.

A signature is a flat dict of facts, numbers and words, that says all of a call: sizes, dtype, scalars, lengths, layouts
(``<argument>.at``) and the seed of its values. ``sample(d, row)`` of an op's cases chooses facts that a row may
accept, ``generate(facts, gen)`` makes the tensors. A fact that is left out has its value in ``DEFAULTS``, the simplest
one, so that a signature can be written down, simplified and repeated. Some facts decide what is compiled; they come
from a generator of their own, so that many signatures share a kernel.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_attnkit.core.op import Call, Kernel
from torch_attnkit.core.spec import DTYPES

Facts = dict[str, Any]
# Of a size 1, of an option what an op does without it. A list of lengths is text, "7/0/3"; "" is an absent tensor.
DEFAULTS: Facts = dict(
    dtype="bf16", B=1, T=1, S=1, Hkv=1, group=1, D=64, Dv=64, seed=0, schedule=0, scale="", causal=0, window=-1,
    sink_tokens=0, softcap=0.0, normalize=1, sink="", scales="", kv_len="", kv_start="", q_by=1, hidden="", nan="",
    same=0, Ps=16, Mp=1, pages="own", spare=0, unused=-1, len_q="1", len_k="1", tail_q=0, tail_k=0, hints="",
    M=1, act=0, blk=16, swizzled=0, routes="", missing=0, gptoss=0, limit=0.0, alpha=1.702, interleaved=0, biases=0,
    globals=0, P=1, R=1, H=1, out="", row_sum=0, lse_by=1, N=1, rank=0, A=1, C=1, y32=0, w32=0, eps=1e-6, y_by=1,
    z_by=1, E=1, K=1, V=1, bias="", over_all=0, renormalize=0, by=1, steps=0, off="", route_scale=1.0, ids="i32",
    table="i32",
)  # fmt: skip
SINKS = {"plain": (), "high": (1e4,), "low": (-1e4,), "never": (-torch.inf,), "mixed": (-torch.inf, 1e4, -1e4, 0.5)}
_BORDERS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_HUGE = (2**31 - 1, 2**31, 2**32 + 3, 2**40)  # "all keys", whatever the width of an integer in a kernel
# Standard deviation of the scores of large queries, whose largest are about 1e3. A hundredth where
# weights are stored in float32: rounding a score of 1e3 changes one by 1e-4, a thousand times what storing does, and
# then the tolerance compares one order of summation with another. With a cap, too, after which the LSE is as small as
# the cap: on an H200, whose tensor cores keep fewer bits of a sum than float32, it was 2.8 times as far off as the
# reference. Not at all where numerators and row sums are the results: what a score is off by, they are off by relative
# to themselves, and a call with few rows shows no such error of the reference.
_LARGE = 300


@dataclass(frozen=True)
class Limits:
    """How large a signature may be: keys of a sequence, and terms of all its products (B Hq T S (D + Dv))."""

    keys: int
    terms: int


class Sampler:
    """One signature's choices. ``kernel`` chooses what is compiled, ``call`` all the rest."""

    def __init__(self, kernel: random.Random, call: random.Random, limits: Limits):
        self.kernel, self.call, self.limits = kernel, call, limits

    def sometimes(self, share: float) -> bool:
        return self.call.random() < share

    def pick(self, options: Sequence[Any]) -> Any:
        return self.call.choice(options)

    def size(self, most: int) -> int:
        """1 to ``most``: mostly beside a border of tiles, sometimes small or anything."""
        kind = self.call.random()
        if kind < 0.6:
            near = self.call.choice([b for b in _BORDERS if b <= most] or [1])
            return max(1, min(most, near * self.call.choice((1, 1, 1, 3)) + self.call.choice((-1, 0, 1))))
        return self.call.randint(1, max(1, min(most, 20) if kind < 0.8 else most))

    def ragged(self, count: int, most: int) -> str:
        """Lengths in [0, most], as text: all, none, or anything."""
        return "/".join(
            str(self.pick((most, most, 0, min(1, most), self.call.randint(0, most), self.call.randint(0, most))))
            for _ in range(max(count, 1))
        )

    def layout(self, axes: int, expandable: Sequence[int] = (), step: int = 1) -> str:
        """How a tensor lies in memory (``parity/signatures.py``). ``step``: rows must start at multiples of it.

        ``expandable`` are the axes along which it may be one and the same.
        """
        if self.sometimes(0.45):
            return ""
        parts = []
        if self.sometimes(0.35):
            parts.append(f"off{self.pick((1, 2, 3, 4, 8, 16))}")
        if self.sometimes(0.4):
            parts.append(f"pad{self.pick((1, 2, 3, 5)) * step}")
        if self.sometimes(0.3):
            parts.append("gap")
        if axes >= 4 and self.sometimes(0.3):
            parts.append("swap")
        if expandable and self.sometimes(0.25):
            parts.append(f"x{self.pick(expandable)}")
        return "+".join(parts)


def expanded(at: str) -> list[int]:
    """The axes along which a tensor placed so is one and the same."""
    return [int(word[1:]) for word in at.split("+") if word[:1] == "x"]


def aligned(row: Kernel, dtype: str) -> int:
    """The number of elements whose multiples a row wants cache rows to start at: those of 16 bytes, or 1."""
    return 16 // DTYPES[dtype].itemsize if any("16 bytes" in why for why in row.needs) else 1


def _value_dims(row: Kernel, dim: int) -> list[int]:
    """What Dv may be beside D."""
    if "Dv" in row.dims:
        return list(row.dims["Dv"])

    def accepted(dim_v: int) -> bool:
        call = Call("", {"D": dim, "Dv": dim_v}, None, torch.float32, (), torch.device("cpu"))  # type: ignore[arg-type]
        return all(ok(call) for why, ok in row.needs.items() if why.startswith("Dv "))

    return [n for n in (dim, dim, 16, 32, 48, 64, 96, 112, 128, 160, 192, 256, 512) if accepted(n)]


def attention(d: Sampler, row: Kernel, groups: Sequence[int]) -> tuple[Facts, set[str]]:
    """What an attention kernel is compiled for, and the features that are on."""
    k, features = d.kernel, set(row.features.split())
    dim = k.choice(row.dims.get("D", (17, 40, 64, 128)))
    on = {name for name in sorted(features) if k.random() < 0.4}
    if "sink_tokens" in on:
        on.add("window")
    if {"sink", "unnormalized"} <= on:
        on.remove(k.choice(("sink", "unnormalized")))
    facts: Facts = dict(
        dtype=k.choice(row.dtypes.split()), D=dim, Dv=k.choice(_value_dims(row, dim)),
        group=k.choice(groups) if "gqa" in features else 1,
        scales=k.choice(("q", "k", "v", "qk", "qkv", "qkv")) if "scales" in on else "",
        causal=int("causal" in on), normalize=int("unnormalized" not in on),
    )  # fmt: skip
    return facts, on


def _terms(facts: Facts, queries: int) -> int:
    """Terms for each key of one KV head. Few queries count as more: their keys and values have to be made, too."""
    return int(max(queries * facts["group"], 16) * (facts["D"] + facts["Dv"]))


def most_keys(d: Sampler, facts: Facts, queries: int) -> int:
    """Keys for which there is room."""
    return max(1, d.limits.terms // _terms(facts, queries))


def batch(d: Sampler, facts: Facts, queries: int, keys: int) -> Facts:
    """KV heads and sequences, as many as there is room for; now and then no sequence."""
    terms = max(1, keys * _terms(facts, queries))
    kv_heads = min(d.pick((1, 1, 2, 2, 3)), max(1, d.limits.terms // terms))
    most = max(1, d.limits.terms // (terms * kv_heads))
    return dict(Hkv=kv_heads, B=0 if d.sometimes(0.02) else min(d.pick((1, 1, 2, 3, 4, 5)), most))


def scores(d: Sampler, facts: Facts, on: set[str], keys: int) -> Facts:
    """Run-time values of what the features switch on, and of what every kernel takes."""
    # What is stored has 24 bits, or a cap has made large scores small, which leaves of them what cancelled.
    exact = facts["dtype"] == "f32" or "softcap" in on
    window = (0, 1, 2, 3, 7, 16, 33, keys // 3, keys // 2, max(0, keys - 1), keys, keys + 1, *_HUGE)
    sinks = (1, 2, 3, 5, 17, keys // 2, keys, *_HUGE[1:])
    return dict(
        scale=d.pick((0.1, 0.25, 1.0, 0.0, -0.1)) if d.sometimes(0.3) else "",
        window=d.pick(window) if "window" in on else -1,
        sink_tokens=max(1, d.pick(sinks)) if "sink_tokens" in on else 0,
        softcap=d.pick((2.0, 15.0, 30.0, 50.0)) if "softcap" in on else 0.0,
        sink=d.pick(tuple(SINKS)) if "sink" in on else "",
        q_by=_LARGE // (100 if exact else 1) if d.sometimes(0.2) and facts["normalize"] else 1,
        hidden=d.pick(("nan", "nan", "inf")) if d.sometimes(0.6) else "",
        nan=d.pick("qk") if d.sometimes(0.05) else "",
        seed=d.call.randrange(1 << 30),
    )


def randn(gen: torch.Generator, *shape: int) -> torch.Tensor:
    """float32 of mean 0 and deviation 1, nearly normal. They are the same to the bit on every machine: only uniform
    numbers, which are integers over a power of two, and sums."""
    a, b, c = (torch.rand(*shape, generator=gen) for _ in range(3))
    return ((a + b) + (c - 1.5)) * 2


def cast(t: torch.Tensor, dtype: str) -> torch.Tensor:
    """``t`` in a dtype of the table, inside what it holds; E4M3 has no infinity."""
    return (t.clamp(-448, 448) if dtype == "f8e4m3" else t).to(DTYPES[dtype])


def counts(text: str, count: int, most: int) -> torch.Tensor | None:
    """The int32 lengths of a fact, cut to ``count`` and to ``most``; missing ones repeat the last."""
    if text == "":
        return None
    given = [min(int(n), most) for n in str(text).split("/")]
    return torch.tensor((given + given[-1:] * count)[:count], dtype=torch.int32)


def hide(t: torch.Tensor, seen: torch.Tensor, facts: Facts, name: str) -> torch.Tensor:
    """``t`` with garbage where ``seen``, a bool for each of its rows, allows nobody to look."""
    for axis in expanded(facts.get(f"{name}.at", "")):
        seen = seen.any(axis, keepdim=True)
    return t.masked_fill(~seen[..., None], float(facts["hidden"])) if facts["hidden"] else t


def qkv(
    facts: Facts,
    gen: torch.Generator,
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    seen: torch.Tensor,
    names: tuple[str, str] = ("k", "v"),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tensors with these axes before D and Dv; ``seen`` has the axes of ``keys``, or 1 where it does not depend."""
    q = randn(gen, *queries, facts["D"]) * facts["q_by"]
    k, v = randn(gen, *keys, facts["D"]), randn(gen, *keys, facts["Dv"])
    if facts["nan"] == "q" and q.numel():
        q.view(-1, facts["D"])[0] = torch.nan
    if facts["nan"] == "k" and bool(seen.any()):
        k[tuple(seen.nonzero()[0])] = torch.nan
    k, v = (hide(t, seen, facts, name) for t, name in zip((k, v), names, strict=True))
    q, k, v = (cast(t, facts["dtype"]) for t in (q, k, v))
    return q, k, v


def sink(facts: Facts, gen: torch.Generator, heads: int) -> torch.Tensor | None:
    if not facts["sink"]:
        return None
    values, t = SINKS[facts["sink"]], randn(gen, heads)
    return torch.tensor([values[h % len(values)] for h in range(heads)]) if values else t


def scales(facts: Facts, gen: torch.Generator, *shape: int) -> list[torch.Tensor | None]:
    """Of q, k and v: powers of two and numbers between, or None."""
    return [0.5 + 1.5 * torch.rand(*shape, generator=gen) if n in facts["scales"] else None for n in "qkv"]


def score_arguments(facts: Facts) -> dict[str, Any]:
    return dict(
        scale=None if facts["scale"] == "" else facts["scale"],
        window=facts["window"], sink_tokens=facts["sink_tokens"], softcap=facts["softcap"],
    )  # fmt: skip


def experts(kernel: random.Random) -> tuple[int, int]:
    """Experts of a router, and how many of them a token gets: few of many, or many of few."""
    E = kernel.choice((1, 2, 7, 31, 32, 33, 64, 100, 128, 144, 256, 384, 512, 520, 1000, 1024, 1025, 1400))
    few = (1, 2, 3, 4, 6, 8, 10, 16)
    return E, min(E, kernel.choice((*few, *few, 17, 40, E) if E <= 256 else few))


def tokens(d: Sampler, each: int) -> int:
    """Tokens of a router for ``each`` comparisons of a token; now and then none, or thousands."""
    most = max(1, d.limits.terms // (200 * max(each, 32)))
    return 0 if d.sometimes(0.02) else min(most, d.pick((1, 1, 2, 3, 5, 8, 17, 33, 2500)))


def logits(facts: Facts, gen: torch.Generator) -> torch.Tensor:
    """(R, E) of deviation ``by``; ``steps``: so many to 1, that many are equal. ``off``: -inf here and there, or first
    rows of nothing else."""
    R, E = facts["R"], facts["E"]
    x: torch.Tensor = randn(gen, R, E) * facts["by"]
    x = (x * facts["steps"]).round() / facts["steps"] if facts["steps"] else x
    off = torch.rand(R, E, generator=gen) < 0.3
    off[:2] |= torch.tensor(facts["off"] == "row")
    return x.masked_fill(off, -torch.inf) if facts["off"] else x
