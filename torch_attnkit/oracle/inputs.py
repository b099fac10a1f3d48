"""Inputs that several ops' cases share: random tensors, lengths, page tables. Everything comes from the generator."""

from __future__ import annotations

import torch

DECODE_EXTRAS = (
    ("nan:q", "ragged", "all"),
    ("nan:k_cache", "ragged", "all"),
    ("nan:v_cache", "ragged", "all"),
    ("nan:v_cache", "ragged", "kv_start"),
    ("nan:k_cache", "long", "window"),
    ("nan:v_cache", "long", "window"),
    ("nan:sink", "ragged", "sink"),
    ("sink:-inf", "ragged", "all"),
    ("sink:inf", "long", "sink"),
)


def normal(gen: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=gen).to(dtype)


def scales(gen: torch.Generator, on: bool, *shape: int) -> list[torch.Tensor | None]:
    """The scales of q, k and v: float32 around 1, or None for each."""
    return [torch.exp2(torch.rand(*shape, generator=gen) * 2 - 1) if on else None for _ in "qkv"]


def integers(gen: torch.Generator, low: int, high: int, *shape: int) -> torch.Tensor:
    """int32 values in [low, high]."""
    return torch.randint(low, high + 1, shape, generator=gen, dtype=torch.int32)


def lengths(gen: torch.Generator, n: int, longest: int, *, unseen: bool = False) -> torch.Tensor:
    """n int32 lengths in [0, longest]: the first is the longest, the last of three or more is 0; ``unseen``: the second
    is, instead."""
    out = integers(gen, min(1, longest), longest, n)
    out[:1] = longest
    if unseen:
        out[1:2] = 0
    elif n >= 3:
        out[-1] = 0
    return out


def starts(gen: torch.Generator, length: torch.Tensor, *, unseen: bool = False) -> torch.Tensor:
    """One int32 start per length, in [0, length]; ``unseen``: the last is its length."""
    out = (torch.rand(length.shape, generator=gen) * (length + 1)).to(torch.int32).minimum(length)
    if unseen:
        out[-1:] = length[-1:]
    return out


def block_table(gen: torch.Generator, length: torch.Tensor, page: int, n_pages: int, columns: int) -> torch.Tensor:
    """A (B, columns) int32 page table that gives every sequence its own pages, in random order.

    Entries past a sequence's length are -1: nothing may look at them.
    """
    order = torch.randperm(n_pages, generator=gen).to(torch.int32)
    table = torch.full((len(length), columns), -1, dtype=torch.int32)
    taken = 0
    for b, n in enumerate(length.tolist()):
        need = -(-n // page)
        table[b, :need] = order[taken : taken + need]
        taken += need
    return table


def forgotten(table: torch.Tensor, seen: torch.Tensor, page: int, value: int = -1) -> torch.Tensor:
    """``table`` (B, Mp) with ``value`` for every second page of which ``seen`` (B, Mp * page) has no key.

    The others stay: what lies in a page that nobody sees may not matter either.
    """
    used = seen.unflatten(1, (table.shape[1], page)).any(2)  # (B, Mp)
    return table.masked_fill(~used & (torch.arange(table.shape[1]) % 2 == 0), value)


def score_arguments(features: tuple[str, ...], length: int) -> dict[str, float]:
    """The arguments of the features that the attention ops share: a window of a third of ``length``, and a softcap."""
    return dict(
        window=max(1, length // 3) if {"window", "sink_tokens"} & set(features) else -1,
        sink_tokens=3 if "sink_tokens" in features else 0,
        softcap=2.0 if "softcap" in features else 0.0,
    )
